"""What a view says survives the wire, whatever it says."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.keep import Keep
from everstep.core.ids import CheckpointId
from everstep.daemon.control import views
from everstep.daemon.control.device_messages import devices_from_message, devices_to_message
from everstep.daemon.control.device_views import DeviceDetail, PartView, StoreDevices
from everstep.daemon.control.messages import (
    detail_from_message,
    detail_to_message,
    status_from_message,
    status_to_message,
    verdict_from_message,
    verdict_to_message,
)
from everstep.daemon.devices.scrub_plan import Scrub
from everstep.daemon.slot_machine import SlotState

small = st.integers(0, 2**32 - 1)
large = st.integers(0, 2**63 - 1)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
checkpoints = st.builds(CheckpointId, st.integers(1, 2**63 - 1), large)


def some(strategy: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(strategy, max_size=3).map(tuple)


summaries = st.builds(
    views.CheckpointView,
    run_name=words,
    run_id=words,
    owner_uid=small,
    checkpoint=checkpoints,
    parent=st.none() | checkpoints,
    world_size=small,
    ranks=some(small),
    size_bytes=large,
    created_unix_s=numbers,
    notes=st.dictionaries(words, words, max_size=3),
    problems=some(words),
    tags=some(words),
)
moments = st.floats(1, 1e12)
scrubs = st.builds(
    views.ScrubView,
    newest=st.none()
    | st.builds(
        Scrub,
        started_unix_s=moments,
        ended_unix_s=st.none() | moments,
        planned_count=small,
        checkpoint_count=small,
        size_bytes=large,
        damaged=some(words),
    ),
    next_unix_s=st.none() | moments,
)
shapes = some(large)
details = st.builds(
    views.CheckpointDetail,
    summary=summaries,
    leaf_count=large,
    leaves=some(
        st.builds(
            views.LeafView,
            name=words,
            dtype=words,
            shape=shapes,
            global_shape=shapes,
            size_bytes=large,
            aliases=some(words),
            rank=small,
        )
    ),
    segments=some(
        st.builds(
            views.SegmentView,
            rank=small,
            device_id=words,
            device=words,
            file=words,
            size_bytes=large,
            block_count=small,
        )
    ),
)
documents = st.recursive(
    st.none() | st.booleans() | large | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
verdicts = st.builds(
    views.Verdict,
    summary=summaries,
    segments=some(
        st.builds(
            views.SegmentVerdictView,
            rank=small,
            path=words,
            size_bytes=large,
            bad_block=st.none() | small,
            problem=words,
        )
    ),
    problems=some(words),
    loaders=some(st.builds(views.LoaderRecord, rank=small, place=words, ledger=documents, state=documents)),
    elapsed_s=numbers,
)
slots = st.builds(views.SlotView, state=st.sampled_from(SlotState), checkpoint=st.none() | checkpoints)
ranks = st.builds(views.RankView, rank=small, step=large, slots=some(slots), arena_bytes=large, pid=large)
paces = st.builds(
    views.PaceView,
    interval_steps=large,
    reason=words,
    goal_missed=words,
    cost_share=numbers,
    skipped_count=large,
    budget=st.none() | numbers,
    paused_until_unix_s=numbers,
)
statuses = st.builds(
    views.StatusView,
    daemon=st.builds(
        views.DaemonView,
        version=words,
        pid=large,
        uptime_s=numbers,
        socket=words,
        uid=small,
        arena_bytes=large,
        metrics_port=small,
        metrics_url=words,
        persisted_count=large,
        failed_count=large,
    ),
    runs=some(
        st.builds(
            views.RunView,
            name=words,
            run_id=words,
            owner_uid=small,
            attempt=large,
            world_size=small,
            ranks=some(ranks),
            complete_floor=st.none() | checkpoints,
            pace=st.none() | paces,
            keep=st.builds(
                Keep,
                last=st.integers(1, 2**63 - 1),
                every_steps=st.none() | st.integers(1, 2**63 - 1),
                every=st.none() | st.sampled_from(["30s", "6h", "7d"]),
            ),
        )
    ),
    stores=some(
        st.builds(
            views.StoreView,
            store_id=words,
            devices=some(
                st.builds(
                    views.DeviceView,
                    device_id=words,
                    path=words,
                    free_bytes=large,
                    pool_bytes=large,
                    total_bytes=large,
                    engine=words,
                    engine_reason=words,
                    reason=words,
                    write_bytes_per_s=large,
                )
            ),
            notes=some(words),
            problems=some(words),
            scrub=scrubs,
        )
    ),
)


@given(statuses)
def test_a_status_survives_the_wire(status: views.StatusView) -> None:
    assert status_from_message(status_to_message(status)) == status


@given(details)
def test_a_checkpoint_survives_the_wire(detail: views.CheckpointDetail) -> None:
    assert detail_from_message(detail_to_message(detail)) == detail


@given(verdicts)
def test_a_verdict_survives_the_wire(verdict: views.Verdict) -> None:
    assert verdict_from_message(verdict_to_message(verdict)) == verdict


stores_devices = st.lists(
    st.builds(
        StoreDevices,
        store_id=words,
        devices=some(
            st.builds(
                DeviceDetail,
                device_id=words,
                path=words,
                reason=words,
                total_bytes=large,
                free_bytes=large,
                pool_bytes=large,
                held_bytes=large,
                parts=some(
                    st.builds(
                        PartView,
                        run_name=words,
                        owner_uid=small,
                        checkpoint=checkpoints,
                        size_bytes=large,
                        newest_elsewhere=st.none() | checkpoints,
                    )
                ),
                retired_unix_s=numbers,
                missing_since_unix_s=numbers,
                highest=st.dictionaries(words, checkpoints, max_size=3),
            )
        ),
    ),
    max_size=2,
)


@given(stores_devices)
def test_devices_survive_the_wire(stores: list[StoreDevices]) -> None:
    assert devices_from_message(devices_to_message(stores)) == stores
