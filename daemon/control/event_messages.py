"""Events to and from the messages of the control API. Pure translation."""

from typing import cast

from ...core.errors import UsageError
from ...proto import node_pb2 as pb
from ..events.event_types import Event, EventKind, EventQuery
from .messages import id_from_text, id_to_text

_KINDS = {kind: cast("pb.EventKind", pb.EventKind.Value(f"EVENT_KIND_{kind.name}")) for kind in EventKind}
_KIND_OF = {number: kind for kind, number in _KINDS.items()}


def event_to_message(event: Event) -> pb.Event:
    """Return the message of an event."""
    return pb.Event(
        sequence=event.sequence,
        log_id=event.log_id,
        unix_s=event.unix_s,
        kind=_KINDS[event.kind],
        text=event.text,
        owner_uid=event.owner_uid,
        run_name=event.run_name,
        run_id=event.run_id,
        attempt=event.attempt,
        rank=event.rank,
        checkpoint=id_to_text(event.checkpoint),
        size_bytes=event.size_bytes,
        elapsed_s=event.elapsed_s,
        count=event.count,
        interval_steps=event.interval_steps,
        subject=event.subject,
        code=event.code,
        hint=event.hint,
    )


def event_from_message(message: pb.Event) -> Event | None:
    """Return the event of a message; None for a kind that only a newer daemon knows."""
    kind = _KIND_OF.get(message.kind)
    if kind is None:
        return None
    return Event(
        kind=kind,
        unix_s=message.unix_s,
        text=message.text,
        sequence=message.sequence,
        log_id=message.log_id,
        owner_uid=message.owner_uid if message.HasField("owner_uid") else None,
        run_name=message.run_name,
        run_id=message.run_id,
        attempt=message.attempt,
        rank=message.rank if message.HasField("rank") else None,
        checkpoint=id_from_text(message.checkpoint),
        size_bytes=message.size_bytes,
        elapsed_s=message.elapsed_s,
        count=message.count,
        interval_steps=message.interval_steps,
        subject=message.subject,
        code=message.code,
        hint=message.hint,
    )


def query_to_message(query: EventQuery) -> pb.WatchEventsRequest:
    """Return the request of a query."""
    return pb.WatchEventsRequest(
        run=query.run,
        kinds=sorted(_KINDS[kind] for kind in query.kinds),
        since=query.since,
        log_id=query.log_id,
        follow=query.follow,
    )


def query_from_message(message: pb.WatchEventsRequest) -> EventQuery:
    """Return what a request asks for; UsageError for a kind that does not exist."""
    unknown = [number for number in message.kinds if number not in _KIND_OF]
    if unknown:
        raise UsageError(
            f"there is no kind {unknown[0]} of events", hint="EventKind in node.proto lists them"
        )
    return EventQuery(
        run=message.run,
        kinds=frozenset(_KIND_OF[number] for number in message.kinds),
        since=message.since if message.HasField("since") else None,
        log_id=message.log_id,
        follow=message.follow,
    )
