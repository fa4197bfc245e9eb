"""What a program that the command line starts says of an error of the system: what the user can do."""

import errno
import io
import json
import os

import pytest

from everstep.hook.tool_process import EXIT_FAILED, run_tool


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "free space there"),
        (errno.EACCES, "`ls -ld` shows who may read and write there"),
        (errno.EROFS, "name another place"),
        (errno.ENOENT, "check the spelling"),
        (errno.EIO, "SMART log"),
        (errno.ELOOP, "check that path, its permissions and the free space there"),
    ],
)
def test_an_error_of_the_system_says_what_to_do(
    number: int, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("{}"))
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def fail(request: dict[str, object]) -> dict[str, object]:
        raise OSError(number, os.strerror(number), "/there")

    assert run_tool(fail) == EXIT_FAILED
    said = json.loads(capsys.readouterr().out)["error"]
    assert (said["code"], said["message"]) == ("StorageError", f"/there: {os.strerror(number)}")
    assert hint in said["hint"]
    assert "errno" not in said["hint"]
