"""What goes wrong at clients, in the log: a line for each source and kind in a minute, with a count; not one each."""

import asyncio
import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

APART_S = 60.0
SOURCES_MAX = 256
"""More sources than this share a line."""


@dataclass(slots=True, kw_only=True)
class _Held:
    """What was not said of one source since its last line."""

    count: int = 0
    newest: str = ""


class RefusalLog:
    """Owned by the event loop."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, object, str], _Held] = {}

    def add(self, event: str, source: object, code: str, text: str) -> None:
        """Say that something of `source` was refused: at once if that is new, else within a minute, with a count."""
        key = (event, source, code)
        if key not in self._held and len(self._held) >= SOURCES_MAX:
            key = (event, "others", "")
        held = self._held.get(key)
        if held is not None:
            held.count += 1
            held.newest = text
            return
        self._held[key] = _Held()
        template = event + " source=%s code=%s text=%s"
        logger.warning(template, source, code, _plain(text))
        asyncio.get_running_loop().call_later(APART_S, self._minute_over, key)

    def _minute_over(self, key: tuple[str, object, str]) -> None:
        held = self._held.pop(key)
        if held.count:
            event, source, code = key
            template = event + " source=%s code=%s more=%d text=%s"
            logger.warning(template, source, code, held.count, _plain(held.newest))
            self._held[key] = _Held()
            asyncio.get_running_loop().call_later(APART_S, self._minute_over, key)


def _plain(text: str) -> str:
    """Return a text of a client's making in one line of bounded length."""
    kept = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[:500])
    return f"{kept}…" if len(text) > 500 else kept
