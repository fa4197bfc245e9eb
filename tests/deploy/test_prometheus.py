"""A real Prometheus over a daemon that trains, restores, caches and loses a device: no answer is empty.

The dashboards' queries, the rules and docs/metrics.md are held against the same few seconds. METRICS_TABLE_WRITE=1
writes the document's tables anew, all but what only a person can say.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import metrics_table
import pytest
from certificates import Authority
from loop_disk import LoopDisk, skip_without
from prometheus_server import Prometheus, eventually, needs_prometheus, prometheus_over

from everstep.core.ids import CheckpointId
from everstep.daemon.control.client import connected
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

pytestmark = [pytest.mark.root, needs_prometheus]

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
BOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
TRAINING = ROOT / "tests" / "scripts" / "observed_training.py"
NAMES = [Path("nvme0"), Path("nvme1")]
WITHOUT_DATA = {"everstep_cache_peer_fetch_seconds"}
"""One node alone asks no other: these are there, and count nothing."""
CONFIG = """
[devices]
nvme0 = "{good}"
nvme1 = "{bad}"
[daemon]
socket = "{socket}"
[control]
listen = "127.0.0.1:0"
certificate_file = "{pair.certificate}"
key_file = "{pair.key}"
authority_file = "{authority.certificate}"
[control.clients]
operator = {{role = "viewer"}}
"""


@dataclass(frozen=True, slots=True)
class Observed:
    """What has been seen of a daemon that worked and lost a device, while both still run."""

    prometheus: Prometheus
    scraped: str


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    skip_without("ext4")
    folder = tmp_path_factory.mktemp("observed")
    disk = LoopDisk(folder, "ext4", "disk")
    try:
        disk.mount()
        (disk.path / "everstep").mkdir(mode=0o700)
        (folder / "good").mkdir()
        socket_path, config = folder / "s" / "data.sock", folder / "node.toml"
        socket_path.parent.mkdir(mode=0o700)
        authority = Authority(folder)
        config.write_text(
            CONFIG.format(
                good=folder / "good",
                bad=disk.path / "everstep",
                socket=socket_path,
                pair=authority.sign("node", "IP:127.0.0.1"),
                authority=authority,
            )
        )
        with node_daemon(config, socket_path), connected(socket_path) as client:
            port = client.status().daemon.metrics_port
            with (
                prometheus_over(folder / "prometheus", port, RULES) as prometheus,
                training(folder, socket_path) as printed,
            ):
                # In this process: a test may not find its descriptors.
                with restoring(socket_path) as between_two:
                    eventually(lambda: "step 20\n" in printed.read_text())
                    eventually(lambda: any(prometheus.values("everstep_training_seconds_total > 0")))
                    # What is read in the background when the drive goes would count as damaged, and be alerted, too.
                    eventually(lambda: any(prometheus.values("everstep_checkpoints_verified_total > 0")))
                    with between_two:  # what was on the drive when it went is lost, and would not be restored
                        disk.cut()
                    eventually(lambda: any(prometheus.values('everstep_device_state{state="suspect"} == 1')))
                url = f"http://127.0.0.1:{port}/metrics"
                with urllib.request.urlopen(url, timeout=10) as answer:
                    scraped = answer.read().decode()
                yield Observed(prometheus, scraped)
    finally:
        disk.remove()


@contextmanager
def training(folder: Path, socket_path: Path) -> Generator[Path]:
    """Run a trainer, and kill it when the block is left; what it prints is in the file."""
    printed = folder / "training.log"
    with printed.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", str(TRAINING), *map(str, NAMES)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "EVERSTEP_SOCKET": str(socket_path)},
        )
    try:
        yield printed
        assert process.poll() is None, printed.read_text()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(20)


@contextmanager
def restoring(socket_path: Path) -> Generator[threading.Lock]:
    """Save, and restore from the devices, again and again; ask for what is refused, too.

    Who holds the lock that is returned is between a restore and the next save.
    """
    is_over, between_two, failures = threading.Event(), threading.Lock(), list[BaseException]()

    def work() -> None:
        try:
            step = 0
            while not is_over.wait(0.5):
                step += 1
                with between_two, FakeTrainer(socket_path) as trainer:
                    save_and_restore(trainer, step)
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield between_two
    finally:
        is_over.set()
        thread.join()
    assert not failures


def save_and_restore(trainer: FakeTrainer, attempt: int) -> None:
    """Each time in an attempt of its own."""
    assert isinstance(trainer.open_run(NAMES), frames.RunOpened)
    assert isinstance(trainer.begin_attempt(attempt), frames.Done)
    arena = trainer.make_arena(trainer.layout())
    checkpoint = CheckpointId(attempt, 1)
    arena.save(checkpoint, seed=attempt)
    assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
    shard = trainer.fetch(checkpoint, from_devices=True)
    assert isinstance(shard, frames.Streaming), shard
    assert not trainer.stream(shard)[1].code
    trainer.send(frames.Restored(in_memory=False))
    assert isinstance(trainer.begin_attempt(0), frames.Failure)
    arena.close()
    trainer.ask(frames.Detach(request_id=trainer.number()))


def queries(path: Path) -> Iterator[tuple[str, str]]:
    """Return panel and PromQL of every query of a dashboard, its variables replaced by all there is."""
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m")
            yield panel["title"], re.sub(r"\$(instance|device)\b", ".*", expression)


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_no_query_of_a_dashboard_is_empty(observed: Observed, path: Path) -> None:
    for title, expression in queries(path):
        may_be_nan = any(name in expression for name in WITHOUT_DATA)

        def has_data(expression: str = expression, may_be_nan: bool = may_be_nan) -> bool:
            found = observed.prometheus.values(expression)
            return any(may_be_nan or not math.isnan(value) for value in found)

        try:
            eventually(has_data)
        except AssertionError as error:
            raise AssertionError(
                f"{title}: {expression} gives {observed.prometheus.query(expression)}"
            ) from error


def test_every_rule_is_evaluated_and_the_lost_device_is_alerted(observed: Observed) -> None:
    groups = observed.prometheus.api("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    for rule in rules:
        if rule["type"] == "recording":
            eventually(lambda name=rule["name"]: bool(observed.prometheus.query(name)))
        else:
            observed.prometheus.query(rule["query"])
    eventually(lambda: "EverstepDeviceSuspect" in firing(observed.prometheus))
    wrong = {"EverstepDaemonDown", "EverstepDamageFound", "EverstepInternalErrors", "EverstepPersistFailing"}
    assert not firing(observed.prometheus) & wrong


def firing(prometheus: Prometheus) -> set[str]:
    found = prometheus.api("alerts")["alerts"]
    return {alert["labels"]["alertname"] for alert in found if alert["state"] == "firing"}


def test_every_metric_in_rules_and_dashboards_exists(observed: Observed) -> None:
    """Also in what is empty while all is well."""
    known = set(observed.prometheus.api("label/__name__/values"))
    texts = [RULES.read_text(), *(query for path in BOARDS for _, query in queries(path))]
    named = {name for text in texts for name in re.findall(r"\b(?:everstep|process)_[a-z_]+\b", text)}
    assert named - known == set()


def test_promtool_has_nothing_against_the_names(observed: Observed) -> None:
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=observed.scraped, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_the_document_lists_what_is_served_and_nothing_else(observed: Observed) -> None:
    served = metrics_table.served(observed.scraped)
    if os.environ.get("METRICS_TABLE_WRITE"):
        write_table(served)
    written = metrics_table.written()
    assert sorted(written) == sorted(served)
    for name, row in served.items():
        assert replace(written[name], look="", labels=()) == replace(row, labels=())
        assert set(row.labels) <= set(written[name].labels), name
        assert written[name].look, f"{name}: when to look at it"


def write_table(served: dict[str, metrics_table.Row]) -> None:
    """Put the rows of everything into the first table; a person gives them their places."""
    known = metrics_table.written()
    rows = [
        replace(row, look=known[name].look if name in known else "") for name, row in sorted(served.items())
    ]
    text = metrics_table.PATH.read_text() if metrics_table.PATH.exists() else ""
    for row in rows:
        if row.name in known:
            text = re.sub(
                rf"^\| `{row.name}` \|.*\n", lambda _, row=row: row.text(), text, flags=re.MULTILINE
            )
        else:
            text += row.text()
    metrics_table.PATH.write_text(text)
