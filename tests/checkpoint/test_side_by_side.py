"""Tests for side_by_side.py."""

import gc
import threading
import weakref
from pathlib import Path

import pytest

from everstep.checkpoint.collect import collect_garbage
from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.keep import Keep
from everstep.checkpoint.side_by_side import Here, side_by_side
from everstep.checkpoint.testing import begun, each_engine, make_state, memory_arena, opened
from everstep.core.ids import CheckpointId


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


def test_a_checkpoint_on_one_device_starts_one_thread_which_takes_its_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first byte until what it outdates is gone; what writes to the device is there before."""
    (tmp_path / "d").mkdir()
    start, started = threading.Thread.start, list[str]()

    def noted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    with opened([tmp_path / "d"]) as (store, _):
        run, state, removed = begun(store), make_state(store, segment_count=1), tuple[CheckpointId, ...]()
        with memory_arena(state.layout.slot_size_bytes) as arena, each_engine(store) as engines:
            state.copy_into(arena)
            for step in range(1, 6):
                if step == 4:
                    monkeypatch.setattr(threading.Thread, "start", noted)
                checkpoint = CheckpointId(1, step)
                persist_shard(run, state.draft(checkpoint), arena, engines=engines)
                run.set_complete_floor(checkpoint)
                removed = collect_garbage(run, keep=Keep(last=1)).removed
            assert removed == (CheckpointId(1, 3),)
    assert started == ["everstep-checksum_0"] * 2
