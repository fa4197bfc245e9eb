"""One log record as a line, for machines (JSON) or for people. Pure: time, process and terminal are the caller's.

Calls of loggers are written `event key=%s other=%d`, perhaps with a sentence after that. The fields are found in that
template, not in the finished text: what a client calls itself can make no field, and numbers stay numbers.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

_CONVERSION = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
_FIELD = re.compile(r"([a-z][a-z0-9_]*)=(%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z])")
_EVENT = re.compile(r"[a-z][a-z0-9_]*")
_SECRET = frozenset({"token", "password", "secret", "authorization", "credential"})
_USERINFO = re.compile(r"(://)[^/@\s]+@")
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
OTHER_EVENT = "message"
"""The event of what another library logs, whose text does not begin with a name."""
LINE_CHARS_MAX = 10_000
"""Of a line: 40 KB of UTF-8 at most. journald cuts lines at 48 KiB (LineMax=), and half an object is none."""
_VALUE_CHARS = (4096, 512, 64)
"""How much a value may have; where the line is too long with that, the next one."""
RESERVED = frozenset({"time", "level", "event", "logger", "message", "exception", "left_out"})
"""Keys of every line; a field of the same name goes by `<name>_`."""

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A log record, taken apart."""

    time: str
    """RFC 3339, in UTC."""
    level: str
    logger: str
    event: str
    fields: Mapping[str, Value]
    message: str
    """The sentence after the fields; empty: there is none."""
    text: str
    """All of it as it was written."""
    exception: str = ""
    left_out: int = 0
    """So many of the same event and source were not written before it."""


@lru_cache(maxsize=512)
def _template(template: str) -> tuple[str, tuple[tuple[int, str], ...], str]:
    """Return event, (number of the argument, key) of each field, and what stands after the last field."""
    event = _EVENT.match(template)
    if event is None or (event.end() < len(template) and template[event.end()] not in " :"):
        return OTHER_EVENT, (), template
    numbers = {match.start(): index for index, match in enumerate(_conversions(template))}
    fields = [(numbers[match.start(2)], match[1]) for match in _FIELD.finditer(template)]
    ends = [match.end() for match in _FIELD.finditer(template)]
    return event[0], tuple(fields), template[max(ends, default=event.end()) :]


def _conversions(template: str) -> list[re.Match[str]]:
    return [match for match in _CONVERSION.finditer(template) if match[0] != "%%"]


def parse(
    template: str, arguments: tuple[object, ...], *, time: str, level: str, logger: str, exception: str = ""
) -> Line:
    """Return what a logger's call means; arguments that do not fit their template are part of the message."""
    try:
        text = template % arguments if arguments else template
    except (TypeError, ValueError):
        text = f"{template} {arguments!r}"
        return Line(
            time=time, level=level, logger=logger, event=OTHER_EVENT, fields={}, message=text, text=text,
            exception=exception,
        )  # fmt: skip
    if template.startswith("%s ") and isinstance(arguments[0], str) and _EVENT.fullmatch(arguments[0]):
        template, arguments = f"{arguments[0]}{template[2:]}", arguments[1:]  # one of several events
    event, places, rest = _template(template)
    fields: dict[str, Value] = {}
    for number, key in places:
        name = f"{key}_" if key in RESERVED else key
        fields[name] = "…" if key in _SECRET else _value(arguments[number])
    used = len(_conversions(template)) - len(_conversions(rest))
    message = rest % arguments[used:] if _conversions(rest) else rest
    return Line(
        time=time,
        level=level,
        logger=logger,
        event=event,
        fields=fields,
        message=_clean(message.strip(" :;,")),
        text=_clean(_without_secrets(text, places, arguments)),
        exception=exception,
    )


def as_json(line: Line) -> str:
    """Return the line for machines: one JSON object, always with time, level, event and logger, in this order.

    It is UTF-8 without a line's end of any kind, whatever clients have named things; what is too long is cut.
    """
    text = ""
    for chars in _VALUE_CHARS:
        text = json.dumps(_document(line, chars), ensure_ascii=False).translate(_JSON_ESCAPES)
        if len(text) <= LINE_CHARS_MAX:
            break
    return text


def _document(line: Line, chars: int) -> dict[str, Value]:
    document: dict[str, Value] = {
        "time": line.time,
        "level": line.level.lower(),
        "event": line.event,
        "logger": line.logger,
    }
    document |= {
        key: _cut(each, chars) if isinstance(each, str) else each for key, each in line.fields.items()
    }
    document |= {"message": _cut(line.message, chars)} if line.message else {}
    document |= {"left_out": line.left_out} if line.left_out else {}
    document |= {"exception": _cut_begin(line.exception, chars)} if line.exception else {}
    return document


def as_text(line: Line) -> str:
    """Return the line for people; only a traceback, which is last, takes more than one."""
    more = f" (left_out={line.left_out})" if line.left_out else ""
    text = _cut(line.text, LINE_CHARS_MAX).translate(_CONTROL)
    said = f"{line.time} {line.level} {line.logger} {text}{more}"
    return f"{said}\n{line.exception.translate(_CONTROL_OF_LINES)}" if line.exception else said


def priority_prefix(level: str) -> str:
    """Return what tells journald how urgent a line is (sd-daemon(3))."""
    return f"<{_PRIORITIES.get(level, 5)}>"


def _value(argument: object) -> Value:
    if argument is None or isinstance(argument, bool | int | str):
        return _clean(argument) if isinstance(argument, str) else argument
    if isinstance(argument, float):
        return round(argument, 6) if abs(argument) < float("inf") else str(argument)  # JSON has no infinity
    return _clean(str(argument))


def _clean(text: str) -> str:
    """Return it without what stands before an @ in an address: it may be a password."""
    return _USERINFO.sub(r"\1…@", text)


def _without_secrets(text: str, places: tuple[tuple[int, str], ...], arguments: tuple[object, ...]) -> str:
    for number, key in places:
        if key in _SECRET and str(arguments[number]):
            text = text.replace(str(arguments[number]), "…")
    return text


def _cut(text: str, chars: int) -> str:
    """Return as much of a text's beginning, as UTF-8 can say it: a name that is none (PEP 383) by its escapes."""
    if not text.isascii():
        text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= chars else f"{text[:chars]}… ({len(text) - chars} more)"


def _cut_begin(text: str, chars: int) -> str:
    """Return as much of a traceback's end, which says what happened."""
    text = _cut(text, len(text) * 10)
    return text if len(text) <= chars else f"({len(text) - chars} more) …{text[-chars:]}"


_SEPARATORS = (*range(127, 160), 0x2028, 0x2029)
"""C1 controls, and what Unicode takes for the end of a line."""
_JSON_ESCAPES = {number: f"\\u{number:04x}" for number in _SEPARATORS}
_CONTROL = {number: repr(chr(number))[1:-1] for number in (*range(32), *_SEPARATORS)}
"""A client's text makes no second line and moves no cursor."""
_CONTROL_OF_LINES = {number: text for number, text in _CONTROL.items() if number != ord("\n")}
