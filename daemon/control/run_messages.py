"""Runs and slots to and from the messages of the control API. Pure translation."""

from typing import cast

from ...proto import node_pb2 as pb
from ..slot_machine import SlotState
from .messages import SLOT_STATE_OF, SLOT_STATES, id_from_text, id_to_text, run_from_message, run_to_message
from .run_views import RunDetail, RunState, SlotDetail

_STATES = {state: cast("pb.RunState", pb.RunState.Value(f"RUN_STATE_{state.name}")) for state in RunState}
_STATE_OF = {number: state for state, number in _STATES.items()}


def run_detail_to_message(detail: RunDetail) -> pb.RunDetail:
    """Return the message of a run."""
    return pb.RunDetail(
        status=run_to_message(detail.status),
        state=_STATES[detail.state],
        checkpoint_count=detail.checkpoint_count,
        size_bytes=detail.size_bytes,
        arena_bytes=detail.arena_bytes,
    )


def run_detail_from_message(message: pb.RunDetail) -> RunDetail:
    """Return the run of a message."""
    return RunDetail(
        status=run_from_message(message.status),
        state=_STATE_OF.get(message.state, RunState.CLOSED),
        checkpoint_count=message.checkpoint_count,
        size_bytes=message.size_bytes,
        arena_bytes=message.arena_bytes,
    )


def slot_to_message(slot: SlotDetail) -> pb.SlotDetail:
    """Return the message of a slot."""
    return pb.SlotDetail(
        run_name=slot.run_name,
        run_id=slot.run_id,
        owner_uid=slot.owner_uid,
        rank=slot.rank,
        arena=slot.arena,
        slot=slot.slot,
        state=SLOT_STATES[slot.state],
        checkpoint=id_to_text(slot.checkpoint),
        size_bytes=slot.size_bytes,
    )


def slot_from_message(message: pb.SlotDetail) -> SlotDetail:
    """Return the slot of a message."""
    return SlotDetail(
        run_name=message.run_name,
        run_id=message.run_id,
        owner_uid=message.owner_uid,
        rank=message.rank,
        arena=message.arena,
        slot=message.slot,
        state=SLOT_STATE_OF.get(message.state, SlotState.LOST),
        checkpoint=id_from_text(message.checkpoint),
        size_bytes=message.size_bytes,
    )
