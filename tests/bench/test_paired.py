"""Ratios taken in pairs: their medians, what counts as met or noisy, and the form in which they are written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import storage
from paired import NOISY, Row, interleaved, publish, ratios, row, write
from rig import RigError

KEYS = {"machine", "date", "commit", "rows", "left_out"}
ROW_KEYS = {"measure", "value", "low", "high", "goal", "met"}


def test_a_row_is_the_median_and_the_quartiles() -> None:
    found = row("persist / fio", [1.0, 0.8, 0.9, 1.1, 1.2], goal=0.97)
    assert (found.value, found.low, found.high) == (1.0, 0.9, 1.1)
    alone = row("persist / fio", [0.5], goal=None)
    assert (alone.value, alone.low, alone.high, alone.noisy) == (0.5, 0.5, 0.5, False)


@pytest.mark.parametrize(
    ("value", "goal", "at_most", "met"),
    [
        (0.97, 0.97, False, True),
        (0.969, 0.97, False, False),
        (0.25, 0.25, True, True),
        (0.251, 0.25, True, False),
        (0.1, None, False, True),
        (9.0, None, True, True),
    ],
)
def test_a_goal_is_met_by_the_median_as_it_is(
    value: float, goal: float | None, at_most: bool, met: bool
) -> None:
    assert row("a measure", [value - 0.5, value, value + 0.5], goal=goal, at_most=at_most).met is met


def test_quartiles_that_lie_far_apart_are_noisy() -> None:
    """By how much of the value: what is small is as noisy as what is large."""
    for scale in (0.01, 1.0, 100.0):
        half = NOISY / 2
        calm = [scale * each for each in (1 - half + 0.001, 1.0, 1 + half - 0.001)]
        wild = [scale * each for each in (1 - 2 * half - 0.002, 1.0, 1 + 2 * half + 0.002)]
        assert not row("a measure", calm, goal=None).noisy
        assert row("a measure", wild, goal=None).noisy
    assert not row("a measure", [0.0, 0.0, 1.0], goal=None).noisy, "of nothing there is no share"


def test_who_goes_first_changes_from_pair_to_pair() -> None:
    order = list[str]()

    def take(who: str, value: float) -> float:
        order.append(who)
        return value

    pairs = interleaved(lambda: take("ours", 3.0), lambda: take("theirs", 2.0), 3)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert pairs == [(3.0, 2.0)] * 3
    assert ratios(pairs) == [1.5] * 3


def written(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    assert set(found) == KEYS
    assert all(set(each) >= ROW_KEYS for each in found["rows"])
    return found


def test_what_is_written_says_where_when_and_of_which_commit(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    write([row("a / b", [1.0, 2.0], goal=1.4), row("c", [3.0], goal=2.0, at_most=True, unit="s")], path)
    found = written(path)
    assert all(found[key] for key in ("machine", "date", "commit"))
    assert found["date"].endswith("UTC")
    first, second = found["rows"]
    assert {key: first[key] for key in sorted(ROW_KEYS)} == {
        "measure": "a / b", "value": 1.5, "low": 1.25, "high": 1.75, "goal": 1.4, "met": True,
    }  # fmt: skip
    assert (second["unit"], second["at_most"], second["met"]) == ("s", True, False)
    assert first["noisy"]


def test_the_table_says_what_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    good, bad = row("good", [1.0, 1.0], goal=0.9), row("bad", [0.2, 1.4], goal=0.9)
    assert publish("some", [good], path)
    assert not publish("some", [good, bad], path, {"absent": "there is none"})
    lines = capsys.readouterr().out.splitlines()
    assert any("bad" in line and "missed (noisy)" in line for line in lines)
    assert any("absent" in line and "there is none" in line for line in lines)
    found = written(path)
    assert [(each["measure"], each["met"]) for each in found["rows"]] == [("good", True), ("bad", False)]
    assert found["left_out"] == {"absent": "there is none"}


MET, MISSED = row("met", [1.0], goal=0.9), row("missed", [0.8], goal=0.9)


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where `make bench-storage` writes when it is asked for rigs of 1 and 2 drives alone."""
    path = tmp_path / "storage.json"
    monkeypatch.setattr(storage, "_draw", lambda _: None)
    command = [
        "storage.py",
        "--gib",
        "0",
        "--drives",
        "1",
        "2",
        "--recycle",
        "--no-slow",
        "--rows",
        "persist",
    ]
    monkeypatch.setattr("sys.argv", [*command, "--output", str(path)])
    return path


def rigs_give(monkeypatch: pytest.MonkeyPatch, found: dict[int, Row | RigError]) -> None:
    def on_rig(drives: int, **_: object) -> Sequence[Row]:
        match found[drives]:
            case Row() as made:
                return [made]
            case error:
                raise error

    monkeypatch.setattr(storage, "on_rig", on_rig)


def test_all_that_was_asked_for_and_met_is_well(monkeypatch: pytest.MonkeyPatch, output: Path) -> None:
    rigs_give(monkeypatch, {1: MET, 2: MET})
    assert storage.main() == 0
    assert written(output)["left_out"] == {}


def test_a_goal_that_is_missed_shows_in_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, output: Path
) -> None:
    rigs_give(monkeypatch, {1: MET, 2: MISSED})
    assert storage.main() == 1
    assert [each["met"] for each in written(output)["rows"]] == [True, False]


def test_a_rig_that_could_not_be_made_shows_in_the_file_and_in_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rigs_give(monkeypatch, {1: RigError("no blkio controller"), 2: MET})
    assert storage.main() == 1
    found = written(output)
    assert [each["measure"] for each in found["rows"]] == ["met"]
    assert found["left_out"] == {"rig of 1": "no blkio controller"}
    assert "no blkio controller" in capsys.readouterr().out


def test_what_each_part_found_is_written_before_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch, output: Path
) -> None:
    def on_rig(drives: int, **_: object) -> Sequence[Row]:
        if drives == 1:
            raise RigError("it does not hold")
        assert written(output)["left_out"] == {"rig of 1": "it does not hold"}
        return [MET]

    monkeypatch.setattr(storage, "on_rig", on_rig)
    assert storage.main() == 1
