"""The page is whole by itself, and its numbers are those of the result; the JSON is strict."""

import json
from html.parser import HTMLParser

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.dataloader.analysis.measured_format import (
    FORMAT,
    Analysis,
    LoaderFacts,
    Measured,
    Phase,
    Times,
    WorkSeen,
    decode,
    encode,
)  # fmt: skip
from everstep.dataloader.analysis.page_format import page
from everstep.dataloader.analysis.report_plan import Seen, analysis_of
from everstep.dataloader.analysis.svg_format import Bar, Part, bars, curve

VOID = {"meta", "link", "br", "img", "input"}


def measured(
    phase: Phase, step_s: float, wait_s: float, *, workers: int = 2, read: float = 100_000.0
) -> Measured:
    samples = 400.0
    fetch_s = 6.0 if phase is Phase.COLD else 0.0
    return Measured(
        phase=phase,
        loader=LoaderFacts(
            number=0, kind="torch.utils.data.dataloader.DataLoader", dataset="Photos<1>", dataset_length=20_000,
            batch_size=8.0, workers=workers, start_method="fork", pinned=False,
        ),
        times=Times(
            count=50, mean_s=step_s, median_s=step_s, low_s=0.9 * step_s, high_s=1.1 * step_s, wait_s=wait_s
        ),
        work=WorkSeen(
            samples=samples, busy_s=4.0 + fetch_s, fetch_s=fetch_s, cpu_s=3.9, file_bytes=read * samples,
            storage_bytes=read * samples if phase is Phase.COLD else 0.0,
        ),
        trainer_cpu_s=1.0,
        copy_s=0.0,
        device="cpu",
        epoch_batches=60,
        loaders_seen=1,
    )  # fmt: skip


def analysis(**changes: object) -> Analysis:
    parts: dict[str, object] = {
        "synthetic": measured(Phase.SYNTHETIC, 0.040, 0.0),
        "warm": measured(Phase.WARM, 0.050, 0.010),
        "cold": measured(Phase.COLD, 0.120, 0.080),
        "cores": 8.0,
    }
    return analysis_of(msgspec.convert(parts | changes, Seen), subject="train.py --lr <1>", version="0.1.0")


class Reader(HTMLParser):
    """Collects what a page says, and checks that its tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href", "action"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_is_whole_by_itself() -> None:
    text = page(analysis())
    reader = read(text)
    assert reader.links == []
    assert not {"script", "link", "img", "iframe"} & set(reader.tags)
    assert "@import" not in text
    assert "url(" not in text
    assert reader.tags.count("svg") == 5
    assert "prefers-color-scheme:dark" in text


def test_names_of_users_are_text() -> None:
    text = page(analysis())
    assert "<1>" not in text
    assert "train.py --lr <1>" in " ".join(read(text).text)


def test_every_predicted_speed_of_a_plot_is_in_a_table() -> None:
    made = analysis()
    said = read(page(made)).text
    tables = (made.what_if.cache, made.what_if.workers, made.what_if.storage, made.what_if.peers)
    assert all(table for table in tables)
    for row in (row for table in tables for row in table):
        assert f"{row.samples_per_s:,.1f}" in said
    for run in made.runs:
        assert f"{1000 * run.times.mean_s:,.1f}" in said


def test_a_run_that_is_only_a_bound_says_so() -> None:
    made = analysis(unseen_files=["/data/a.jpg"])
    cold = made.runs[2]
    assert (cold.phase, cold.is_bound) == (Phase.COLD, True)
    said = " ".join(read(page(made)).text)
    assert "≤ 66.7" in said
    assert (
        "the cold run is a lower bound of the fetch stall: native code opened files by itself: /data/a.jpg"
        in said
    )


def test_the_three_runs_and_their_parts() -> None:
    made = analysis()
    assert [run.phase for run in made.runs] == [Phase.SYNTHETIC, Phase.WARM, Phase.COLD]
    for run in made.runs:
        assert run.fetch_s + run.preparation_s + run.copy_s + run.compute_s == pytest.approx(run.times.mean_s)
    assert made.runs[2].fetch_s == pytest.approx(0.080 * 6 / 10)
    assert made.stalls.fetch_stall_s == pytest.approx(0.070)
    assert made.dataset_bytes == pytest.approx(2e9)


def test_runs_that_contradict_each_other_are_doubted() -> None:
    (note,) = analysis(warm=measured(Phase.WARM, 0.13, 0.09)).notes
    assert note.startswith("the warm run was slower than the cold one")
    idle = measured(Phase.COLD, 0.120, 0.080)
    idle = msgspec.structs.replace(idle, work=msgspec.structs.replace(idle.work, busy_s=4.0, fetch_s=0.1))
    (note,) = analysis(cold=idle).notes
    assert note.startswith("the cold run was slower than the warm one by more than workers waited for files")
    (note,) = analysis(warm=measured(Phase.WARM, 0.050, 0.001)).notes
    assert note.startswith("the trainer was slower in the warm run than in the synthetic one")
    assert analysis().notes == []


def test_without_storage_there_is_no_plot_of_it() -> None:
    made = analysis(
        warm=measured(Phase.WARM, 0.05, 0.01, read=0.0), cold=measured(Phase.COLD, 0.05, 0.01, read=0.0)
    )
    assert made.what_if.storage == []
    assert made.model.storage_bytes_per_s is None
    assert read(page(made)).tags.count("svg") == 4


def test_json_is_read_back_and_nothing_else_is() -> None:
    made = analysis()
    text = encode(made)
    assert decode(text, Analysis) == made
    document = json.loads(text)
    assert document["format"] == FORMAT
    for wrong in (
        {**document, "more": 1},
        {key: value for key, value in document.items() if key != "advice"},
        {**document, "format": "everstep-analysis/2"},
        {**document, "subject": 3},
    ):
        with pytest.raises(msgspec.ValidationError):
            decode(json.dumps(wrong).encode(), Analysis)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9)), min_size=1, max_size=20))
def test_any_curve_is_a_picture(points: list[tuple[float, float]]) -> None:
    points = sorted(points)
    for as_columns in (False, True):
        text = curve("t", points, x_label="x", y_label="y", as_columns=as_columns)
        assert "nan" not in text
        assert "inf" not in text
        assert read(text).tags[0] == "svg"


@given(st.lists(st.just(0.0) | st.floats(0.1, 1e6), min_size=1, max_size=4))
def test_bars_have_lengths_in_proportion(values: list[float]) -> None:
    rows = [Bar(name=str(n), parts=[Part(name="p", value=v, style="compute")]) for n, v in enumerate(values)]
    text = bars("t", rows, unit="ms")
    assert "nan" not in text
    assert read(text).tags.count("rect") == sum(value > 0 for value in values)
