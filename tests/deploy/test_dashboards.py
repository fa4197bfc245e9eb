"""The dashboards as Grafana gets them: importable, and made by tools/dashboards.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATHS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
UNITS = {"s", "bytes", "Bps", "ops", "short", "percentunit"}


def board(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_they_are_those_that_the_tool_makes() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools" / "dashboards.py"), "--check"], check=True)
    assert [path.stem for path in PATHS] == ["data", "devices", "overview", "run"]


def test_no_two_have_the_same_uid() -> None:
    assert len({board(path)["uid"] for path in PATHS}) == len(PATHS)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_panel_says_what_it_shows_and_in_what_unit(path: Path) -> None:
    found = board(path)
    assert found["schemaVersion"] >= 36
    variables = {each["name"]: each["type"] for each in found["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    assert variables["instance"] == "query"
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
    for panel in found["panels"]:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in UNITS, panel["title"]
        assert defaults["thresholds"]["steps"][0]["value"] is None
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"], panel["title"]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_no_panel_lies_over_another(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board(path)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
