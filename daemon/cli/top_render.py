"""What `everstep top` draws, at 80 columns and more. Names come from users: nothing in them is taken as markup."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...core.durations import duration_text
from ...core.sizes import size_text
from ..control.views import CacheView, DeviceView, PaceView, RankState, ShareGroupView
from ..web.verdict_plan import Finding, Level, RunFacts, level_of
from .render import BAD, DIM, GOOD, HEAD, STATE_STYLES, WARN
from .top_plan import Screen

FINDINGS_SHOWN = 4
FIRST_COLUMN_CHARS = 24
_STYLES = {Level.GREEN: GOOD, Level.AMBER: WARN, Level.RED: BAD}
_WORDS = {Level.GREEN: "all is well", Level.AMBER: "worth a look", Level.RED: "somebody should act"}


def draw(screen: Screen, *, help_line: bool) -> RenderableType:
    """Return the whole screen."""
    return Group(*_parts(screen, help_line=help_line))


def _parts(screen: Screen, *, help_line: bool) -> Iterator[RenderableType]:
    status = screen.status
    if status is None:
        yield _line(f"everstep: {screen.problem or 'asking the daemon'}", WARN if screen.problem else DIM)
    else:
        daemon = status.daemon
        kind = "private" if daemon.is_private else "node"
        level = level_of(screen.findings)
        head = _line(f"everstep {daemon.version}, {kind} daemon, up {duration_text(daemon.uptime_s)}: ", HEAD)
        head.append(_WORDS[level], _STYLES[level])
        yield head
        if screen.problem:
            yield _line(f"no answer for {duration_text(screen.silent_s)}: {screen.problem}", BAD)
        yield from (_finding(each) for each in screen.findings[:FINDINGS_SHOWN])
        if len(screen.findings) > FINDINGS_SHOWN:
            yield _line(f"  and {len(screen.findings) - FINDINGS_SHOWN} more: everstep status", DIM)
        yield Text()
        yield _runs(screen.runs, screen.selected) if screen.runs else _line("no run has attached", DIM)
        if 0 <= screen.selected < len(screen.runs):
            yield from _chosen(screen.runs[screen.selected])
        devices = [device for store in status.stores for device in store.devices]
        if devices:
            yield Text()
            yield _devices(devices)
        if status.caches:
            yield Text()
            yield _caches(status.caches)
        if status.groups:
            yield Text()
            yield _groups(status.groups)
    if help_line:
        yield Text()
        yield _line("q ends   up, down or tab choose a run", DIM)


def _finding(finding: Finding) -> Text:
    line = _line("! ", _STYLES[finding.level])
    line.append(f"{finding.subject}: {finding.text}", _STYLES[finding.level])
    return line


def _runs(runs: Sequence[RunFacts], selected: int) -> Table:
    table = _table("  RUN", "STATE", "STEP", "STEPS/S", "STALL", "DATA", "NEWEST", "EVERY")
    for index, run in enumerate(runs):
        view = run.view
        step = max((rank.step for rank in view.ranks), default=0)
        table.add_row(
            Text(("> " if index == selected else "  ") + view.name, HEAD if index == selected else ""),
            _state(run),
            f"{step:,}" if step else "-",
            "-" if run.steps_per_s is None else f"{run.steps_per_s:.3g}",
            _share(run.stall_share),
            _share(run.data_share),
            "-" if run.newest_age_s is None else duration_text(run.newest_age_s),
            _every(view.pace),
        )
    return table


def _every(pace: PaceView | None) -> str:
    if pace is None or not pace.interval_steps:
        return "-"
    return "paused" if pace.is_paused else f"{pace.interval_steps:,}"


def _state(run: RunFacts) -> Text:
    attached = sum(rank.state is RankState.ATTACHED for rank in run.view.ranks)
    if attached:
        return Text(f"{attached}/{run.view.world_size} ranks", STATE_STYLES[RankState.ATTACHED])
    gone = [rank for rank in run.view.ranks if rank.state is RankState.LINGERING]
    if any(not rank.left for rank in gone):
        return Text("lost", STATE_STYLES[RankState.LINGERING])
    return Text("left" if gone else "ended", STATE_STYLES[RankState.CLOSED])


def _chosen(run: RunFacts) -> Iterator[Text]:
    """Yield more of the chosen run."""
    view, pace = run.view, run.view.pace
    if pace is not None:
        due = f", {duration_text(run.interval_s)}" if run.interval_s is not None else ""
        skipped = f"; {pace.skipped_count} skipped" if pace.skipped_count else ""
        every = "no checkpoint" if pace.is_paused else f"every {pace.interval_steps:,} steps{due}"
        yield _line(f"  {every}: {pace.reason}{skipped}", DIM)
    counts: dict[str, int] = {}
    for rank in view.ranks:
        for slot in rank.slots:
            counts[slot.state.value] = counts.get(slot.state.value, 0) + 1
    slots = ", ".join(f"{count} {state}" for state, count in counts.items()) or "none yet"
    arenas = size_text(sum(rank.arena_bytes for rank in view.ranks))
    newest = f"{view.newest}, {size_text(view.newest_bytes)}" if view.newest is not None else "none"
    yield _line(f"  attempt {view.attempt}; newest {newest}; memory {arenas}; slots: {slots}", DIM)


def _devices(devices: Sequence[DeviceView]) -> Table:
    table = _table("  DEVICE", "STATE", "WRITES AT", "QUEUE", "FREE", "OF")
    for device in devices:
        speed = device.write_bytes_per_s
        table.add_row(
            Text("  " + _ended(device.name or device.path)),
            Text(device.state.value, STATE_STYLES[device.state]),
            f"{size_text(speed)}/s" if speed else "-",
            size_text(device.queued_bytes) if device.queued_bytes else "idle",
            size_text(device.free_bytes) if device.total_bytes else "-",
            size_text(device.total_bytes) if device.total_bytes else "-",
        )
    return table


def _caches(caches: Sequence[CacheView]) -> Table:
    table = _table("  CACHE", "READERS", "HITS", "READS", "SAMPLES", "MEMORY")
    for cache in caches:
        asked = cache.hit_count + cache.miss_count
        table.add_row(
            Text(f"  {cache.number} {cache.fingerprint[:10]}"),
            str(cache.client_count),
            _share(cache.hit_count / asked if asked else None),
            f"{asked:,}",
            _share(cache.published_count / cache.sample_count if cache.sample_count else None),
            size_text(cache.used_bytes),
        )
    return table


def _groups(groups: Sequence[ShareGroupView]) -> Table:
    table = _table("  GROUP", "JOBS", "PREPARED", "SERVED", "ALONE", "MEMORY")
    for group in groups:
        table.add_row(
            Text(f"  {group.name}"), str(group.job_count), f"{group.prepared_count:,}",
            f"{group.served_count:,}", f"{group.private_count:,}", size_text(group.used_bytes),
        )  # fmt: skip
    return table


def _ended(path: str) -> str:
    """Return a path that fits its column: drives differ at the end of theirs."""
    room = FIRST_COLUMN_CHARS - 2
    return path if len(path) <= room else "…" + path[1 - room :]


def _table(first: str, *heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    table.add_column(first, overflow="ellipsis", no_wrap=True, ratio=None, max_width=FIRST_COLUMN_CHARS)
    for head in heads:
        table.add_column(head, justify="left" if head == "STATE" else "right", no_wrap=True)
    return table


def _share(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, overflow="ellipsis", no_wrap=True)
