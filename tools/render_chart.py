"""Render the Helm chart with its default values into deploy/kubernetes/everstep.yaml; --check compares.

The chart uses Go's built-in template functions only, so that Go's engine alone renders it as helm does:
`make chart-engine` installs that engine, built for WebAssembly, and node runs it. Needs PyYAML.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "everstep"
MANIFESTS = ROOT / "deploy" / "kubernetes" / "everstep.yaml"
ENGINE = ROOT / ".venv" / "chart-engine" / "node_modules" / "@evertdespiegeleer" / "go-template"
ORDER = (
    "serviceaccount",
    "priorityclass",
    "configmap",
    "service",
    "networkpolicy",
    "daemonset",
    "podmonitor",
)
HEADER = """\
# The chart of deploy/helm with its default values, written by tools/render_chart.py: change it there.
# kubectl create namespace everstep && kubectl apply --namespace everstep -f everstep.yaml
"""
Values = Mapping[str, Any]


def missing_engine() -> str:
    """Return what is missing to render, and how to get it; empty: nothing."""
    if shutil.which("node") is None:
        return "needs node 18 or newer: apt-get install nodejs npm"
    return "" if ENGINE.is_dir() else "needs Go's template engine: make chart-engine"


def default_values() -> dict[str, Any]:
    """Return values.yaml."""
    return cast("dict[str, Any]", yaml.safe_load((CHART / "values.yaml").read_text()))


def merged(base: Values, changes: Values) -> dict[str, Any]:
    """Return the values with changes, as helm merges a user's file: tables key by key, all else replaced."""
    result = dict(base)
    for key, change in changes.items():
        below = result.get(key)
        if isinstance(change, Mapping) and isinstance(below, Mapping) and below:
            result[key] = merged(cast(Values, below), cast(Values, change))
        else:
            result[key] = change
    return result


def render(values: Values, *, release: str = "everstep", namespace: str = "everstep") -> str:
    """Return all manifests of the chart as one YAML stream; empty ones are left out."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    data = {
        "Values": values,
        "Release": {"Name": release, "Namespace": namespace},
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
    }
    template = "\n---\n".join((CHART / "templates" / f"{name}.yaml").read_text() for name in ORDER)
    done = subprocess.run(
        ["node", ROOT / "tools" / "go_template.mjs", ENGINE],
        input=json.dumps({"template": template, "data": data}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"the chart cannot be rendered: {done.stderr.strip()}")
    parts = [part.strip("\n") for part in done.stdout.split("\n---\n")]
    return "\n---\n".join(part for part in parts if yaml.safe_load(part) is not None) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when the manifests are stale"
    )
    check: bool = parser.parse_args().check
    if missing := missing_engine():
        print(missing, file=sys.stderr)
        return 1
    fresh = HEADER + render(default_values())
    if MANIFESTS.exists() and MANIFESTS.read_text() == fresh:
        print("deploy/kubernetes: fresh")
        return 0
    if check:
        print("stale: deploy/kubernetes/everstep.yaml; run tools/render_chart.py", file=sys.stderr)
        return 1
    MANIFESTS.write_text(fresh)
    print("deploy/kubernetes: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
