import logging

import pytest

from everstep.hook.report import FAILURES_KEPT, CostBook
from everstep.hook.storage_notes import StorageNotes
from everstep.proto import frames
from everstep.proto.frames import DeviceCondition


def info(name: str, condition: DeviceCondition, reason: str = "") -> frames.DeviceInfo:
    return frames.DeviceInfo(
        device_id=name,
        path=f"/nvme/{name}",
        condition=condition,
        reason=reason,
        write_bytes_per_s=0.0,
        capacity_bytes=0,
    )


def test_each_change_of_a_device_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    book = CostBook()
    notes = StorageNotes("demo", [info("a", DeviceCondition.OK), info("b", DeviceCondition.OK)], book)
    suspect = info("a", DeviceCondition.SUSPECT, "writing failed")
    with caplog.at_level(logging.WARNING):
        for devices in ([info("b", DeviceCondition.OK), suspect], [info("b", DeviceCondition.SLOW), suspect]):
            notes.take(frames.DevicesChanged(devices=devices))
            notes.take(frames.DevicesChanged(devices=devices))
    told = ("device /nvme/a is suspect: writing failed", "device /nvme/b is slow")
    assert tuple(book.notes) == told
    assert [record.message for record in caplog.records] == [
        f"storage_note run=demo: {each}" for each in told
    ]


@pytest.mark.parametrize(
    "condition", [DeviceCondition.SLOW, DeviceCondition.SUSPECT, DeviceCondition.DRAINING]
)
def test_a_device_that_is_not_well_from_the_start_is_told_once_with_its_reason(
    caplog: pytest.LogCaptureFixture, condition: DeviceCondition
) -> None:
    book = CostBook()
    bad = [info("a", DeviceCondition.OK), info("b", condition, "as somebody saw")]
    with caplog.at_level(logging.WARNING):
        notes = StorageNotes("demo", bad, book)
        notes.take(frames.DevicesChanged(devices=bad))
        assert [record.message for record in caplog.records] == [
            f"storage_note run=demo: device /nvme/b is {condition.value}: as somebody saw"
        ]
        notes.take(
            frames.DevicesChanged(devices=[info("a", DeviceCondition.OK), info("b", DeviceCondition.OK)])
        )
    assert tuple(book.notes) == (
        f"device /nvme/b is {condition.value}: as somebody saw",
        "device /nvme/b is ok",
    )


def test_a_device_that_is_not_listed_any_more_is_told_once() -> None:
    book = CostBook()
    well, leaving = (
        info("a", DeviceCondition.OK),
        info("b", DeviceCondition.DRAINING, "it gets no new segments"),
    )
    notes = StorageNotes("demo", [well, leaving], book)
    for _ in range(2):
        notes.take(frames.DevicesChanged(devices=[well]))
    assert tuple(book.notes)[1:] == ("device /nvme/b is not used any more: it is retired, or missing",)


def test_what_the_daemon_notes_stands_in_the_report_and_old_notes_go() -> None:
    book = CostBook()
    notes = StorageNotes("demo", [], book)
    for number in range(FAILURES_KEPT + 1):
        notes.take(frames.Notice(code="", message=f"note {number}"))
    kept = tuple(book.notes)
    assert (len(kept), kept[0], kept[-1]) == (FAILURES_KEPT, "note 1", f"note {FAILURES_KEPT}")
