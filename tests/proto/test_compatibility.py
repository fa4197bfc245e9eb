"""The control API goes on as it was: what clients and daemons of earlier versions send is read, and means the same.

Each file in `recorded/` is the API as it once landed (tools/record_api.py); none of them is ever changed.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from google.protobuf.json_format import MessageToDict

from everstep.daemon.control.device_messages import (
    device_from_message,
    devices_from_message,
    readmission_from_message,
    retirement_from_message,
)
from everstep.daemon.control.messages import (
    cache_from_message,
    detail_from_message,
    finding_from_message,
    status_from_message,
    summary_from_message,
    verdict_from_message,
)
from everstep.daemon.control.views import CheckpointView, StatusView
from everstep.proto import node_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
READERS: dict[str, Callable[[Any], object]] = {
    "GetStatusResponse": status_from_message,
    "GetCheckpointResponse": detail_from_message,
    "VerifyCheckpointResponse": verdict_from_message,
    "CheckpointSummary": summary_from_message,
    "CacheStatus": cache_from_message,
    "Finding": finding_from_message,
    "ListDevicesResponse": devices_from_message,
    "DeviceDetail": device_from_message,
    "RetireDeviceResponse": retirement_from_message,
    "ReadmitDeviceResponse": readmission_from_message,
}
"""How the client reads what the first recorded daemon answers."""

Record = dict[str, Any]


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_api", ROOT / "tools" / "record_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def breaks(old: Record, new: Record) -> list[str]:
    """Return in what the new API is no longer the old one."""
    found: list[str] = []
    for rpc, facts in old["rpcs"].items():
        if new["rpcs"].get(rpc) != facts:
            found.append(f"rpc {rpc} was {facts}, is {new['rpcs'].get(rpc)}")
    for message, fields in old["messages"].items():
        now = new["messages"].get(message, {})
        found += [
            f"{message}.{name} was {facts}, is {now.get(name)}"
            for name, facts in fields.items()
            if now.get(name) != facts
        ]
        numbers = {facts[0] for facts in fields.values()}
        found += [
            f"{message}.{name} takes number {facts[0]}, which was another field's"
            for name, facts in now.items()
            if name not in fields and facts[0] in numbers
        ]
    for enum, values in old["enums"].items():
        now = new["enums"].get(enum, {})
        found += [f"{enum}.{name} was {number}" for name, number in values.items() if now.get(name) != number]
        taken = {number for name, number in now.items() if name not in values} & set(values.values())
        found += [f"{enum} uses {number} again" for number in taken]
    return found


def load(path: Path) -> Record:
    return cast("Record", json.loads(path.read_text()))


@pytest.fixture(scope="module")
def now() -> Record:
    return cast("Record", json.loads(json.dumps(tool().record(pb))))


def test_something_is_recorded() -> None:
    assert RECORDED


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_nothing_that_was_there_has_changed(path: Path, now: Record) -> None:
    assert breaks(load(path), now) == []


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_messages_of_then_are_read_and_mean_the_same(path: Path) -> None:
    for name, sample in load(path)["samples"].items():
        message = getattr(pb, name).FromString(bytes.fromhex(sample["bytes"]))
        assert MessageToDict(message, preserving_proto_field_name=True) == sample["values"], name
        assert message.SerializeToString(deterministic=True).hex() == sample["bytes"], (
            f"{name}: unknown fields"
        )


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_client_reads_answers_of_then(path: Path) -> None:
    samples = load(path)["samples"]
    read = {
        name: reader(getattr(pb, name).FromString(bytes.fromhex(samples[name]["bytes"])))
        for name, reader in READERS.items()
    }
    summary, status = read["CheckpointSummary"], read["GetStatusResponse"]
    assert isinstance(summary, CheckpointView)
    assert isinstance(status, StatusView)
    assert (str(summary.checkpoint), summary.tags) == ("5.6", ("some tags",))
    said = samples["CheckpointSummary"]["values"]
    assert len(summary.pins) == len(said.get("pins", [])), "a field that came later is absent"
    assert status.daemon.version == "some version"
    assert status.runs[0].ranks[0].slots


def test_a_client_that_is_newer_than_the_daemon_gets_defaults() -> None:
    """Every field may be absent: that is what an older daemon's answer looks like."""
    status = status_from_message(pb.GetStatusResponse())
    assert (status.runs, status.caches, status.daemon.version) == ((), (), "")


CHANGES: list[Callable[[Record], object]] = [
    lambda record: record["rpcs"].pop("GetStatus"),
    lambda record: record["rpcs"]["GetStatus"].__setitem__(3, True),
    lambda record: record["messages"]["Selector"].pop("run"),
    lambda record: record["messages"]["Selector"]["run"].__setitem__(0, 9),
    lambda record: record["messages"]["Selector"]["run"].__setitem__(1, 5),
    lambda record: record["messages"]["Selector"].update(other=record["messages"]["Selector"].pop("run")),
    lambda record: record["messages"].pop("Selector"),
    lambda record: record["enums"]["SlotState"].update(SLOT_STATE_FREE=77),
    lambda record: record["enums"]["SlotState"].update(SLOT_STATE_OTHER=1),
]


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_every_break_is_seen(change: Callable[[Record], object], now: Record) -> None:
    changed = cast("Record", json.loads(json.dumps(now)))
    change(changed)
    assert breaks(now, changed)
