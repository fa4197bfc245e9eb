"""Drafts that are well-formed and say what cannot be: refused when they are sealed, and the daemon goes on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep.checkpoint.draft_format import encode_draft
from everstep.checkpoint.manifest_types import Draft
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames

BAD, GOOD = CheckpointId(1, 1), CheckpointId(1, 2)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[FakeTrainer]:
    (tmp_path / "d0").mkdir()
    socket_path = tmp_path / "s" / "data.sock"
    with daemon_process(socket_path), FakeTrainer(socket_path) as made:
        made.open_run([tmp_path / "d0"])
        made.begin_attempt(1)
        yield made


def moved(offset_bytes: int) -> Callable[[Draft], Draft]:
    return lambda draft: replace(
        draft,
        segments=tuple(
            replace(plan, slot_offset_bytes=plan.slot_offset_bytes + offset_bytes) for plan in draft.segments
        ),
    )


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (moved(1 << 24), "CorruptDataError", "of a slot of"),
        (moved(1 << 40), "CorruptDataError", "of a slot of"),
        (moved(512), "CorruptDataError", "not a multiple of"),
        (lambda draft: replace(draft, pieces=()), "CorruptDataError", "belongs to no leaf"),
        (lambda draft: replace(draft, leaves=(), pieces=()), "CorruptDataError", "belongs to no leaf"),
        (lambda draft: replace(draft, parent=BAD), "CorruptDataError", "which is not older"),
    ],
    ids=["outside", "huge", "odd", "no pieces", "no leaves", "its own parent"],
)
def test_a_draft_that_cannot_be_is_refused_by_name_and_the_daemon_goes_on(
    trainer: FakeTrainer, change: Callable[[Draft], Draft], code: str, reason: str
) -> None:
    arena = trainer.make_arena(trainer.layout(), slot_count=2)
    arena.begin(BAD)
    arena.seal_draft(BAD, encode_draft(change(arena.draft(BAD))))
    failed = trainer.event(frames.PersistFailed)
    assert isinstance(failed, frames.PersistFailed)
    assert (failed.step, failed.code) == (BAD.step, code)
    assert reason in failed.message
    slot = 1
    if code == "CorruptDataError":
        freed = trainer.event(frames.SlotFree)
        assert isinstance(freed, frames.SlotFree)
        slot = freed.slot
        assert slot == 0
    arena.save(GOOD, seed=1, slot=slot)
    assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
    arena.close()
