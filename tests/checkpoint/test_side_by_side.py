"""Tests for side_by_side.py."""

import gc
import threading
import weakref

import pytest

from everstep.checkpoint.side_by_side import Here, side_by_side


class _Held:
    pass


def _fail(held: _Held) -> None:
    raise OSError(f"no {type(held).__name__}")


@pytest.mark.parametrize(("count", "is_here"), [(0, True), (1, True), (2, False)])
def test_one_thing_is_done_here_and_several_in_threads_of_that_name(count: int, is_here: bool) -> None:
    with side_by_side(count, "everstep-test") as executor:
        names = list(executor.map(lambda _: threading.current_thread().name, range(2)))
    if is_here:
        assert set(names) == {threading.current_thread().name}
    else:
        assert all(name.startswith("everstep-test") for name in names)


def test_what_fails_here_is_raised_to_whoever_asks_and_begins_where_it_failed() -> None:
    future = Here().submit(_fail, _Held())
    assert future.done()
    with pytest.raises(OSError, match="no _Held") as caught:
        future.result()
    assert caught.traceback[-1].name == "_fail"


def test_a_failure_here_keeps_nothing_once_it_is_dropped() -> None:
    gc.collect()
    gc.disable()
    try:
        held = _Held()
        seen = weakref.ref(held)
        future = Here().submit(_fail, held)
        del held, future
        assert seen() is None
    finally:
        gc.enable()
