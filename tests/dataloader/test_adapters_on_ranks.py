"""Accelerate and Lightning over two ranks of torchrun on gloo: each sample once, and resumed exactly the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep.dataloader import Ledger
from everstep.dataloader.order_format import OrderKind, OrderSpec
from everstep.dataloader.order_plan import order

SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_S = 110.0
"""Of one start of both ranks, whose imports take most of it."""
State = dict[str, Any]


def whole(n: int, epoch: int = 0) -> list[int]:
    return order(OrderSpec(kind=OrderKind.PERMUTED, seed=3), epoch, n).at(np.arange(n)).tolist()


def said_by_ranks(script: str, *arguments: str) -> list[State]:
    """Run a script on two ranks; return the lines that they said, those of rank 0 first."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-P", *torchrun, str(SCRIPTS / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        cwd="/",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def test_accelerate_gathers_each_sample_once(tmp_path: Path) -> None:
    """In steps of 8: 22 and 17 leave 3 for each rank, and 1 for both; 23 leave 3 for each, and then 1 for both.

    By weight alone one of these ranks gets 4 of the 23 and the other 3, which must be gathered otherwise.
    """
    pytest.importorskip("accelerate", reason="pip install 'everstep[frameworks]'")
    lines = said_by_ranks("accelerate_rank.py", str(tmp_path))
    ways: list[dict[str, list[list[int]]]] = [
        {line["way"]: line["steps"] for line in lines if line["rank"] == rank} for rank in range(2)
    ]
    assert ways[0] == ways[1], "what is gathered is the same on both"
    found = {way: [i for step in steps for i in step] for way, steps in ways[0].items()}
    assert found == {
        "even": whole(22),
        "fewer than ranks": whole(17),
        "a step more": whole(23),
        "drop": whole(23)[:22],
        "objects": whole(23),
        "padded": whole(23),
        "resumed": whole(22),
    }
    assert {way: len(steps) for way, steps in ways[0].items()} == dict.fromkeys(found, 3) | {"a step more": 4}


@pytest.mark.timeout(240)
def test_lightning_resumes_on_both_ranks(tmp_path: Path) -> None:
    """17 samples in steps of 8: two steps, then in new processes the last sample of the epoch, and the next epoch."""
    pytest.importorskip("pytorch_lightning", reason="pip install 'everstep[frameworks]'")
    first = said_by_ranks("lightning_rank.py", str(tmp_path), "first")
    rest = said_by_ranks("lightning_rank.py", str(tmp_path), "rest")
    assert [line["state"]["cursor"] for line in first] == [16, 16]
    assert in_steps(first) == whole(17)[:16]
    assert in_steps(rest) == whole(17)[16:] + whole(17, 1)
    assert [len(line["padding"]) for line in first + rest] == [0, 0, 0, 2]
    ledgers = [
        Ledger.from_state(json.loads((tmp_path / f"ledger-{rank}.json").read_text())) for rank in (0, 1)
    ]
    assert rest[0]["state"] == rest[1]["state"]
    assert Ledger.verify(ledgers, rest[0]["state"]) == []


def in_steps(ranks: list[State]) -> list[int]:
    """Return what was trained, step by step, rank by rank; a rank that only padded trained nothing in that step."""
    steps = zip(*(rank["trained"] for rank in ranks), strict=True)
    return [i for step in steps for part in step for i in part]
