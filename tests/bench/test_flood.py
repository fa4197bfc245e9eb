"""What the row "persist under a flood" stands on: every kind of question is asked, 5 MB are parsed anew each time."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from flood import LEAF_COUNT, draft_sealer, flooded, save_wide
from node import LEAF_BYTES, Node, node

from everstep.checkpoint import draft_format
from everstep.checkpoint.draft_format import DraftReader

DRIVE = [Path("drive0")]
FEW = 100
"""Leaves where their number does not matter."""


@pytest.fixture
def daemon(tmp_path: Path) -> Generator[Node]:
    (tmp_path / "drive").mkdir()
    with node([tmp_path / "drive"], LEAF_BYTES, tmp_path, slot_count=1, serves_metrics=True) as made:
        yield made


def test_a_flood_says_how_often_it_asked_each_question(daemon: Node) -> None:
    save_wide(daemon.socket, DRIVE, FEW)
    with flooded(daemon.socket, FEW) as counts:
        daemon.persist()
        assert counts == {}
    assert set(counts) == {"status", "scrape", "show", "manifest", "draft"}
    assert min(counts.values()) >= 1


def test_every_draft_of_the_flood_is_parsed_whole(daemon: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader has seen before it believes; here nothing but the new name differs from the draft before."""
    parsed: list[int] = []
    real = draft_format._draft_of  # pyright: ignore[reportPrivateUsage]

    def counting(document: object) -> object:
        draft = real(document)  # pyright: ignore[reportArgumentType]
        parsed.append(len(draft.leaves))
        return draft

    monkeypatch.setattr(draft_format, "_draft_of", counting)
    with draft_sealer(daemon.socket, DRIVE) as sealer:
        reader, drafts = DraftReader(), [sealer.next_draft() for _ in range(3)]
        for draft in drafts:
            assert 4.5e6 < len(draft) < 7e6
            reader.read(draft, 1 << 30)
        assert parsed == [LEAF_COUNT + 1] * 3
        reader.read(drafts[-1], 1 << 30)
        assert len(parsed) == 3, "the reader does not know what it has just read"
        sealer.seal()
        sealer.seal()


def test_a_flood_that_does_not_begin_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="did not begin"), flooded(tmp_path / "absent.sock"):
        pytest.fail("the block was entered")


def test_a_flood_that_breaks_off_is_an_error(daemon: Node) -> None:
    save_wide(daemon.socket, DRIVE, FEW)
    with pytest.raises(RuntimeError, match="broke off"), flooded(daemon.socket, FEW):
        os.kill(daemon.pid, signal.SIGKILL)
