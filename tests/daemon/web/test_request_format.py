"""Requests that are answered, and those that are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.daemon.web.request_format import RefusedError, Request, check_host, host_of, request


def asked(target: bytes = b"/", *headers: tuple[bytes, bytes], method: bytes = b"GET") -> Request:
    return request(method, target, headers)


def refusal(*arguments: object, **named: object) -> int:
    with pytest.raises(RefusedError) as caught:
        asked(*arguments, **named)  # type: ignore[arg-type]
    return caught.value.status


def test_a_path_its_query_and_its_headers_are_taken_apart() -> None:
    found = asked(
        b"/api/state?after=12", (b"host", b"x"), (b"authorization", b"Bearer abc"), (b"x-other", b"y")
    )
    assert (found.path, found.query, found.bearer, found.is_head) == (
        "/api/state",
        {"after": "12"},
        "abc",
        False,
    )
    assert "x-other" not in found.headers


@pytest.mark.parametrize("method", [b"POST", b"PUT", b"DELETE", b"OPTIONS", b"CONNECT", b"get"])
def test_only_get_and_head(method: bytes) -> None:
    assert refusal(method=method) == 405


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        (b"http://127.0.0.1/", ()),
        (b"*", ()),
        (b"/", ((b"host", b"a"), (b"host", b"b"))),
        (b"/", ((b"cookie", b"a=1"), (b"cookie", b"b=2"))),
        (b"/", ((b"content-length", b"5"),)),
        (b"/", ((b"transfer-encoding", b"chunked"),)),
        (b"/?" + b"&".join(b"a=%d" % number for number in range(9)), ()),
    ],
)
def test_what_is_no_plain_question_is_refused(
    target: bytes, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    assert refusal(target, *headers) == 400


@pytest.mark.parametrize(
    ("cookie", "session"),
    [
        (b"everstep_session=abc", "abc"),
        (b"a=b; everstep_session=abc ;c=d", "abc"),
        (b"everstep_session=a; everstep_session=b", ""),
        (b"xeverstep_session=a", ""),
        (b"", ""),
    ],
)
def test_the_session_is_one_cookie(cookie: bytes, session: str) -> None:
    assert asked(b"/", (b"cookie", cookie)).cookie("everstep_session") == session


@pytest.mark.parametrize(
    "host",
    [
        b"127.0.0.1", b"127.0.0.1:9464", b"localhost:1", b"LOCALHOST", b"everstep.localhost:80", b"[::1]:9464",
        b"10.1.2.3:9464", b"node7.example.org:443", b"node7.example.org.",
    ],
)  # fmt: skip
def test_hosts_that_are_this_one(host: bytes) -> None:
    check_host(asked(b"/", (b"host", host)), ["node7.example.org"])


@pytest.mark.parametrize(
    "host",
    [
        b"evil.example", b"127.0.0.1.evil.example", b"localhost.evil.example:80", b"notlocalhost",
        b"node7.example.org.evil", b"", b"[::1", b"0x7f.1",
        b"[::1].evil.example", b"[::1]:80.evil.example",
    ],
)  # fmt: skip
def test_a_name_that_was_pointed_here_is_refused(host: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        check_host(asked(b"/", (b"host", host)), ["node7.example.org"])
    assert caught.value.status == 421


@pytest.mark.parametrize(
    ("site", "is_another"),
    [(b"same-origin", False), (b"none", False), (b"same-site", True), (b"cross-site", True), (b"", True)],
)
def test_a_browser_says_whose_page_asks(site: bytes, is_another: bool) -> None:
    assert asked(b"/", (b"sec-fetch-site", site)).is_of_another_page is is_another
    assert not asked(b"/").is_of_another_page


@given(
    st.binary(max_size=200),
    st.lists(st.tuples(st.sampled_from([b"host", b"cookie", b"x"]), st.binary(max_size=60))),
)
def test_anything_is_taken_or_refused(target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    status = 0
    try:
        found = request(b"GET", target, headers)
        assert isinstance(found.cookie("x") + found.bearer + found.path, str)
        host_of(found.headers.get("host", ""))
    except RefusedError as error:
        status = error.status
    assert status in (0, 400)
