"""Controllers of runs to and from the messages of the control API. Pure translation."""

from typing import cast

from ...proto import node_pb2 as pb
from ..controller.controller_views import ControllerState, ControllerView, ForcedView

_STATES = {
    state: cast("pb.ControllerState", pb.ControllerState.Value(f"CONTROLLER_STATE_{state.name}"))
    for state in ControllerState
}
_STATE_OF = {number: state for state, number in _STATES.items()}


def controller_to_message(view: ControllerView) -> pb.ControllerStatus:
    """Return the message of a controller."""
    return pb.ControllerStatus(
        run_name=view.run_name,
        run_id=view.run_id,
        owner_uid=view.owner_uid,
        state=_STATES[view.state],
        attached_count=view.attached_count,
        step=view.step,
        step_s=view.step_s,
        interval_steps=view.interval_steps,
        bound=view.bound,
        reason=view.reason,
        goal_missed=view.goal_missed,
        budget=view.budget,
        asked_budget=view.asked_budget,
        cost_share=view.cost_share,
        cost_half_width=view.cost_half_width,
        steps_undecided=view.steps_undecided,
        paused_until_unix_s=view.paused_until_unix_s,
        forced_count=view.forced_count,
    )


def controller_from_message(message: pb.ControllerStatus) -> ControllerView:
    """Return the controller of a message."""
    return ControllerView(
        run_name=message.run_name,
        run_id=message.run_id,
        owner_uid=message.owner_uid,
        state=_STATE_OF.get(message.state, ControllerState.UNKNOWN),
        attached_count=message.attached_count,
        step=message.step,
        step_s=message.step_s,
        interval_steps=message.interval_steps,
        bound=message.bound,
        reason=message.reason,
        goal_missed=message.goal_missed,
        budget=message.budget if message.HasField("budget") else None,
        asked_budget=message.asked_budget if message.HasField("asked_budget") else None,
        cost_share=message.cost_share if message.HasField("cost_share") else None,
        cost_half_width=message.cost_half_width if message.HasField("cost_half_width") else None,
        steps_undecided=message.steps_undecided,
        paused_until_unix_s=message.paused_until_unix_s,
        forced_count=message.forced_count,
    )


def forced_to_message(view: ForcedView) -> pb.ForceCheckpointResponse:
    """Return the answer of a checkpoint that was asked for."""
    return pb.ForceCheckpointResponse(
        run_name=view.run_name,
        checkpoint=view.checkpoint,
        size_bytes=view.size_bytes,
        waited_s=view.waited_s,
    )


def forced_from_message(message: pb.ForceCheckpointResponse) -> ForcedView:
    """Return the checkpoint of an answer."""
    return ForcedView(
        run_name=message.run_name,
        checkpoint=message.checkpoint,
        size_bytes=message.size_bytes,
        waited_s=message.waited_s,
    )
