"""A node that trains under faults, for some minutes: nothing acknowledged is lost, nothing leaks."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_plan import CALM_S, FaultKind
from node_soak import NodeSoak, drives_reason
from places import memory_folder

DURATION_S = float(os.environ.get("EVERSTEP_SOAK_S", "300"))
SEED = int(os.environ.get("EVERSTEP_SOAK_SEED", str(random.randrange(1 << 32))))


@pytest.mark.timeout(DURATION_S + 400)
def test_a_node_under_faults_loses_nothing_and_leaks_nothing(
    tell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVERSTEP_SOCKET", str(tmp_path / "unused"))
    with memory_folder() as folder:
        record = NodeSoak(folder, DURATION_S, SEED).run()
    tell(
        f"node soak: seed {SEED}, {len(record.faults)} faults, {dict(record.counts)}, starts {dict(record.starts)}"
    )
    assert not record.failures, f"EVERSTEP_SOAK_SEED={SEED} repeats the faults\n" + "\n".join(record.failures)
    assert record.counts["checkpoints acknowledged"] > DURATION_S / 10
    assert record.counts["states compared"] >= len(record.starts)
    if DURATION_S >= 250 and not drives_reason():
        assert {fault.kind for fault in record.faults} == set(FaultKind)
    assert record.faults or DURATION_S < 3 * CALM_S
