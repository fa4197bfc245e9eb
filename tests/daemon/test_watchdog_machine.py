"""Lanes that move and lanes that stand still."""

from everstep.daemon.watchdog_machine import Lane, WatchdogMachine


def lanes(**ended: tuple[int, int]) -> dict[str, Lane]:
    return {name: Lane(waiting=waiting, ended=count) for name, (waiting, count) in ended.items()}


def test_one_that_has_work_and_ends_nothing_stands_still_after_its_patience() -> None:
    machine = WatchdogMachine(10.0)
    assert machine.look(0.0, lanes(a=(3, 7), b=(0, 7))) == []
    assert machine.look(10.0, lanes(a=(3, 7), b=(0, 7))) == []
    assert machine.look(10.5, lanes(a=(9, 7), b=(0, 7))) == ["a"]
    assert machine.look(11.0, lanes(a=(8, 8), b=(0, 7))) == []
    assert machine.look(20.0, lanes(a=(8, 8), b=(0, 7))) == []
    assert machine.look(21.5, lanes(a=(8, 8), b=(1, 7))) == ["a"]


def test_the_time_without_work_does_not_count() -> None:
    machine = WatchdogMachine(10.0)
    machine.look(0.0, lanes(a=(0, 7)))
    assert machine.look(99.0, lanes(a=(0, 7))) == []
    assert machine.look(105.0, lanes(a=(1, 7))) == []
    assert machine.look(109.5, lanes(a=(1, 7))) == ["a"]


def test_a_device_that_was_closed_is_forgotten() -> None:
    machine = WatchdogMachine(10.0)
    machine.look(0.0, lanes(a=(1, 7)))
    assert machine.look(20.0, {}) == []
    assert machine.look(40.0, lanes(a=(1, 7))) == []
