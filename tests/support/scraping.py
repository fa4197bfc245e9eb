"""The metrics of a running daemon, as Prometheus gets them."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

LABELS = {
    "version", "source", "result", "le", "engine", "direct", "device", "state", "reason", "part",
}  # fmt: skip
"""All that there are: none grows with the runs or their steps; a daemon has few devices."""


def scrape(port: int) -> dict[str, float]:
    """Return the samples, those with a label but `version` under `name{value}`."""
    samples: dict[str, float] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                assert set(sample.labels) <= LABELS
                values = [value for name, value in sample.labels.items() if name != "version"]
                samples[sample.name + (f"{{{','.join(values)}}}" if values else "")] = sample.value
    return samples
