"""Processes that were ended and cannot end: a thread of them waits in the kernel, e.g. for a drive that hangs."""

from pathlib import Path

_PROC = Path("/proc")


def is_dead_but_held(pid: int) -> bool:
    """Tell whether a process was ended, and a thread of it still waits in a call that nothing interrupts.

    It runs no more instruction, and keeps what it held, such as locks and sockets, until that call returns.
    """
    tasks = _PROC / str(pid) / "task"
    try:
        states = {task.name: _state(task) for task in tasks.iterdir()}
    except OSError:
        return False  # it is gone, or nobody may look
    return states.pop(str(pid), "") in {"Z", "X"} and "D" in states.values()


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""  # it has ended just now
