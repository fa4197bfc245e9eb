"""The messages of the configuration, both ways."""

from ...proto import node_pb2 as pb
from ..configuration.reload_plan import Change
from ..configuration.reloader import Reloaded
from ..configuration.toml_format import Value


def reload_to_message(done: Reloaded) -> pb.ReloadConfigResponse:
    """Return what a reload changed, or would, as a message."""
    return pb.ReloadConfigResponse(
        file=done.file,
        changes=[
            pb.ConfigChange(
                key=each.key, before=each.before, after=each.after, takes_effect=each.takes_effect
            )
            for each in done.changes
        ],
        problem=done.problem,
        hint=done.hint,
        values=[pb.ConfigValue(path=each.path, value=each.text, origin=each.origin) for each in done.values],
    )


def reload_from_message(message: pb.ReloadConfigResponse) -> Reloaded:
    """Return what a message says of a reload."""
    return Reloaded(
        file=message.file,
        changes=tuple(
            Change(key=each.key, before=each.before, after=each.after, takes_effect=each.takes_effect)
            for each in message.changes
        ),
        problem=message.problem,
        hint=message.hint,
        values=tuple(
            Value(path=tuple(each.path), text=each.value, origin=each.origin) for each in message.values
        ),
    )
