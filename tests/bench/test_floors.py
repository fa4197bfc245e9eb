"""What bench-stall compares with does what it says: else everstep would be measured beside less."""

from pathlib import Path

import torch
from floors import WrittenCopy
from gpt import Job, job_of

from everstep.checkpoint.manifest_types import BLOCK_SIZE_BYTES


def state_of(job: Job) -> bytes:
    return b"".join(each.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for each in job.tensors())


def test_a_written_copy_lies_whole_in_its_file_each_time(tmp_path: Path) -> None:
    job, path = job_of(2**20), tmp_path / "written"
    with WrittenCopy(job, path) as copy:
        for _ in range(2):
            job.step()
            copy()
            state, found = state_of(job), path.read_bytes()
            assert len(found) % BLOCK_SIZE_BYTES == 0
            assert found[: len(state)] == state
