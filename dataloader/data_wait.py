"""How long this process's loops have waited for batches of everstep's loaders: a sum that only grows.

The run tells its daemon (proto/frames.py, Costs), so that people see where training stands still for data.
"""

_waited_s = 0.0


def add(seconds: float) -> None:
    """A loop waited for a batch. Of one thread: loops that share a process count as one only roughly."""
    global _waited_s
    _waited_s += seconds


def total_s() -> float:
    """Return the sum since this process began."""
    return _waited_s
