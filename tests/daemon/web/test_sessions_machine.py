"""Logins and sessions, without a clock."""

from everstep.daemon.web.sessions_machine import (
    LOGIN_S,
    LOGINS_PER_USER_MAX,
    SESSION_S,
    SESSIONS_PER_USER_MAX,
    Sessions,
)


def test_a_login_works_once() -> None:
    sessions = Sessions()
    assert sessions.issue(1000, "login", 0.0) == LOGIN_S
    assert sessions.uid("login", 1.0) is None, "a login is no session"
    assert sessions.redeem("login", "session", 1.0)
    assert sessions.uid("session", 2.0) == 1000
    assert not sessions.redeem("login", "another", 3.0)
    assert sessions.uid("another", 4.0) is None


def test_both_end_with_time() -> None:
    sessions = Sessions()
    sessions.issue(1000, "late", 0.0)
    assert not sessions.redeem("late", "session", LOGIN_S)
    sessions.issue(1000, "login", 0.0)
    assert sessions.redeem("login", "session", 1.0)
    assert sessions.uid("session", SESSION_S) == 1000
    assert sessions.uid("session", SESSION_S + 1.0) is None


def test_the_oldest_of_a_user_makes_way_and_nobody_elses() -> None:
    sessions = Sessions()
    sessions.issue(1, "other", 0.0)
    for number in range(LOGINS_PER_USER_MAX + 1):
        sessions.issue(2, f"login {number}", 0.0)
    assert not sessions.redeem("login 0", "x", 1.0)
    assert sessions.redeem("login 1", "x", 1.0)
    assert sessions.redeem("other", "theirs", 1.0)
    for number in range(SESSIONS_PER_USER_MAX):
        sessions.issue(2, "login", 2.0)
        assert sessions.redeem("login", f"session {number}", 2.0)
    assert sessions.uid("x", 3.0) is None
    assert sessions.uid("session 0", 3.0) == 2
    assert sessions.uid("theirs", 3.0) == 1


def test_what_is_kept_cannot_be_used() -> None:
    sessions = Sessions()
    sessions.issue(1, "secret", 0.0)
    assert "secret" not in repr(vars(sessions))
    sessions.forget_old(LOGIN_S)
    assert not sessions.redeem("secret", "session", 0.0)
