"""A restart that finds its last checkpoint in memory, beside copying as many bytes out of a newly mapped memfd.

python bench/stall_restore.py MIB STORAGE ORDER    # one trainer; restore_row() starts and kills them
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from pathlib import Path

import torch
from gpt import Job, new_job
from paired import Row, ratios, row

import everstep
from everstep.hook.mapped_arena import MappedArena
from everstep.hook.received_leaves import copy_thread_count

MIB = 2**20
PIECE_BYTES = 4 * MIB
GOAL = 0.9
NEVER = 10**9


def restore_rows(name: str, mib: int, storage: Path, pairs: int) -> list[Row]:
    """Return how fast a state of `mib` MiB comes back from memory, verified: beside memcpy, and in seconds."""
    found: list[tuple[float, float]] = []
    for number in range(pairs + 1):
        words = [sys.executable, __file__, str(mib), str(storage), str(number)]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as trainer:
            assert trainer.stdout is not None
            said = json.loads(trainer.stdout.readline() or "{}")
            trainer.send_signal(signal.SIGKILL)  # its last checkpoint stays in the daemon's memory
        assert said["source"] == ("memory" if number else ""), said
        if number:
            found.append((said["memcpy_s"], said["restore_s"]))
    return [
        row(f"{name}: restore from memory, verified / memcpy out of a new mapping", ratios(found), goal=GOAL),
        row(f"{name}: restore from memory", [ours for _, ours in found], goal=None, unit="s"),
    ]


def main() -> None:
    """Restore, measure, take one more checkpoint, say so, and wait to be killed."""
    mib, storage, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    job = new_job(mib * MIB)
    memory = _written_memory(sum(each.nbytes for each in job.planned()))
    with everstep.attach(
        "again", model=job.model, optimizer=job.optimizer, storage=storage, every=NEVER
    ) as run:
        memcpy_s = _memcpy_s(memory, job) if number % 2 else 0.0
        began_s = time.perf_counter()
        restored = run.restore()
        restore_s = time.perf_counter() - began_s
        memcpy_s = memcpy_s or _memcpy_s(memory, job)
        for _ in range(2):  # the arena is made at the first one
            job.step()
            run.checkpoint()
            run.step()
            assert run.wait()
        assert run.report().checkpoints_complete, run.report()
        source = "" if restored is None else restored.source
        print(json.dumps({"source": source, "restore_s": restore_s, "memcpy_s": memcpy_s}), flush=True)
        signal.pause()


def _written_memory(size_bytes: int) -> int:
    """Return a memfd of so many bytes, none of them a hole."""
    fd = os.memfd_create("bench")
    block = os.urandom(MIB) * (PIECE_BYTES // MIB)
    for begin in range(0, size_bytes, PIECE_BYTES):
        os.pwrite(fd, block[: size_bytes - begin], begin)
    return fd


def _memcpy_s(fd: int, job: Job) -> float:
    """Return the seconds of copying a newly mapped memfd into newly allocated tensors, by as many threads."""
    began_s = time.perf_counter()
    source = MappedArena(0, os.dup(fd), os.fstat(fd).st_size, 1)
    targets = [torch.empty_like(each) for each in job.planned()]
    pieces: list[tuple[int, int, int]] = []
    offset = 0
    for target in targets:
        for begin in range(0, target.nbytes, PIECE_BYTES):
            size_bytes = min(PIECE_BYTES, target.nbytes - begin)
            pieces.append((target.data_ptr() + begin, source.address + offset, size_bytes))
            offset += size_bytes
    with ThreadPoolExecutor(copy_thread_count()) as pool:
        for _ in pool.map(memmove, *zip(*pieces, strict=True)):
            pass
    took_s = time.perf_counter() - began_s
    source.close()
    return took_s


if __name__ == "__main__":
    main()
