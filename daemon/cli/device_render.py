"""What `everstep device` prints for people, readable at 80 columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ...core.sizes import size_text
from ..control.device_views import DeviceDetail, PartView, ReadmitView, RetireView, StoreDevices
from ..control.views import DeviceStatus
from .render import BAD, DIM, GOOD, STATE_STYLES, WARN, count_text, pool_text, time_text

if TYPE_CHECKING:
    from rich.console import Console

PARTS_SHOWN_MAX = 8
ID_SHOWN = 8
_GONE = (DeviceStatus.MISSING, DeviceStatus.RETIRED)


def devices(console: "Console", stores: Sequence[StoreDevices], label: str) -> None:
    """Draw the devices of each store, and what a person may do about them."""
    if not stores:
        _line(console, f"no store is open in {label}", DIM)
    for index, store in enumerate(stores):
        if index:
            console.print()
        _table(console, store)
        for device in store.devices:
            for text in _remarks(device):
                _line(console, f"! {_name(device)}: {text}", WARN)
            if device.pool_bytes:
                _line(console, f"  {_name(device)}: {pool_text(device.pool_bytes)}", DIM)


def _table(console: "Console", store: StoreDevices) -> None:
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=DIM)
    for head in ("DEVICE", "STATE", "SIZE", "FREE", "HELD", "NEWEST", "PATH"):
        rows.add_column(head, justify="right" if head in ("SIZE", "FREE", "HELD") else "left")
    for device in store.devices:
        has_room = device.state not in _GONE and device.total_bytes > 0
        rows.add_row(
            " ".join(filter(None, (device.name, device.device_id[:ID_SHOWN]))),
            Text(device.state.value, STATE_STYLES[device.state]),
            size_text(device.total_bytes) if has_room else "-",
            size_text(device.free_bytes) if has_room else "-",
            size_text(device.held_bytes),
            str(device.highest_held or "-"),
            Text(device.path, overflow="fold"),
        )
    console.print(rows)


def _remarks(device: DeviceDetail) -> list[str]:
    """Return what a person should know or do, a sentence each."""
    match device.state:
        case DeviceStatus.SUSPECT:
            return [device.reason, f"once it is checked: everstep device readmit {device.path}"]
        case DeviceStatus.MISSING:
            since = f" since {time_text(device.missing_since_unix_s)}" if device.missing_since_unix_s else ""
            return [
                f"missing{since}: {device.reason}",
                "nothing is deleted; mount and readmit it, or retire it",
            ]
        case DeviceStatus.DRAINING:
            return [_drain_text(device)]
        case DeviceStatus.RETIRED:
            return [f"retired {time_text(device.retired_unix_s)}: what it holds is ignored"]
        case DeviceStatus.OK | DeviceStatus.SLOW:
            return [device.reason] if device.reason else []


def _drain_text(device: DeviceDetail) -> str:
    if not device.held_bytes:
        return "nothing lies there any more: it can be retired without loss"
    held = f"{size_text(device.held_bytes)} of {count_text(len(device.parts), 'checkpoint')} lie there"
    if device.is_drained:
        return f"{held} ({_titles(device.parts)}); every run restarts from elsewhere: it can be retired"
    needed = [part for part in device.parts if part.is_newest]
    return f"{held}; a restart would still take {_titles(needed)}"


def _titles(parts: Sequence[PartView]) -> str:
    shown = ", ".join(part.title for part in parts[:PARTS_SHOWN_MAX])
    more = len(parts) - PARTS_SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def drained(console: "Console", device: DeviceDetail, *, is_cancelled: bool) -> None:
    """Draw a drain that has begun or was ended."""
    if is_cancelled:
        _line(console, f"{_name(device)} gets new segments again", GOOD)
        return
    _line(console, f"{_name(device)} gets no new segments", GOOD)
    _line(console, f"  {_drain_text(device)}", DIM)


def loss(console: "Console", device: DeviceDetail) -> None:
    """Draw what a retirement loses, and what stays."""
    if not device.parts:
        _line(console, f"{_name(device)}: no checkpoint has a part there, nothing is lost", GOOD)
        return
    size = size_text(sum(part.size_bytes for part in device.parts))
    what = f"{count_text(len(device.parts), 'checkpoint')} with {size} on {_name(device)}"
    _line(console, f"lost: {what}", WARN)
    for run in dict.fromkeys(part.run_name for part in device.parts):
        parts = [part for part in device.parts if part.run_name == run]
        _line(console, f"  {_titles(parts)}", WARN)
        elsewhere = parts[0].newest_elsewhere
        if elsewhere is None:
            _line(console, f"    no other complete checkpoint of {run} is there", BAD)
        else:
            _line(console, f"    stays: {run}@{elsewhere} and what else lies on other devices", GOOD)


def not_retired(console: "Console", device: DeviceDetail) -> None:
    """Draw that nothing was done."""
    _line(console, f"{_name(device)} stays as it is", DIM)


def retired(console: "Console", done: RetireView, *, with_loss: bool) -> None:
    """Draw a retirement; `with_loss`: what it lost was not drawn before."""
    if with_loss:
        loss(console, done.device)
    _line(console, f"retired {_name(done.device)}; nothing on it was changed", GOOD)
    for problem in done.problems:
        _line(console, f"! {problem}", WARN)


def readmitted(console: "Console", done: ReadmitView, *, was_well: bool) -> None:
    """Draw a device that was taken back."""
    if was_well:
        how = "was well already: nothing had to be done"
    else:
        how = "is a member, as a new, empty device" if done.is_new else "is a member again, with all it has"
    _line(console, f"{_name(done.device)} {how}", GOOD)
    if done.aside:
        _line(console, f"  what it held lies in {done.aside}: delete it when you do not need it", DIM)


def _name(device: DeviceDetail) -> str:
    return f"{device.path} ({device.device_id[:ID_SHOWN]})"


def _line(console: "Console", text: str, style: str) -> None:
    """Print one line whole: paths and ids are there to be copied."""
    console.print(Text(text, style), soft_wrap=True)
