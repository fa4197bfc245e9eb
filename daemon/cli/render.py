"""Tables for people, readable at 80 columns. Names come from users: nothing in them is taken as markup."""

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...checkpoint.findings import Severity
from ...checkpoint.fsck import FsckReport
from ...checkpoint.succession_plan import SNAPSHOT_NOTE
from ...core.sizes import size_text
from ..access.views import UserQuotas
from ..control.views import (
    CheckpointDetail,
    CheckpointStatus,
    CheckpointView,
    DeviceStatus,
    PaceView,
    RankState,
    RankView,
    Removed,
    RunView,
    ScrubStarted,
    ScrubView,
    StatusView,
    Stopped,
    StoreView,
    Verdict,
)
from ..slot_machine import SlotState
from ..trace_plan import trace_text

if TYPE_CHECKING:
    from ..control.ledger_check import LedgerVerdict

PIPE_WIDTH = 120
"""Columns when nobody looks: wide enough that grep finds whole lines."""

QUOTA_NEAR_SHARE = 0.8
"""Above this a user is told of a bound before it stops anything."""

GOOD, BAD, WARN, DIM, HEAD = "green", "bold red", "yellow", "dim", "bold"
STATE_STYLES = {
    CheckpointStatus.COMPLETE: GOOD,
    CheckpointStatus.LOCAL: WARN,
    CheckpointStatus.DAMAGED: BAD,
    RankState.ATTACHED: GOOD,
    RankState.LINGERING: WARN,
    RankState.CLOSED: DIM,
    DeviceStatus.OK: GOOD,
    DeviceStatus.SLOW: WARN,
    DeviceStatus.SUSPECT: WARN,
    DeviceStatus.MISSING: BAD,
    DeviceStatus.DRAINING: WARN,
    DeviceStatus.RETIRED: DIM,
}


def make_console() -> Console:
    """Return the console of this process; rich itself honours NO_COLOR, TERM and COLUMNS."""
    is_fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_fixed else PIPE_WIDTH, markup=False, highlight=False, emoji=False)


# --- words ----------------------------------------------------------------------------------------------------------


def duration_text(seconds: float) -> str:
    """Return a duration in its largest fitting unit: `3 min`."""
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit_s:
            return f"{max(seconds, 0) / unit_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def time_text(unix_s: float) -> str:
    """Return local time: `2026-03-01 12:34:56`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def age_text(unix_s: float) -> str:
    """Return how long ago that was."""
    return f"{duration_text(time.time() - unix_s)} ago"


def count_text(count: int, noun: str) -> str:
    """Return `1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --- status ---------------------------------------------------------------------------------------------------------


def status(console: Console, found: StatusView, quotas: Sequence[UserQuotas] = ()) -> None:
    """Draw the daemon, what its users have taken of bounds that are near or were met, its runs and its stores."""
    daemon = found.daemon
    kind = "private" if daemon.is_private else "node"
    draining = ", draining" if daemon.is_draining else ""
    _line(
        console,
        f"everstep {daemon.version}: {kind} daemon, pid {daemon.pid}, up {duration_text(daemon.uptime_s)}{draining}",
        HEAD,
    )
    _pairs(
        console,
        [
            ("socket", daemon.socket),
            ("metrics", daemon.metrics_url or "off"),
            ("arenas", size_text(daemon.arena_bytes)),
            ("shards", f"{daemon.persisted_count} committed, {daemon.failed_count} failed"),
        ],
    )
    for user in quotas:
        _quota(console, user)
    console.print()
    if found.runs:
        _runs(console, found.runs)
    else:
        _line(console, "no run has attached", DIM)
    if found.caches:
        from .cache_commands import draw_caches  # noqa: PLC0415  it draws with what is here

        console.print()
        draw_caches(console, found.caches)
    if found.groups:
        from .shared_commands import draw_groups  # noqa: PLC0415  it draws with what is here

        console.print()
        draw_groups(console, found.groups)
    for store in found.stores:
        console.print()
        _store(console, store)


def _quota(console: Console, user: UserQuotas) -> None:
    near = [each for each in user.bounded if each.used > QUOTA_NEAR_SHARE * each.bound]
    said = [
        f"{each.name} {amount_text(each.name, each.used)} of {amount_text(each.name, each.bound)}"
        for each in near
    ]
    if user.refused_count:
        said.append(f"{user.refused_count} calls and connections were too many")
    if said:
        _line(console, f"! quota of uid {user.uid}: {', '.join(said)} (`everstep quota`)", WARN)


def amount_text(name: str, count: float) -> str:
    """Return how much of a bound, which has its unit in its name."""
    return size_text(count) if name.endswith("_bytes") else f"{count:.0f}"


def _runs(console: Console, runs: Sequence[RunView]) -> None:
    table = _table("RUN", "ATTEMPT", "RANK", "STATE", "STEP", "MEMORY", "SNAPSHOTS")
    for run in runs:
        for index, rank in enumerate(run.ranks):
            table.add_row(
                Text(run.name if index == 0 else "", overflow="fold"),
                str(run.attempt) if index == 0 else "",
                f"{rank.rank}/{run.world_size}",
                Text(f"left: {rank.left}" if rank.left else rank.state.value, STATE_STYLES[rank.state]),
                str(rank.step) if rank.step else "-",
                size_text(rank.arena_bytes) if rank.arena_bytes else "-",
                _slots_text(rank),
            )
    console.print(table)
    for run in runs:
        says = "its trainer" if run.is_own_keep else "the daemon's configuration"
        _line(console, f"{run.name} keeps {run.keep}, as {says} says", DIM)
        if run.pace is not None:
            _line(console, f"{run.name} {_pace_text(run.pace)}", DIM)
        if run.pace is not None and run.pace.goal_missed:
            _line(console, f"{run.name}: {run.pace.goal_missed}", WARN)


def _pace_text(pace: PaceView) -> str:
    every = "each step" if pace.interval_steps == 1 else f"every {pace.interval_steps} steps"
    skipped = f", {pace.skipped_count} skipped" if pace.skipped_count else ""
    if pace.is_paused:
        return f"takes no checkpoint, {pace.reason}{skipped}"
    is_known = pace.train_s > pace.stall_s and pace.steps != 1  # one that has just restored knows nothing yet
    cost = f"; they cost {100 * pace.cost_share:.2f} %" if is_known else ""
    return f"takes a checkpoint {every}, {pace.reason}{cost}{skipped}"


def _slots_text(rank: RankView) -> str:
    held = [f"{slot.checkpoint} {slot.state.value}" for slot in rank.slots if slot.checkpoint is not None]
    free_count = sum(slot.state is SlotState.FREE for slot in rank.slots)
    return ", ".join([*held, *([f"{free_count} free"] if free_count else [])]) or "-"


def _store(console: Console, store: StoreView) -> None:
    table = _table("DEVICE", "STATE", "WRITES", "ENGINE", "DIRECT", "FREE", "OF")
    for device in store.devices:
        is_there = device.state is not DeviceStatus.MISSING
        has_room = is_there and device.total_bytes > 0
        table.add_row(
            Text(" ".join(filter(None, (device.name, device.path))), overflow="fold"),
            Text(device.state.value, STATE_STYLES[device.state]),
            f"{size_text(device.write_bytes_per_s)}/s" if device.write_bytes_per_s else "-",
            device.engine or "-",
            ("yes" if device.is_direct else "no") if is_there else "-",
            size_text(device.free_bytes) if has_room else "-",
            size_text(device.total_bytes) if has_room else "-",
        )
    console.print(table)
    for reason in dict.fromkeys(device.engine_reason for device in store.devices if device.engine_reason):
        _line(console, f"  engine: {reason}", DIM)
    for device in store.devices:
        if device.reason:
            _line(console, f"! {device.path}: {device.reason}", WARN)
        if device.pool_bytes:
            _line(console, f"  {device.path}: {pool_text(device.pool_bytes)}", DIM)
    _line(console, f"  scrub: {_scrub_text(store.scrub)}", DIM)
    for note in store.notes:
        _line(console, f"  {note}", DIM)
    _notes(console, store.problems)


def pool_text(pool_bytes: int) -> str:
    """Return a sentence about what waits to be written over."""
    return f"{size_text(pool_bytes)} of deleted checkpoints are kept to be written over, and given back when needed"


def _scrub_text(scrub: ScrubView) -> str:
    newest, next_s = scrub.newest, scrub.next_unix_s
    plan = "only on request" if next_s is None else f"next {time_text(next_s)}"
    if newest is None:
        return f"none since the daemon started, {plan}"
    read = f"{size_text(newest.size_bytes)} in {count_text(newest.checkpoint_count, 'checkpoint')}"
    found = f"damaged: {', '.join(newest.damaged)}" if newest.damaged else "nothing damaged"
    if newest.ended_unix_s is None:
        return f"reading, {read} of {newest.planned_count} so far, {found}"
    return f"{age_text(newest.ended_unix_s)}, {read}, {found}, {plan}"


# --- checkpoints ----------------------------------------------------------------------------------------------------


_CHECKPOINT_HEADS = ("CHECKPOINT", "STATE", "RANKS", "SIZE", "SAVED", "", "")


def checkpoints(
    console: Console, found: Sequence[CheckpointView], notes: Sequence[str], nothing: str
) -> None:
    """Draw the checkpoints, a table for each run; `nothing` is said where there is none."""
    # What recovery says of a damaged checkpoint stands below its table, too.
    told = [problem.partition(": ")[2] for view in found for problem in view.problems]
    notes = [note for note in notes if not any(problem in note for problem in told)]
    _notes(console, notes)
    if not found:
        _line(console, nothing, DIM)
    by_run: dict[tuple[str, int], list[CheckpointView]] = {}
    for view in found:
        by_run.setdefault((view.run_name, view.owner_uid), []).append(view)
    widths = [max(map(len, cells)) for cells in zip(*map(_checkpoint_row, found), strict=True)]
    for index, (run, views) in enumerate(by_run.items()):
        if index or notes:
            console.print()
        owner = "" if run[1] == os.getuid() else f"  (uid {run[1]})"
        _line(console, f"{run[0]}{owner}", HEAD)
        _run_table(console, views, widths)
    away = Counter(path for view in found for path in view.missing_on)
    if away:
        console.print()
    for path, count in sorted(away.items()):
        have = "has parts" if count == 1 else "have parts"
        _line(console, f"! {path} is missing: {count_text(count, 'checkpoint')} {have} there", BAD)


def _run_table(console: Console, views: Sequence[CheckpointView], widths: Sequence[int]) -> None:
    table = _table(*_CHECKPOINT_HEADS)
    for column, width in zip(table.columns[:-2], widths, strict=False):  # time and marks may be folded
        column.min_width = width
    for view in views:
        table.add_row(*_checkpoint_row(view))
    console.print(table)
    for view in views:
        for problem in () if view.missing_on else view.problems:
            _line(console, f"! {view.checkpoint}: {problem}", BAD)


def _checkpoint_row(view: CheckpointView) -> tuple[Text, ...]:
    return (
        Text(str(view.checkpoint)),
        _state_text(view),
        Text(f"{len(view.ranks)}/{view.world_size}"),
        Text(size_text(view.size_bytes)),
        Text(age_text(view.created_unix_s)),
        Text(time_text(view.created_unix_s), DIM),
        Text(_marks(view)),
    )


def _state_text(view: CheckpointView) -> Text:
    """Return the state; what is only away is called incomplete, because it comes back with its device."""
    return Text("incomplete", WARN) if view.missing_on else Text(view.state.value, STATE_STYLES[view.state])


def _marks(view: CheckpointView) -> str:
    marks = ["memory"] if view.is_in_memory else []
    if view.notes.get("finished") == "true":
        marks.append("finished")
    if not view.is_offered and view.state is not CheckpointStatus.DAMAGED:
        marks.append("set aside")
    marks += [f"tag:{name}" for name in view.tags]
    marks += [f"pin:{each.label}" for each in view.pins]
    return " ".join(marks)


def detail(console: Console, found: CheckpointDetail) -> None:
    """Draw one checkpoint."""
    view = found.summary
    _line(console, view.title, HEAD)
    here = f"rank{'' if len(view.ranks) == 1 else 's'} {', '.join(map(str, view.ranks))}"
    state = _state_text(view)
    state.append(f" {_marks(view)}".rstrip())
    _pairs(
        console,
        [
            ("state", state),
            ("saved", f"{time_text(view.created_unix_s)} ({age_text(view.created_unix_s)})"),
            (
                "size",
                f"{size_text(view.size_bytes)} in {count_text(len(found.segments), 'file')}, {found.leaf_count} leaves",
            ),
            ("ranks", f"{len(view.ranks)} of {view.world_size} ({here})"),
            ("parent", str(view.parent) if view.parent else "none"),
            ("run id", view.run_id),
            ("trace", trace_text(view.run_id, view.checkpoint)),
            ("files in", f"runs/{view.owner_uid}/{view.run_id}/data of each device"),
            *((name, text) for name, text in sorted(view.notes.items()) if name != SNAPSHOT_NOTE),
        ],
    )
    for problem in view.problems:
        _line(console, f"! {problem}", BAD)
    console.print()
    _segments(console, found)
    if found.leaves:
        console.print()
        _leaves(console, found)


def _segments(console: Console, found: CheckpointDetail) -> None:
    table = _table("RANK", "SIZE", "BLOCKS", "DEVICE", "FILE")
    for segment in found.segments:
        file = segment.file or "-"
        # The run's own directory is the same for all: what tells files apart is at the end.
        short = "/".join(file.split("/")[-2:])
        table.add_row(
            str(segment.rank),
            size_text(segment.size_bytes),
            str(segment.block_count),
            Text(segment.device or segment.device_id, overflow="fold"),
            Text(short, overflow="fold"),
        )
    console.print(table)


def _leaves(console: Console, found: CheckpointDetail) -> None:
    table = _table("RANK", "LEAF", "DTYPE", "SHAPE", "SIZE")
    for leaf in found.leaves:
        whole = f" of {_shape_text(leaf.global_shape)}" if leaf.global_shape != leaf.shape else ""
        also = f" = {', '.join(leaf.aliases)}" if leaf.aliases else ""
        table.add_row(
            str(leaf.rank),
            Text(f"{leaf.name}{also}", overflow="fold"),
            leaf.dtype,
            _shape_text(leaf.shape) + whole,
            size_text(leaf.size_bytes),
        )
    console.print(table)
    if len(found.leaves) < found.leaf_count:
        _line(console, f"{found.leaf_count - len(found.leaves)} more leaves are not listed", DIM)


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# --- verdicts -------------------------------------------------------------------------------------------------------


def verdict(console: Console, found: Verdict, ledgers: "Sequence[LedgerVerdict] | None") -> None:
    """Draw what reading one checkpoint showed."""
    size_bytes = sum(segment.size_bytes for segment in found.segments)
    word = _verdict_text(found)
    files = f"{count_text(len(found.segments), 'file')}, {size_text(size_bytes)}"
    rest = f"  {found.summary.title}  {files}, {found.elapsed_s:.1f} s"
    console.print(word + Text(rest), soft_wrap=True)
    problems = [*found.problems, *(segment.problem for segment in found.segments if segment.problem)]
    for problem in problems:
        _line(console, f"  ! {problem}", BAD)
    if ledgers is None:
        return
    if not ledgers:
        _line(console, "  ledger: no loader of this checkpoint kept one", WARN)
    for ledger in ledgers:
        _ledger(console, ledger)


def _verdict_text(found: Verdict) -> Text:
    if found.is_intact:
        return Text("intact ", GOOD)
    return _state_text(found.summary) if found.summary.missing_on else Text("DAMAGED", BAD)


def _ledger(console: Console, found: "LedgerVerdict") -> None:
    line = f"  ledger {found.place} ({found.position})"
    if found.is_proven:
        less = ", less what is named" if any(each.is_less for each in found.left_out) else ""
        _line(console, f"{line}: each sample exactly once{less}", GOOD)
    elif found.problems:
        _line(console, line, BAD)
        for problem in found.problems:
            _line(console, f"    ! {problem}", BAD)
    else:
        _line(console, f"{line}: not proven", WARN)
        if found.missing_ranks:
            ranks = ", ".join(map(str, found.missing_ranks))
            _line(console, f"    ! the shards of these ranks are not here: {ranks}", WARN)
        if found.unproven:
            _line(console, f"    ! {found.unproven}", WARN)
    for each in found.left_out:
        for sentence in each.sentences():
            _line(console, f"    {sentence}", WARN if each.is_less else DIM)


def problems(console: Console, found: Sequence[str]) -> None:
    """Draw what opening a store found wrong."""
    for problem in found:
        _line(console, f"! {problem}", BAD)


def verified(console: Console, count: int, nothing: str, *, is_intact: bool) -> None:
    """Draw the sum of a verification; `nothing`: why there was none to read."""
    if not count:
        _line(console, nothing, DIM)
    elif count > 1:
        text = f"{count} checkpoints read" + ("" if is_intact else ": not all is as it should be")
        _line(console, text, GOOD if is_intact else BAD)


def removed(console: Console, title: str, found: Removed) -> None:
    """Draw what was removed."""
    what = title if found.checkpoint_count == 1 else f"{found.checkpoint_count} checkpoints of {title}"
    _line(console, f"removed {what}, {size_text(found.freed_bytes)} freed", GOOD)


def done(console: Console, text: str) -> None:
    """Draw what was done."""
    _line(console, text, GOOD)


def scrub_started(console: Console, found: ScrubStarted) -> None:
    """Draw what a scrub is going to read."""
    if not found.checkpoint_count:
        _line(console, "there is nothing to read", DIM)
        return
    what = f"{count_text(found.checkpoint_count, 'checkpoint')}, {size_text(found.size_bytes)}"
    _line(console, f"a scrub of {what} has begun; `everstep status` shows how far it is", GOOD)


_SEVERITY_STYLES = {Severity.NOTE: DIM, Severity.REPAIRABLE: WARN, Severity.LOST: BAD}


_PAST = {"moves": "moved", "removes": "removed", "writes": "wrote", "makes": "made"}
"""What a repair does, once it has done it."""


def fsck(console: Console, found: FsckReport, source: str, *, is_asked: bool, unread: str) -> None:
    """Draw what an inspection found, the worst first, and what was done about it.

    `unread`: what reads the blocks; empty: this inspection did.
    """
    order = list(reversed(Severity))
    for finding in sorted(found.findings, key=lambda finding: order.index(finding.severity)):
        _line(console, f"{finding.severity.value:<10}  {finding.path}", _SEVERITY_STYLES[finding.severity])
        _line(console, f"            {finding.problem}", DIM)
        if finding.repair:
            first, space, rest = finding.repair.partition(" ")
            done = f"repaired: {_PAST.get(first, first)}" if found.is_repaired else f"--repair: {first}"
            _line(console, f"            {done}{space}{rest}", DIM)
    if is_asked and not found.is_repaired:
        text = "nothing was repaired: it is not certain which directories belong together"
        _line(console, f"! {text}", WARN)
    if found.put_aside:
        _line(
            console,
            "moved to quarantine; remove what you do not need, and the next start frees its data:",
            DIM,
        )
        for path in found.put_aside:
            _line(console, f"  {path}", DIM)
    style = GOOD if found.worst is Severity.NOTE else WARN
    shards = count_text(found.shard_count, "shard")
    if found.findings:
        what = (
            f"{count_text(len(found.findings), 'finding')}, {shards} of {count_text(found.run_count, 'run')}"
        )
    else:
        what = f"metadata of {shards} is whole"
    _line(console, f"{source}: {what}; {unread or 'every block was read'}", style)


def nothing_to_stop(console: Console, socket: str) -> None:
    """Draw that no daemon is there."""
    _line(console, f"no daemon on {socket}: nothing to stop", DIM)


def stopped(console: Console, socket: str, found: Stopped) -> None:
    """Draw how a daemon ended."""
    committed = count_text(found.persisted_count, "shard")
    _line(console, f"the daemon on {socket} has ended; {committed} committed meanwhile", GOOD)
    if found.attached_count:
        attached = count_text(found.attached_count, "attached trainer")
        _line(console, f"! {attached} will look for a daemon again", WARN)
    if found.lost_count:
        _line(console, f"! {count_text(found.lost_count, 'sealed snapshot')} could not be written", BAD)


# --- parts ----------------------------------------------------------------------------------------------------------


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    for head in heads:
        table.add_column(head, justify="right" if head in ("SIZE", "FREE", "OF", "BLOCKS") else "left")
    return table


def _pairs(console: Console, pairs: Sequence[tuple[str, str | Text]]) -> None:
    width = max(len(key) for key, _ in pairs)
    for key, value in pairs:
        text = value if isinstance(value, Text) else Text(value)
        console.print(Text(f"  {key:<{width}}  ", DIM) + text, soft_wrap=True)


def _notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        _line(console, f"! {note}", WARN)


def _line(console: Console, text: str, style: str) -> None:
    """Print one line whole, however narrow the terminal: paths and messages are there to be copied."""
    console.print(Text(text, style), soft_wrap=True)
