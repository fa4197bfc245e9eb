"""What a reload may change: one table, and all or nothing."""

import re
from pathlib import Path

import pytest

from everstep.core.errors import ConfigError
from everstep.daemon.config import DaemonConfig, IoSection, RetentionSection
from everstep.daemon.configuration.keys_plan import FREE, find_key, key_text, keys_of, values_in
from everstep.daemon.configuration.reload_plan import RELOADABLE, Change, changes, check_reloadable


def between(after: DaemonConfig) -> tuple[Change, ...]:
    return changes(values_in(DaemonConfig(), DaemonConfig), values_in(after, DaemonConfig))


def test_the_table_names_keys_that_there_are() -> None:
    keys = keys_of(DaemonConfig)
    for path in RELOADABLE:
        assert path[-1] == FREE or find_key(keys, path) is not None, path


def test_what_changed_is_named_with_when_it_takes_effect() -> None:
    (change,) = between(DaemonConfig(retention=RetentionSection(every="6h")))
    assert str(change) == 'retention.every: not set -> "6h"'
    assert "next collection" in change.takes_effect
    check_reloadable([change])
    assert between(DaemonConfig()) == ()


def test_one_key_that_needs_a_restart_refuses_all() -> None:
    found = between(
        DaemonConfig(
            retention=RetentionSection(keep_last=9), io=IoSection(queue_depth=3), devices={"a": "/a"}
        )
    )
    assert {change.key: change.needs_restart for change in found} == {
        "retention.keep_last": False,
        "io.queue_depth": True,
        "devices.a": True,
    }
    with pytest.raises(ConfigError, match=r"io\.queue_depth: 256 -> 3, devices\.a: not set.*1 other changed"):
        check_reloadable(found)


def test_the_documents_table_is_the_programs() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "configuration.md").read_text()
    section = text.split("### Reading the file again")[1].split("###")[0]
    rows = re.findall(r"^\| `([\w.*]+)` \| (.*) \|$", section, re.MULTILINE)
    assert rows == [(key_text(path), when) for path, when in RELOADABLE.items()]
