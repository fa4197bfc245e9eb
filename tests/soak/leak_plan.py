"""What a daemon holds at like moments, and whether it grows: pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

MIB = 1 << 20

SLACK = {"memory_bytes": 24 * MIB, "descriptors": 24, "threads": 24, "memfds": 12, "aio_contexts": 0}
"""How much more a later moment may have than the first one of the same daemon: segments are open while they are
written, readers of a cache come back one by one, a pool of threads fills up, an allocator keeps what it had. A daemon
lives for minutes there and takes a thousand checkpoints: a descriptor, thread or memfd lost with each, or 25 KiB, is
seen. Pools may come to 32 threads there; a first look has found 9 to 14 of them: 6 for calls, 4 for each of two drives,
one for each of twelve slots that wait while a drive hangs, one for each of six trainers that restores. Smaller leaks of
memory are what tests/daemon/test_many_clients.py looks for (1 KiB of each)."""

BOUND = {"stagings": 12, "shared_batches": 66}
"""What no moment has more of, whatever was before: two stagings for each of six trainers, made when first needed; the
window of the one group that shares batches (32 behind its fastest job, 32 before it) and one of each job being copied.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one daemon holds while all trainers are attached and nothing is done to the node."""

    at_s: float
    pid: int
    memory_bytes: int
    """Private memory, arenas and what is mapped from files apart."""
    descriptors: int
    """Those of stagings and shared batches apart."""
    threads: int
    memfds: int
    """That are open or mapped, each once; stagings and shared batches apart."""
    aio_contexts: int
    stagings: int
    """Memfds that readers of a cache, and jobs that share batches, put samples into."""
    shared_batches: int
    """Memfds of batches that not every job has taken."""

    def facts(self) -> dict[str, object]:
        """Return what a record says of it."""
        return asdict(self)


def held_throughout(looks: Sequence[Holding]) -> Holding:
    """Return the least of each kind: a shard that is written takes threads and files for a moment, a leak stays."""
    first = looks[0]
    return replace(
        first,
        memory_bytes=min(each.memory_bytes for each in looks),
        descriptors=min(each.descriptors for each in looks),
        threads=min(each.threads for each in looks),
        memfds=min(each.memfds for each in looks),
        aio_contexts=min(each.aio_contexts for each in looks),
        stagings=min(each.stagings for each in looks),
        shared_batches=min(each.shared_batches for each in looks),
    )


def leaks(holdings: Sequence[Holding]) -> list[str]:
    """Return what grew within the life of a daemon or passed its bound, a sentence each."""
    first: dict[int, Holding] = {}
    found: list[str] = []
    for each in holdings:
        base = first.setdefault(each.pid, each)
        for field in fields(each):
            if field.name in SLACK:
                before, now = getattr(base, field.name), getattr(each, field.name)
                if now > before + SLACK[field.name]:
                    found.append(
                        f"daemon {each.pid}: {field.name} {before} at {base.at_s:.0f} s, {now} at {each.at_s:.0f} s"
                    )
        found += [
            f"daemon {each.pid}: {getattr(each, name)} {name} at {each.at_s:.0f} s, {most} at most"
            for name, most in BOUND.items()
            if getattr(each, name) > most
        ]
    return found


def growth_per_hour(holdings: Sequence[Holding]) -> float | None:
    """Return how fast memory grew in the longest life of a daemon, in bytes per hour; None: none has two moments."""
    lives: dict[int, list[Holding]] = {}
    for each in holdings:
        lives.setdefault(each.pid, []).append(each)
    longest = max(lives.values(), key=lambda life: life[-1].at_s - life[0].at_s, default=[])
    if len(longest) < 2 or longest[-1].at_s == longest[0].at_s:
        return None
    return (longest[-1].memory_bytes - longest[0].memory_bytes) / (longest[-1].at_s - longest[0].at_s) * 3600
