"""The metrics of a running daemon, as Prometheus gets them."""

import urllib.request
from collections.abc import Generator

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

LABELS = {
    "version", "source", "result", "le", "engine", "direct", "device", "state", "reason", "part",
    "flow", "request", "operation", "section", "mode",
}  # fmt: skip
"""All that there are: none grows with the runs or their steps; a daemon has few devices."""


def scrape(port: int) -> dict[str, float]:
    """Return the samples, those with a label but `version` under `name{value}`."""
    samples: dict[str, float] = {}
    for family in _families(port):
        for sample in family.samples:
            assert set(sample.labels) <= LABELS
            values = [value for name, value in sample.labels.items() if name != "version"]
            samples[sample.name + (f"{{{','.join(values)}}}" if values else "")] = sample.value
    return samples


def labels(port: int, name: str) -> list[dict[str, str]]:
    """Return the labels of each sample of one metric, whose value is 1."""
    samples = [sample for family in _families(port) for sample in family.samples if sample.name == name]
    assert all(sample.value == 1 for sample in samples)
    return [dict(sample.labels) for sample in samples]


def _families(port: int) -> Generator[Metric]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        yield from text_string_to_metric_families(answer.read().decode())
