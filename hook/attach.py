"""`everstep.attach`: ties a training script to the node's daemon."""

import logging
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Never, cast

from ..checkpoint.frequency_types import Limits
from ..checkpoint.keep import Keep
from ..checkpoint.lineage_plan import Goal
from ..core.analysed import is_analysed
from ..core.errors import EverstepError, UsageError
from ..core.ids import run_id_of
from ..proto.frames import Reply
from .analysed_run import AnalysedRun
from .component import Component, make_components
from .environment import news_of_its_end
from .link import Link, RunAddress
from .notice import Preemption
from .pace import Pace
from .plain_errors import with_plain_errors
from .rank_protocol import Ranks
from .ranks import make_ranks
from .run import Run
from .run_state import RUN_COMPONENT

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


@with_plain_errors
def attach(  # noqa: PLR0913 - all that a run is
    name: str,
    *unnamed: Never,
    storage: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    every: int | None = None,
    limits: Limits | None = None,
    fresh: bool = False,
    back_to: str | None = None,
    takeover: bool = False,
    slots: int = 2,
    replicated: bool = False,
    debug: bool = False,
    device_first: bool = True,
    keep: Keep | None = None,
    preemption: Preemption | None = None,
    **objects: object,
) -> Run:
    """Return the run of this name, with everything in `objects` as its state.

        with everstep.attach("my-run", model=model, optimizer=optimizer, loader=loader, storage=["/nvme0/ckpt"]) as run:
            run.restore()
            for epoch in run.epochs(10):
                for batch in loader:
                    ...
                    run.step()

    Call it after `torch.distributed.init_process_group` and, under DDP, with the wrapped model.

    Args:
        name: identity of the run on this node and for this user; a restart with the same name goes on.
        unnamed: refused: each object is found again by its name.
        storage: directories, one per device (or device names, with a node's daemon). Segments are spread over all.
        every: boundaries (`run.step()`) between two checkpoints; None: the controller decides, within `limits`.
        limits: what the controller keeps to, `Limits(budget=0.035, most_s=600.0)`; None: 3.5 % of the time.
        fresh: start anew: older checkpoints of this name are not restored, and go when newer ones are complete.
        back_to: restore this checkpoint, "3.2000" as `everstep ls` names it, though there are newer ones. Once a
            checkpoint after it is complete a restart with the same one goes on from there.
        takeover: take the run from a trainer that still lives; that one gets a FencedError.
        slots: snapshots that fit in memory at once; each takes as much as the state.
        replicated: every rank holds the same tensors, though no DistributedDataParallel says so.
        debug: checksums prove that no snapshot holds what was written after its boundary, by whatever way, outside of
            `run.mutating()`. The boundary waits while the state is read once.
        device_first: a copy from a CUDA device that is measured not to fit between boundary and optimizer step may go
            through free memory of the device, so that the optimizer need not wait for it. False: never.
        keep: which complete checkpoints stay, `Keep(last=3, every_steps=1000, every="6h")`; None: as the daemon is
            configured, the last 3 where it is not. Give every rank the same.
        preemption: what announces the run's end, `Preemption(notice_file="/run/spot", grace_s=120.0)`; None: SIGTERM
            does, 30 seconds before, and `run.step()` raises SystemExit after a last checkpoint.
        objects: modules, optimizers, loaders, generators, anything with state_dict and load_state_dict, by name.

    Raises:
        UsageError: an object that cannot be saved, a bad argument, or one that ranks were not given alike; the message
            names it.
        RunBusyError: the run's trainer still lives.
        ConfigError: a directory that does not exist, or no device's name.
        StorageError: a directory cannot be written to, or another daemon holds it.
        DaemonUnavailableError: no daemon could be reached or started.
    """
    _refuse_unnamed(name, unnamed)
    directories = _storage(storage)
    _check_arguments(
        name, every=every, limits=limits, slots=slots, keep=keep, preemption=preemption, objects=objects
    )
    goal = _goal(back_to, fresh=fresh)
    pace = Pace(every=every, limits=limits or Limits())
    if is_analysed():
        make_components(objects, world_size=1)  # what cannot be saved is refused there, too
        return AnalysedRun(name, objects, pace)
    ranks = make_ranks(run_id_of(name), pace)
    components: list[Component] = []
    error: EverstepError | None = None
    try:
        components = make_components(objects, world_size=ranks.world_size)
    except EverstepError as refused:  # here alone, perhaps: the others need not wait for this rank
        error = refused
    events = _Events()
    address = RunAddress(
        name=name,
        rank=ranks.rank,
        world_size=ranks.world_size,
        storage=directories,
        takeover=takeover,
        keep=keep,
    )
    # First: a takeover that is refused afterwards would have ended the run that it was to take.
    alike = {"every": every, "limits": limits, "fresh": fresh, "takeover": takeover, "replicated": replicated}
    alike |= {"back_to": back_to, "keep": keep}
    ranks.agree_settings({name: repr(value) for name, value in alike.items()}, error)
    link, attempt = _join(ranks, address, events, fresh=fresh)
    _say_attached(name, link, rank=ranks.rank)
    try:
        run = Run(
            name=name,
            link=link,
            ranks=ranks,
            attempt=attempt,
            components=components,
            objects=objects,
            slots=slots,
            replicated=replicated,
            debug=debug,
            device_first=device_first,
            pace=pace,
            preemption=preemption or Preemption(),
            goal=goal,
        )
    except BaseException:
        link.close()
        raise
    events.connect(run.on_event)
    return run


def _join(ranks: Ranks, address: RunAddress, events: "_Events", *, fresh: bool) -> tuple[Link, int]:
    """Open the run and agree on the attempt; a refusal of any rank is raised by all."""
    link: Link | None = None
    error: EverstepError | None = None
    try:
        link = Link(address, events)
    except EverstepError as refused:
        error = refused
    try:
        attempt = ranks.agree_attempt(link.opened.highest_attempt if link is not None else 0, error)
        assert link is not None
        try:
            link.begin_attempt(attempt, fresh=fresh)
        except EverstepError as refused:
            error = refused
        ranks.agree_begun(error)
    except BaseException:
        if link is not None:
            link.close()
        raise
    return link, attempt


def _say_attached(name: str, link: Link, *, rank: int) -> None:
    for note in link.opened.notes:
        logger.warning("storage run=%s: %s", name, note)
    if rank == 0 and (reason := news_of_its_end(link.client.welcome)):
        logger.warning(
            "private_daemon run=%s: %s, so memory does not outlive it; run a node daemon (docs/configuration.md)",
            name,
            reason,
        )


class _Events:
    """Holds back the daemon's events until there is a run to take them.

    There are some where an attempt before this one still has snapshots to be written, or an operator has asked for
    something.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._early: list[Reply] = []
        self._target: Callable[[Reply], None] | None = None

    def connect(self, target: "Callable[[Reply], None]") -> None:
        """Hand events to `target` from now on, first those that were held back."""
        with self._lock:
            for event in self._early:
                target(event)
            self._early.clear()
            self._target = target

    def __call__(self, event: Reply) -> None:
        if self._target is None:
            with self._lock:
                if self._target is None:
                    self._early.append(event)
                    return
        self._target(event)


def _goal(back_to: str | None, *, fresh: bool) -> Goal | None:
    """Return where the run goes back to; UsageError for what is no checkpoint's name."""
    if back_to is None:
        return None
    if fresh:
        raise UsageError(f"fresh=True and back_to={back_to!r}", hint="start anew, or go back: not both")
    try:
        return Goal.parse(back_to)
    except (ValueError, AttributeError) as error:
        raise UsageError(
            f"back_to={back_to!r}", hint="a checkpoint as `everstep ls` names it: back_to='3.2000'"
        ) from error


def _is_int(value: object) -> bool:
    """Tell whether a value is a whole number; True is none, nor is 2.0."""
    return isinstance(value, int) and not isinstance(value, bool)


def _storage(storage: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    given: object = storage
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
    found: list[object] = list(cast("Iterable[object]", given)) if several else [given]
    items = [
        os.fspath(cast("str | os.PathLike[str]", item))
        for item in found
        if isinstance(item, str | os.PathLike)
    ]
    if len(items) < len(found):
        raise UsageError(f"storage={storage!r}", hint="a path or several: storage=['/nvme0/everstep']")
    if not items or not all(items):
        raise UsageError(f"storage={storage!r} is empty", hint="name at least one directory")
    # A bare word may be a device name of a node's daemon; everything else is a path of this process.
    return tuple(map(_place, items))


def _place(item: str) -> str:
    is_name = "/" not in item and not item.startswith(".") and not Path(item).exists()
    return item if is_name and _node_daemon_expected() else str(Path(item).absolute())


def _node_daemon_expected() -> bool:
    """Device names exist only with a node's daemon, whose socket is set or stands in /run."""
    return "EVERSTEP_SOCKET" in os.environ or Path(f"/run/everstep/{os.getuid()}").is_dir()


def _refuse_unnamed(name: str, unnamed: Sequence[object]) -> None:
    if unnamed:
        kinds = ", ".join(type(each).__name__ for each in unnamed)
        raise UsageError(
            f"attach() was given without a name: {kinds}",
            hint=f"each by its keyword: attach({name!r}, model=model, optimizer=optimizer, storage=[...])",
        )


def _check_arguments(
    name: str,
    *,
    every: int | None,
    limits: Limits | None,
    slots: int,
    keep: Keep | None,
    preemption: Preemption | None,
    objects: dict[str, object],
) -> None:
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"the run is named {name!r}", hint="a str, as in attach('my-run', ...)")
    try:
        run_id_of(name)
    except ValueError as error:
        raise UsageError(str(error), hint="choose another name in attach()") from error
    if every is not None and (not _is_int(every) or every < 1):
        raise UsageError(f"every={every!r}", hint="a checkpoint each N boundaries: an int of at least 1")
    if every is not None and limits is not None:
        raise UsageError(
            f"every={every} and limits={limits}", hint="fix the interval by every, or let limits bound it"
        )
    if limits is not None and not isinstance(limits, Limits):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"limits={limits!r}", hint="limits=everstep.Limits(budget=0.035, most_s=600.0)")
    if not _is_int(slots) or not 2 <= slots <= 64:
        raise UsageError(
            f"slots={slots!r}", hint="2 to 64: the newest is kept in memory while the next is copied"
        )
    if keep is not None and not isinstance(keep, Keep):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"keep={keep!r}", hint="keep=everstep.Keep(last=3, every_steps=1000)")
    if preemption is not None and not isinstance(preemption, Preemption):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"preemption={preemption!r}", hint="preemption=everstep.Preemption(notice_file='/run/spot')"
        )
    if not objects:
        raise UsageError(
            "nothing to save", hint="attach(name, model=model, optimizer=optimizer, ..., storage=[...])"
        )
    if RUN_COMPONENT in objects:
        raise UsageError(f"{RUN_COMPONENT!r} is the name of the run's own state", hint="use another keyword")
