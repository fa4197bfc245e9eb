"""Jobs as users start them: scripts and processes of their own, which have only the group's name in common."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import share_job

JOBS, EPOCHS = 3, 2
BATCHES = -(-share_job.SAMPLES // share_job.BATCH_SIZE)

SCRIPT = """
import json, os, random, sys
import torch
from everstep.dataloader import SharedLoader

RATE = {rate}  # what a search tries: no two scripts are the same
LOG = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

class Noted(torch.utils.data.Dataset):
    def __len__(self):
        return 38

    def __getitem__(self, index):
        value = random.random()
        os.write(LOG, f"{{index}} {{value!r}}\\n".encode())
        return index, torch.tensor([value], dtype=torch.float64)

loader = SharedLoader(
    Noted(), batch_size=4, shuffle=True, seed=5, num_workers=int(sys.argv[2]), multiprocessing_context="fork",
    group="search", jobs=3, gather_s=3600.0,
)
epochs = [[[i, v] for ids, x in loader for i, v in zip(ids.tolist(), x[:, 0].tolist())] for _ in range(2)]
print(json.dumps([epochs, loader.received_count]))
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_three_scripts_prepare_each_sample_once_between_them(
    daemon: subprocess.Popen[bytes], tmp_path: Path, alone: list[list[list[float]]], workers: int
) -> None:
    """Each gets what a DataLoader alone gives it. Only the first batch is prepared by all, to show that they agree."""
    log, jobs = tmp_path / "log", list[subprocess.Popen[str]]()
    try:
        for number in range(JOBS):
            script = tmp_path / f"train{number}.py"
            script.write_text(SCRIPT.format(rate=10.0**-number))
            command = [sys.executable, "-P", str(script), str(log), str(workers)]
            jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        outputs = [job.communicate(timeout=60) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [0] * JOBS, outputs
    told = [json.loads(output) for output, _ in outputs]
    assert [epochs for epochs, _ in told] == [alone[:EPOCHS]] * JOBS
    first = alone[0][: share_job.BATCH_SIZE]
    rows = [line.split() for line in log.read_text().splitlines()]
    counts = Counter((int(index), float(value)) for index, value in rows)
    expected = {(row[0], row[1]): JOBS if row in first else 1 for epoch in alone[:EPOCHS] for row in epoch}
    assert {row: count for row, count in counts.items() if row in expected} == expected
    assert [received for _, received in told] == [EPOCHS * BATCHES - 1] * JOBS, (
        "all but the first, through the group"
    )
