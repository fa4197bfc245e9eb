"""The daemon's log: lines on stderr, JSON unless a person watches. Level and form by file and $EVERSTEP_LOG."""

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import TextIO

import msgspec

from ..core.errors import ConfigError
from .log_format import Line, as_json, as_text, parse, priority_prefix
from .log_repetition_machine import LogRepetition

LOG_VARIABLE = "EVERSTEP_LOG"
LEVELS = ("debug", "info", "warning", "error")
FORMS = ("auto", "json", "text")
_SOURCE_FIELDS = ("run", "rank", "pid", "path", "peer", "socket", "code", "group", "uid")
"""What tells one source of an event from another."""


class LogSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[log]`: what is logged, and how it looks."""

    level: str = "info"
    """debug, info, warning or error."""
    form: str = "auto"
    """json, text, or auto: text on a terminal and of a private daemon, else JSON."""

    def check(self) -> None:
        """ConfigError for what is neither."""
        if self.level not in LEVELS:
            raise ConfigError(f"log.level is {self.level!r}", hint=f"one of {', '.join(LEVELS)}")
        if self.form not in FORMS:
            raise ConfigError(f"log.form is {self.form!r}", hint=f"one of {', '.join(FORMS)}")


def with_environment(section: LogSection, environment: Mapping[str, str] = os.environ) -> LogSection:
    """Return the section as $EVERSTEP_LOG changes it: a level, a form, or both with a comma.

    Raises:
        ConfigError: a word of it is neither.
    """
    level, form = section.level, section.form
    for word in filter(None, (each.strip() for each in environment.get(LOG_VARIABLE, "").lower().split(","))):
        if word in LEVELS:
            level = word
        elif word in FORMS:
            form = word
        else:
            allowed = ", ".join((*LEVELS, *FORMS))
            raise ConfigError(f"{LOG_VARIABLE} has {word!r}", hint=f"of {allowed}, with commas")
    return LogSection(level=level, form=form)


class LineHandler(logging.Handler):
    """Writes each record as one line. What cannot be written is counted as logging counts it (`handleError`)."""

    def __init__(self, stream: TextIO, *, json: bool, journal: bool) -> None:
        """`journal`: say by a prefix how urgent a line is."""
        super().__init__()
        self._stream, self._json, self._journal = stream, json, journal
        self._repetition = LogRepetition()
        self._traceback = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler, which holds the lock."""
        try:
            line = self._line(record)
            now_s = time.monotonic()
            for source, count in self._repetition.ended(now_s):
                self._write(self._summary(line, source, count))
            left_out = self._repetition.admit(_source(line), now_s)
            if left_out is not None:
                self._write(replace(line, left_out=left_out))
        except Exception:  # noqa: BLE001 - as every handler of logging does: a log must not end who logs
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> Line:
        arguments = record.args if isinstance(record.args, tuple) else (record.args,) if record.args else ()
        exception = self._traceback.formatException(record.exc_info) if record.exc_info else ""
        return parse(
            str(record.msg),
            arguments,
            time=rfc3339(record.created),
            level=record.levelname,
            logger=record.name,
            exception=exception,
        )

    @staticmethod
    def _summary(line: Line, source: tuple[str, ...], count: int) -> Line:
        arguments = (source[0], " ".join(source[1:]), count)
        return parse(
            "log_left_out of=%s source=%s count=%d",
            arguments,
            time=line.time,
            level="WARNING",
            logger=__name__,
        )

    def _write(self, line: Line) -> None:
        prefix = priority_prefix(line.level) if self._journal else ""
        self._stream.write(f"{prefix}{as_json(line) if self._json else as_text(line)}\n")
        self._stream.flush()


def begin_logging(section: LogSection, *, private: bool) -> None:
    """Let this process log as the section says; again replaces what was begun before.

    `private`: the log is a file for its user, of which the hook shows the end when the daemon cannot start.
    """
    stream = sys.stderr
    json = section.form == "json" or (section.form == "auto" and not (private or stream.isatty()))
    if json:
        _say_utf_8(stream)
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, LineHandler)]:
        root.removeHandler(handler)
    root.addHandler(LineHandler(stream, json=json, journal=_is_journal(stream)))
    root.setLevel(section.level.upper())


def rfc3339(unix_s: float) -> str:
    """Return a time in UTC, to the millisecond."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _say_utf_8(stream: TextIO) -> None:
    """Let a file take JSON, which is UTF-8, whatever the locale is."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _is_journal(stream: TextIO) -> bool:
    """Tell whether journald reads the stream (systemd.exec(5), $JOURNAL_STREAM)."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _source(line: Line) -> tuple[str, ...]:
    fields = line.fields
    return (line.event, *(f"{key}={fields[key]}" for key in _SOURCE_FIELDS if key in fields))
