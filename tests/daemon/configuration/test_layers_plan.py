"""Layers on top of each other: later ones win, and what is wrong is named with file, line and key."""

import tomllib
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import ConfigError
from everstep.daemon.config import DaemonConfig
from everstep.daemon.configuration.environment_plan import (
    environment_layer,
    flags_layer,
    private_layer,
    variable,
)
from everstep.daemon.configuration.keys_plan import FREE, keys_of, values_in
from everstep.daemon.configuration.layers_plan import DEFAULT, Resolved, file_layer, resolve
from everstep.daemon.configuration.toml_format import document, key_lines, values_shown

TEXT = '[devices]\nnvme0 = "/nvme0"\n'


def resolved(
    text: str = TEXT, flags: tuple[str, ...] = (), others: Mapping[str, str] | None = None, **environment: str
) -> Resolved[DaemonConfig]:
    layers = (
        file_layer(text, "node.toml", DaemonConfig),
        environment_layer({**(others or {}), **environment}, DaemonConfig),
        flags_layer(flags, DaemonConfig),
    )
    return resolve(DaemonConfig, layers)


def problems(result: Resolved[DaemonConfig]) -> list[tuple[str, str, str]]:
    return [(each.place, each.message, each.hint) for each in result.problems]


def test_a_later_layer_wins_and_says_where_each_value_is_from() -> None:
    text = "[daemon]\nlinger_s = 1\ndrain_s = 2\n\n[io]\nqueue_depth = 8\n" + TEXT
    found = resolved(
        text, ("io.queue_depth=64",), EVERSTEP_DAEMON__DRAIN_S="3", EVERSTEP_IO__QUEUE_DEPTH="32"
    )
    config = found.taken()
    assert (config.daemon.linger_s, config.daemon.drain_s, config.io.queue_depth) == (1, 3, 64)
    assert found.origins == {
        ("daemon", "linger_s"): "node.toml:2",
        ("daemon", "drain_s"): "EVERSTEP_DAEMON__DRAIN_S",
        ("io", "queue_depth"): "--set io.queue_depth",
        ("devices", "nvme0"): "node.toml:8",
    }


@pytest.mark.parametrize("path", sorted(path for path in keys_of(DaemonConfig) if FREE not in path))
def test_every_key_has_a_variable(path: tuple[str, ...]) -> None:
    default = keys_of(DaemonConfig)[path].default
    texts: dict[object, str] = {
        str: "3d",
        bool: "false",
        int: "12_345",
        float: "0.5",
        list: "a:1, b:2",
        type(None): "90",
    }
    layer = environment_layer({variable(path): texts[type(default)]}, DaemonConfig)
    assert not layer.problems
    assert keys_of(DaemonConfig)[path].fits(layer.values[path])
    assert layer.values[path] != default or default in (False, "3d")


def test_values_of_the_environment_are_of_the_keys_type() -> None:
    found = resolved(
        EVERSTEP_MEMORY__ARENA_MAX_BYTES="64_000_000_000",
        EVERSTEP_METRICS__ENABLED="False",
        EVERSTEP_IO__RECYCLE="0",
        EVERSTEP_RETENTION__EVERY="6h",
        EVERSTEP_RETENTION__EVERY_STEPS="",
        EVERSTEP_DEVICES__NVME1="/nvme1",
        EVERSTEP_CACHE__LISTEN="0.0.0.0:7077",
        EVERSTEP_CACHE__MEMBERS="node1:7077, node2:7077",
        EVERSTEP_CACHE__TOKEN_FILE="/etc/token",
    ).taken()
    assert found.memory.arena_max_bytes == 64_000_000_000
    assert (found.metrics.enabled, found.io.recycle) == (False, False)
    assert (found.retention.every, found.retention.every_steps) == ("6h", None)
    assert found.devices == {"nvme0": "/nvme0", "nvme1": "/nvme1"}
    assert found.cache.members == ["node1:7077", "node2:7077"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("EVERSTEP_MEMORY__RESERVE_BYTE", "did you mean EVERSTEP_MEMORY__RESERVE_BYTES?"),
        ("EVERSTEP_MEMORYS__RESERVE_BYTES", "did you mean EVERSTEP_MEMORY__RESERVE_BYTES?"),
        ("EVERSTEP_DAEMON__KEEP_LAST", "did you mean EVERSTEP_RETENTION__KEEP_LAST?"),
        ("EVERSTEP_MEMORY_RESERVE_BYTES", "did you mean EVERSTEP_MEMORY__RESERVE_BYTES?"),
        ("EVERSTEP_COLOUR__OF", "see docs/configuration.md"),
        ("EVERSTEP___", "see docs/configuration.md"),
    ],
)
def test_an_unknown_override_is_an_error_that_names_the_nearest(name: str, meant: str) -> None:
    ((place, message, hint),) = problems(resolved(others={name: "1"}))
    assert (place, message) == (name, f"{name} overrides no key")
    assert meant in hint


@pytest.mark.parametrize("name", ["EVERSTEP_DEVICES__D1", "EVERSTEP_DEVICES__D\udcff", "EVERSTEP_LOG__LEVEL"])
def test_what_is_not_utf_8_is_refused_before_an_answer_has_to_carry_it(name: str) -> None:
    ((place, message, hint),) = problems(resolved(others={name: "/nvme\udcfe"}))
    assert message == f"{place} is not UTF-8"
    assert (place + message + hint).isascii()


def test_other_variables_are_left_alone() -> None:
    others = {
        "EVERSTEP_SOCKET": "/x",
        "EVERSTEP_LINGER_S": "3",
        "EVERSTEP_CACHE_LISTEN": "x",
        "EVERSTEP_SERVICE_HOST": "10.0.0.1",  # Kubernetes, of a service named everstep
        "EVERSTEP_PORT_9464_TCP": "tcp://10.0.0.1:9464",
        "EVERSTEP_METRICS_PORT": "tcp://10.0.0.1:9464",
        "MEMORY__RESERVE_BYTES": "1",
    }
    assert resolved(others=others).taken() == resolved().taken()
    layer = private_layer({"EVERSTEP_METRICS_PORT": "tcp://10.0.0.1:9464"}, DaemonConfig)
    assert layer.values == {("metrics", "enabled"): False}


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("io.queue_depth", "gives no value"),
        ("io.queue=3", "there is no key io.queue"),
        ("queue_depth=3", "there is no key queue_depth"),
        ("devices.=/x", "there is no key"),
        ("io.queue_depth=many", "io.queue_depth is 'many', expected a whole number"),
    ],
)
def test_a_flag_that_is_wrong_is_named(flag: str, said: str) -> None:
    ((place, message, _),) = problems(resolved(flags=(flag,)))
    assert place.startswith("--set")
    assert said in message


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("\n[daemon]\nlinger = 3\n", "node.toml:3", "no key daemon.linger"),
        ("# a\n\n[memory]\n\n\nreserve_bytes = 'x'\n", "node.toml:6", "is 'x', expected a whole number"),
        ("[retention]\nkeep_last = 1\n", "node.toml:2", "retention.keep_last is 1"),
        ("[retention]\n\nevery = 'daily'\n", "node.toml:3", "retention.every is 'daily'"),
        ("[io]\nqueue_depth = 0\n", "node.toml:2", "[io]"),
        ("[cache]\nmembers = [\n  'a:1',\n]\n", "node.toml:2", "cache.members or cache.dns"),
        ("daemon = 3\n", "node.toml:1", "daemon is 3, expected a table"),
        ("memory.reserve_bytes = -1\n", "node.toml:1", "memory.reserve_bytes is -1"),
        ("[daemon]\nsocket = '''a\nb\n'''\nlinger_s = true\n", "node.toml:5", "expected a number"),
        ("[daemon]\nsocket = 'a\x85b\u2028c'\nlinger_s = true\n", "node.toml:3", "expected a number"),
        ("[daemon]\nlinger_s = 3\nlinger_s = 4\n", "node.toml:3", "not TOML"),
        ("[daemon]\nlinger_s = 2026-01-01\n", "node.toml:2", "is 2026-01-01, expected a number"),
    ],
)
def test_file_line_and_key_are_named(text: str, place: str, said: str) -> None:
    found = problems(resolved(text + TEXT if text.startswith(("\n", "#", "[")) else text))
    assert found[0][0] == place
    assert said in found[0][1]


def test_all_that_is_wrong_is_listed_and_the_error_says_how_many_more() -> None:
    found = resolved("[io]\ndepth = 1\nengin = 'aio'\n" + TEXT, EVERSTEP_X__Y="1")
    assert [each[0] for each in problems(found)] == ["node.toml:2", "node.toml:3", "EVERSTEP_X__Y"]
    with pytest.raises(ConfigError, match=r"node\.toml:2: there is no key io\.depth.*2 more.*config check"):
        found.taken()


def test_a_secret_in_a_value_is_not_said() -> None:
    class Section(msgspec.Struct):
        password: int = 0
        endpoint: int = 0

    class Whole(msgspec.Struct):
        a: Section = msgspec.field(default_factory=Section)

    layer = file_layer("[a]\npassword = 'hunter22'\nendpoint = 'http://u:hunter22@host'\n", "f", Whole)
    said = str([each.message for each in resolve(Whole, [layer]).problems])
    assert "hunter22" not in said
    assert "http://***@host" in said


VALUES = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=8), st.floats())
NAMES = st.text("ab-_.\"'é ", min_size=1, max_size=6)


@given(st.dictionaries(st.tuples(NAMES, NAMES), st.one_of(VALUES, st.lists(VALUES, max_size=3)), max_size=8))
def test_what_is_written_is_read_again(values: dict[tuple[str, ...], object]) -> None:
    text = document(values_shown(values, {}, DEFAULT), with_origin=True)
    tree = tomllib.loads(text)
    shown = {(table, name): value for table, keys in tree.items() for name, value in keys.items()}
    assert repr(sorted(shown.items())) == repr(sorted(values.items()))
    lines = key_lines(text)
    assert {path for path in lines if len(path) == 2} == set(values)


def test_the_defaults_are_read_again() -> None:
    values = values_in(DaemonConfig(), DaemonConfig)
    text = document(values_shown(values, {}, DEFAULT), with_origin=True)
    assert resolved(text + TEXT).taken() == DaemonConfig(devices={"nvme0": "/nvme0"})
    assert all("# default" in line for line in text.splitlines() if line and not line.startswith("["))
