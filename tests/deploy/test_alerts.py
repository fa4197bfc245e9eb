"""The alert rules: each fires when it should and is silent else (promtool), and each has its page in the runbooks."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_cases import CASES, promtool_tests

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
RUNBOOKS = ROOT / "docs" / "runbooks.md"

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


@needs_promtool
def test_the_rules_are_valid() -> None:
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True, capture_output=True)


def test_every_alert_has_a_case_that_fires_and_one_that_is_silent() -> None:
    assert sorted(CASES) == sorted(alerts())
    for name, case in CASES.items():
        assert case.fires, name
        assert case.quiet, name
        assert (case.silent_min is not None) == ("for" in alerts()[name]), f"{name}: `for:` and silent_min"


@needs_promtool
@pytest.mark.parametrize("step", ["1m", "1h"])
def test_each_alert_fires_alone_and_is_silent_when_all_is_well(tmp_path: Path, step: str) -> None:
    path = tmp_path / "alerts.test.yml"
    cases = {name: case for name, case in CASES.items() if case.step == step}
    tests = [test for name, case in cases.items() for test in promtool_tests(name, case)]
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": step, "tests": tests}))
    found = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert not found.returncode, found.stdout + found.stderr


def test_every_alert_says_how_bad_it_is_and_what_to_read() -> None:
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, name
        notes = rule["annotations"]
        assert sorted(notes) == ["description", "runbook_url", "summary"], name
        assert "{{ $labels.instance }}" in notes["summary"], name
        assert notes["runbook_url"] == f"docs/runbooks.md#{name.lower()}", name


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    pages = re.split(r"^### ", RUNBOOKS.read_text(), flags=re.MULTILINE)[1:]
    by_name = {page.splitlines()[0].strip(): page for page in pages}
    assert list(by_name) == list(alerts())
    for name, page in by_name.items():
        for part in ("**Meaning.**", "**Lost.**", "**Look at.**", "**Do.**"):
            assert part in page, f"{name}: no {part}"
