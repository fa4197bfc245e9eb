"""What the documents say is so: their examples run, and the functions that they name exist."""

import os
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch.utils.data import TensorDataset

import everstep
from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer, daemon_process
from everstep.proto import frames

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("core", "proto", "checkpoint", "dataloader", "daemon", "hook")
PAGES = {
    "README.md": 1,
    "docs/analyze.md": 1,
    "docs/api.md": 1,
    "docs/cache.md": 2,
    "docs/data.md": 4,
    "docs/format.md": 1,
    "docs/loops.md": 2,
    "docs/shared.md": 1,
    "docs/sources.md": 8,
}
"""How many examples in Python each page has. Those of docs/sources.md run in tests/dataloader/sources/test_docs.py;
that of docs/format.md reads a file which the quick start has written."""
SAMPLES = 20_000


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


class Scene:
    """What the pages speak of without making it: data, a model, an optimizer, what is done with a batch."""

    def __init__(self, folder: Path) -> None:
        for number in range(4):
            path = folder / "photos/train" / ("cat", "dog")[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes([number]) * 100)
        self.storage = folder / "ckpt"
        self.storage.mkdir()
        self.trained: list[torch.Tensor] = []
        self.dataset = TensorDataset(torch.arange(SAMPLES, dtype=torch.float32)[:, None])
        model = torch.nn.Linear(1, 1)
        loader = self.loader()
        self.names: dict[str, Any] = {
            "everstep": everstep,
            "torch": torch,
            "dataset": self.dataset,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6),
            "loader": loader,
            "state": loader.state_dict(),
            "train": lambda batch: self.trained.append(batch[0][:, 0]),
            "decode": lambda data: torch.tensor([len(data)]),
            "loss": lambda out: out.sum(),
            "perturbation": {each: torch.ones_like(each) for each in model.parameters()},
        }

    def loader(self) -> everstep.DataLoader[Any]:
        return everstep.DataLoader(self.dataset, batch_size=64, shuffle=True)

    def run(self, page: str, number: int, *changes: tuple[str, str]) -> None:
        """Run an example among these names, which it may add to, after these changes to its text."""
        text = examples(page)[number]
        for old, new in changes:
            assert old in text, f"{page}, example {number + 1}, has no {old!r}"
            text = text.replace(old, new)
        exec(compile(text, f"{page}, example {number + 1}", "exec"), self.names)

    def close(self) -> None:
        for each in self.names.values():
            close: Callable[[], None] | None = getattr(each, "close", None)
            if callable(close) and type(each).__module__.startswith("everstep."):
                close()
        self.names.clear()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.chdir(tmp_path)
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])):
        made = Scene(tmp_path)
        yield made
        made.close()


def test_all_examples_are_known() -> None:
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
    assert {page: count for page in pages if (count := len(examples(page)))} == PAGES


def test_examples_of_the_readme_and_the_cache(scene: Scene) -> None:
    for page in ("README.md", "docs/cache.md"):
        scene.run(page, 0, ("num_workers=8", "num_workers=1"))
        sample, label = scene.names["images" if "cache" in page else "dataset"][3]
        assert (sample.tolist(), label) == ([100], 1)
    assert scene.names["cached"].flush()
    scene.run("docs/cache.md", 1)
    info = scene.names["info"]
    assert (info.is_attached, info.sample_count, info.cached_count) == (True, 4, 1)


def test_examples_of_data(scene: Scene) -> None:
    scene.run("docs/data.md", 0)
    ids = torch.cat(scene.trained)
    assert sorted(ids.tolist()) == list(range(SAMPLES)), "each sample once, by both loaders together"
    scene.names["code"] = scene.names["web"] = scene.names["books"] = scene.dataset
    scene.run("docs/data.md", 2)
    assert scene.names["mixed"].proportions["web"] == pytest.approx(0.7)
    assert len(next(iter(scene.names["loader"]))[0]) == 64
    scene.names["loader"] = scene.loader()
    scene.run("docs/data.md", 3)
    assert scene.names["loader"].holes == [(10_000, 10_200)]


def test_examples_of_attaching_and_of_loops(scene: Scene) -> None:
    scene.run("docs/data.md", 1, ("/nvme0/ckpt", str(scene.storage)), ("num_workers=8", "num_workers=1"))
    before = scene.names["model"].weight.item()
    scene.run("docs/loops.md", 0)
    assert scene.names["model"].weight.item() == pytest.approx(before + 1)
    assert any(scene.storage.iterdir()), "it is a device now"


def test_the_example_of_going_back(scene: Scene) -> None:
    names = scene.names
    names["loader"] = scene.loader()
    objects = {name: names[name] for name in ("model", "optimizer", "loader")}
    with everstep.attach("gpt", **objects, storage=[scene.storage], every=1) as run:
        for _ in zip(range(8), names["loader"], strict=False):
            run.step()
            run.wait()
        first = run.report().last_complete
    names["loader"] = scene.loader()
    scene.run("docs/loops.md", 1, ("/nvme0/ckpt", str(scene.storage)), ("3.2000", first))
    assert str(names["restored"].checkpoint) == first
    assert names["loader"].holes == [(10_000, 10_200)]


def test_examples_of_shared_preparation(scene: Scene) -> None:
    scene.names["dataset"] = TensorDataset(torch.arange(600))
    scene.run("docs/shared.md", 0, ("range(10)", "range(2)"), ("num_workers=4", "num_workers=1"))
    loader = scene.names["loader"]
    assert (loader.epoch, loader.is_shared) == (2, True)


def test_examples_of_the_analysis(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.names["model"].forward = lambda batch: batch[0].sum() * scene.names["model"].weight.sum()
    scene.run("docs/analyze.md", 0, ("steps=50", "steps=5"))
    said = capsys.readouterr().out
    assert scene.names["analysis"].advice.sentence in said
    assert "StepSplit(fetch_s=" in said


def test_the_example_of_the_control_api(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeTrainer(Path(os.environ["EVERSTEP_SOCKET"])) as trainer:
        trainer.open_run([scene.storage], name="my-run")
        trainer.begin_attempt(1)
        arena = trainer.make_arena(trainer.layout())
        arena.save(CheckpointId(1, 5), seed=1)
        trainer.event(frames.Persisted)
        arena.close()
        scene.run("docs/api.md", 0)
    said = capsys.readouterr().out
    assert said == f"my-run attached 1 checkpoints\nread it from {scene.storage}\n"


def test_the_journeys_name_what_exists() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    code = "\n".join(path.read_text() for path in paths)
    known = {path.name for path in paths} | {str(path.relative_to(ROOT)) for path in paths}
    classes = set(re.findall(r"^class (\w+)", code, flags=re.MULTILINE))
    words = set(re.findall(r"\w+", code))
    members = set(re.findall(r"\bdef (\w+)|^    (\w+): ", code, flags=re.MULTILINE))
    named = {name for pair in members for name in pair if name}
    spans = re.findall(r"`([^`\n]+)`", (ROOT / "docs/journey.md").read_text())
    files = {span for span in spans if re.fullmatch(r"[\w/]+\.py", span)}
    methods = {span for span in spans if re.fullmatch(r"[A-Z]\w+\.\w+", span)}
    functions = {span for span in spans if re.fullmatch(r"[a-z]+(_[a-z]+)+", span)}
    assert len(files) > 30, "the page is written in another way: how does it name files?"
    assert len(methods) > 80
    assert len(functions) > 20
    assert files - known == set()
    assert {each for each in methods if each.split(".")[0] not in classes} == set()
    assert {each for each in methods if each.split(".")[1] not in named} == set()
    assert functions - words == set()


def test_what_the_web_page_suggests_exists() -> None:
    text = (ROOT / "daemon/web/static/app.js").read_text()
    called = re.findall(r"\beverstep\.([\w.]+)\(", text)
    imported = re.findall(r"from (everstep[\w.]*) import (\w+)", text)
    assert {"attach", "CachedDataset"} <= set(called)
    assert ("everstep.dataloader", "SharedLoader") in imported
    assert [name for name in called if not hasattr(everstep, name)] == []
    assert [name for module, name in imported if not hasattr(import_module(module), name)] == []


def test_every_call_of_the_client_says_what_it_does() -> None:
    client = import_module("everstep.client").NodeClient
    calls = [name for name in dir(client) if not name.startswith("_")]
    assert len(calls) > 30
    docs = {name: (getattr(client, name).__doc__ or "") for name in calls}
    assert [name for name, doc in docs.items() if not doc or doc.startswith("See ")] == []


def test_public_names_are_explained() -> None:
    """Each public class and function says what it is, and shows how it is used or what it raises."""
    from everstep import dataloader
    from everstep.dataloader import analysis
    from everstep.dataloader import sources as stored

    without: list[str] = []
    modules: list[ModuleType] = [everstep, import_module("everstep.client"), dataloader, stored, analysis]
    for module in modules:
        for name in cast("list[str]", module.__all__):
            each = getattr(module, name)
            if name == "__version__":
                continue
            if not (each.__doc__ or "").strip():
                without.append(f"{module.__name__}.{name}")
            if isinstance(each, type):
                members = [part for part in vars(each) if not part.startswith("_")]
                without += [
                    f"{module.__name__}.{name}.{part}"
                    for part in members
                    if callable(getattr(each, part)) and not (getattr(each, part).__doc__ or "").strip()
                ]
    assert without == []
