"""What refuses a job, what is only noted, and what a person reads."""

import pytest

from everstep.daemon.health_check.verdict_plan import Ailment, DeviceFacts, judge

REFUSE = frozenset(Ailment) - {Ailment.SLOW}


def device(name: str, *, is_draining: bool = False, **ailments: str) -> DeviceFacts:
    return DeviceFacts(
        name=name,
        path=f"/{name}/everstep",
        ailments={Ailment(each): why for each, why in ailments.items()},
        is_draining=is_draining,
    )


def test_well_devices_let_a_job_start() -> None:
    verdict = judge([device("nvme0"), device("nvme1")], is_ending=False, refuse=REFUSE)
    assert verdict.may_start
    assert verdict.error == ""
    assert verdict.document() == {"fail_count": 0, "failed_checks": [], "device_count": 2, "findings": []}


@pytest.mark.parametrize("ailment", sorted(each.value for each in REFUSE))
def test_each_ailment_refuses_and_names_device_reason_and_remedy(ailment: str) -> None:
    sick = DeviceFacts(name="nvme1", path="/nvme1/everstep", ailments={Ailment(ailment): "why"})
    verdict = judge([device("nvme0"), sick], is_ending=False, refuse=REFUSE)
    assert not verdict.may_start
    document = verdict.document()
    assert (document["fail_count"], document["failed_checks"]) == (1, [f"everstep:{ailment}:nvme1"])
    (finding,) = verdict.refused
    assert finding.device == "/nvme1/everstep"
    assert finding.reason == f"device nvme1 (/nvme1/everstep) is {ailment}: why"
    assert finding.action
    assert verdict.error == f"{finding.reason}; {finding.action}"


def test_a_slow_device_is_noted_and_refuses_where_the_operator_wants_it() -> None:
    devices = [device("nvme0", slow="3 times slower")]
    noted = judge(devices, is_ending=False, refuse=REFUSE)
    assert noted.may_start
    (finding,) = noted.document()["findings"]  # pyright: ignore[reportGeneralTypeIssues]
    assert (finding["check"], finding["refuses"]) == ("everstep:slow:nvme0", False)
    assert not judge(devices, is_ending=False, refuse=[Ailment.SLOW]).may_start


def test_several_reasons_are_all_told_in_a_fixed_order() -> None:
    devices = [device("nvme0", full="no room", suspect="EIO"), device("nvme1", missing="")]
    verdict = judge(devices, is_ending=True, refuse=REFUSE)
    assert [each.check for each in verdict.refused] == [
        "everstep:ending",
        "everstep:suspect:nvme0",
        "everstep:full:nvme0",
        "everstep:missing:nvme1",
    ]
    assert verdict.document()["fail_count"] == 4
    assert "is missing; mount it" in verdict.error, "without a reason there is no colon"


def test_draining_devices_are_well_unless_none_is_left() -> None:
    draining = device("nvme0", is_draining=True)
    assert judge([draining, device("nvme1")], is_ending=False, refuse=REFUSE).may_start
    verdict = judge([draining], is_ending=False, refuse=REFUSE)
    assert [each.check for each in verdict.refused] == ["everstep:draining"]


def test_a_device_without_a_name_is_told_by_its_path_once() -> None:
    nameless = DeviceFacts(name="/x", path="/x", ailments={Ailment.SUSPECT: "EIO"})
    (finding,) = judge([nameless], is_ending=False, refuse=REFUSE).refused
    assert finding.reason == "device /x is suspect: EIO"
