"""Who the members are: a list, a name that is looked up again, a name server that fails or hangs; bad settings."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import ConfigError
from everstep.daemon.config import DaemonConfig, private_config
from everstep.daemon.nodes.address_format import address_text, parse_address
from everstep.daemon.nodes.credentials import Credentials
from everstep.daemon.nodes.members import Membership
from everstep.daemon.nodes.section import CacheSection


def test_a_name_is_looked_up_again_and_what_fails_changes_nothing() -> None:
    answers: list[list[str] | OSError] = [
        ["127.0.0.1", "10.9.8.7"],
        OSError(2, "no such name"),
        ["127.0.0.1", "10.9.8.6", "10.9.8.7"],
    ]
    asked: list[tuple[str, int]] = []

    def resolve(host: str, port: int) -> list[str]:
        if host != "cache.svc":
            return [host]
        asked.append((host, port))
        answer = answers[min(len(asked), len(answers)) - 1]
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def run() -> list[tuple[tuple[str, ...], str]]:
        seen: list[tuple[tuple[str, ...], str]] = []
        both = asyncio.Event()
        section = CacheSection(listen="0.0.0.0:7077", dns="cache.svc:7077", resolve_s=0.01, token_file="x")

        def changed() -> None:
            seen.append((membership.members, membership.me))
            if len(seen) == 2:
                both.set()

        membership = Membership(section, changed, resolve)
        membership.begin(7077)
        async with asyncio.timeout(20):
            await both.wait()
        membership.stop()
        return seen

    me = "127.0.0.1:7077"
    assert asyncio.run(run()) == [
        (("10.9.8.7:7077", me), me),
        (("10.9.8.6:7077", "10.9.8.7:7077", me), me),
    ]
    assert set(asked) == {("cache.svc", 7077)}


def test_a_name_server_that_hangs_holds_nobody_and_has_one_thread() -> None:
    ending, begun, entered = threading.Event(), threading.Event(), list[int]()

    def resolve(host: str, port: int) -> list[str]:
        entered.append(port)
        begun.set()
        ending.wait(60)
        return ["127.0.0.1"]

    async def run() -> None:
        section = CacheSection(listen="0.0.0.0:1", dns="cache:1", resolve_s=0.01, token_file="x")
        membership = Membership(section, lambda: None, resolve)
        membership.begin(1)
        assert begun.wait(20)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert membership.members == ()
        assert entered == [1]
        membership.stop()

    asyncio.run(run())
    ending.set()


def test_a_list_finds_out_which_member_is_this_node() -> None:
    async def run() -> str:
        found = asyncio.Event()
        section = CacheSection(
            listen="0.0.0.0:7077", members=["127.0.0.1:7078", "127.0.0.1:7077"], token_file="x"
        )
        membership = Membership(section, found.set)
        membership.begin(7077)
        async with asyncio.timeout(20):
            await found.wait()
        membership.stop()
        return membership.me

    assert asyncio.run(run()) == "127.0.0.1:7077"


@given(
    st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9.-]{0,30}", fullmatch=True)),
    st.integers(0, 65535),
)
def test_addresses_are_read_as_they_are_written(host: str, port: int) -> None:
    assert parse_address(address_text(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":1",
        "host:",
        "host:x",
        "host:65536",
        "host:-1",
        "::1:80",
        "a b:1",
        "a/b:1",
        "h:1:2",
        "ü:1",
    ],
)
def test_other_texts_are_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"port|brackets"):
        parse_address(text)


@pytest.mark.parametrize(
    ("toml", "match"),
    [
        ('listen = "0.0.0.0:7077"', "anybody who reaches it"),
        ('listen = "127.0.0.1:7077"', "anybody who reaches it"),
        ('listen = "nonsense"\ntoken_file = "t"', "cache.listen"),
        ('listen = "h:1"\ntoken_file = "t"\nmembers = ["a"]', "cache.members"),
        ('listen = "h:1"\ntoken_file = "t"\nmembers = ["a:1"]\ndns = "b:1"', "both given"),
        ('listen = "h:1"\ncertificate_file = "c"', "all three"),
        ('listen = "h:1"\ntoken_file = "t"\ndeadline_s = 0.0', "deadline_s"),
        ('listen = "h:1"\ntoken_file = "t"\nresolve_s = nan', "resolve_s"),
        ('members = ["a:1"]', "without cache.listen"),
        ('dns = "a:1"', "without cache.listen"),
    ],
)
def test_settings_that_make_no_sense_are_refused(toml: str, match: str) -> None:
    section = msgspec.toml.decode(toml, type=CacheSection)
    with pytest.raises(ConfigError, match=match):
        DaemonConfig(cache=section)


def test_a_private_daemon_takes_them_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in (
        ("LISTEN", "h:1"),
        ("MEMBERS", "a:1, b:2"),
        ("DEADLINE_S", "2.5"),
        ("TOKEN_FILE", "/t"),
    ):
        monkeypatch.setenv(f"EVERSTEP_CACHE_{key}", value)
    section = private_config().cache
    assert (section.listen, section.members, section.deadline_s) == ("h:1", ["a:1", "b:2"], 2.5)
    monkeypatch.setenv("EVERSTEP_CACHE_DEADLINE_S", "soon")
    with pytest.raises(ConfigError, match="EVERSTEP_CACHE"):
        private_config()


def test_a_token_is_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "token"
    section = CacheSection(token_file=str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        Credentials(section)
    path.touch(mode=0o600)
    path.write_text("t" * 40 + "\n")
    found = Credentials(section)
    assert found.metadata == (("authorization", "Bearer " + "t" * 40),)
    assert found.token_holds(found.metadata)
    for bad in ((), (("authorization", "Bearer " + "t" * 39),), (*found.metadata, *found.metadata)):
        assert not found.token_holds(bad)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="only this user"):
        Credentials(section)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="no token of 32"):
        Credentials(section)
    with pytest.raises(ConfigError, match=r"cache\.key_file: cannot read"):
        Credentials(CacheSection(certificate_file="/no/c", key_file="/no/k", authority_file="/no/a"))
