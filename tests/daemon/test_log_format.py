"""Log records as lines: fields from the template, nothing forged, no secret."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.log_format import (
    LINE_CHARS_MAX,
    OTHER_EVENT,
    Line,
    as_json,
    as_text,
    parse,
    priority_prefix,
)
from everstep.daemon.log_repetition_machine import SOURCES_MAX, LogRepetition


def line(template: str, *arguments: object, level: str = "INFO", exception: str = "") -> Line:
    return parse(
        template,
        arguments,
        time="2026-11-23T07:00:00.123Z",
        level=level,
        logger="everstep.x",
        exception=exception,
    )


def test_fields_come_from_the_template_with_their_types() -> None:
    made = line("shard_persisted run=%s rank=%d size_bytes=%d persist_s=%.3f", "ab", 3, 1 << 40, 0.25)
    assert json.loads(as_json(made)) == {
        "time": "2026-11-23T07:00:00.123Z",
        "level": "info",
        "event": "shard_persisted",
        "logger": "everstep.x",
        "run": "ab",
        "rank": 3,
        "size_bytes": 1 << 40,
        "persist_s": 0.25,
    }
    assert as_text(made).endswith(
        "INFO everstep.x shard_persisted run=ab rank=3 size_bytes=1099511627776 persist_s=0.250"
    )


def test_the_first_keys_are_always_the_same() -> None:
    assert list(json.loads(as_json(line("daemon_ended")))) == ["time", "level", "event", "logger"]
    assert list(json.loads(as_json(line("free text, %s", 1)))) == [
        "time",
        "level",
        "event",
        "logger",
        "message",
    ]


def test_a_sentence_after_the_fields_is_the_message() -> None:
    document = json.loads(as_json(line("share_left group=%s: %s and %s", "g", "one", "two")))
    assert (document["group"], document["message"]) == ("g", "one and two")


def test_an_event_may_be_the_first_argument() -> None:
    document = json.loads(as_json(line("%s run=%s seconds=%.1f", "scrubbed", "r", 1.5)))
    assert (document["event"], document["run"], document["seconds"]) == ("scrubbed", "r", 1.5)


def test_what_is_no_event_is_a_message() -> None:
    document = json.loads(as_json(line("Unclosed connection %r", "x=1")))
    assert (document["event"], document["message"]) == (OTHER_EVENT, "Unclosed connection 'x=1'")
    broken = json.loads(as_json(line("event size=%d", "no number")))
    assert broken["event"] == OTHER_EVENT
    assert "no number" in broken["message"]


@given(st.text())
def test_no_value_makes_a_field_or_a_line(value: str) -> None:
    made = line("request_refused pid=%d message=%s", 7, f'{value}" level=error\nevent=x')
    document = json.loads(as_json(made))
    assert set(document) == {"time", "level", "event", "logger", "pid", "message_"}
    assert document["level"] == "info"
    assert "\n" not in as_json(made)
    assert len(as_text(made).split("\n")) == 1
    assert "\x1b" not in as_text(made)


@given(
    st.lists(st.text(st.characters(exclude_categories=())), min_size=3, max_size=3), st.integers(0, 100_000)
)
def test_every_line_is_one_object_of_utf_8_whatever_clients_name_things(names: list[str], times: int) -> None:
    one, other, doing = names
    made = line(
        "lost run=%s path=%s: while %s", one * times, other, doing, exception=f"{other}\n{one * times}"
    )
    text = as_json(made)
    assert len(text) <= LINE_CHARS_MAX
    assert len(text.encode()) <= 40_000
    assert len(text.splitlines()) == 1
    assert {"run", "path"} <= set(json.loads(text))
    assert not {chr(number) for number in range(127, 160)}.intersection(text + as_text(made))


def test_a_value_of_a_mebibyte_is_cut_and_the_end_of_a_traceback_is_kept() -> None:
    made = line("refused message=%s", "x" * (1 << 20), exception="y" * (1 << 20) + "\nValueError: why")
    document = json.loads(as_json(made))
    assert document["message_"].endswith("… (1044480 more)")
    assert document["exception"].endswith("yyyy\nValueError: why")
    assert len(as_text(made).splitlines()[0]) < LINE_CHARS_MAX + 200


def test_what_is_no_text_is_said_by_its_escapes() -> None:
    """A file's name that is no UTF-8 comes as surrogates (PEP 383), which no JSON parser has to take."""
    document = json.loads(as_json(line("lost path=%s", b"/nvme\xff".decode(errors="surrogateescape"))))
    assert document["path"] == "/nvme\\udcff"


def test_secrets_are_left_out() -> None:
    made = line("login token=%s from=%s", "s3cret", "https://me:pass@host/x")
    for text in (as_json(made), as_text(made)):
        assert "s3cret" not in text
        assert "pass" not in text
        assert "host/x" in text


def test_a_traceback_is_one_field_of_json_and_the_end_of_text() -> None:
    made = line("internal_error doing=%r", "it", level="ERROR", exception="Traceback\n  ValueError")
    assert json.loads(as_json(made))["exception"] == "Traceback\n  ValueError"
    assert as_text(made).endswith("\nTraceback\n  ValueError")


@pytest.mark.parametrize(
    ("level", "prefix"), [("ERROR", "<3>"), ("WARNING", "<4>"), ("INFO", "<6>"), ("DEBUG", "<7>")]
)
def test_journald_is_told_how_urgent_a_line_is(level: str, prefix: str) -> None:
    assert priority_prefix(level) == prefix


def test_a_source_has_so_many_lines_and_the_next_window_says_what_was_left_out() -> None:
    bound = LogRepetition(per_window=2, window_s=10.0)
    one, other = ("refused", "pid=1"), ("refused", "pid=2")
    assert [bound.admit(one, 0.0), bound.admit(one, 1.0), bound.admit(one, 2.0)] == [0, 0, None]
    assert bound.admit(other, 3.0) == 0
    assert bound.admit(one, 9.0) is None
    assert bound.ended(9.9) == []
    assert bound.admit(one, 10.0) == 2
    assert bound.admit(one, 10.0) == 0


def test_what_was_left_out_is_said_once_though_the_source_falls_silent() -> None:
    bound = LogRepetition(per_window=1, window_s=10.0)
    bound.admit(("a",), 0.0)
    bound.admit(("a",), 0.0)
    bound.admit(("b",), 5.0)
    assert bound.ended(12.0) == [(("a",), 1)]
    assert bound.ended(20.0) == []


def test_sources_that_are_made_up_take_no_memory() -> None:
    bound = LogRepetition()
    for number in range(3 * SOURCES_MAX):
        assert bound.admit((str(number),), 0.0) == 0
    assert len(bound._windows) == SOURCES_MAX
