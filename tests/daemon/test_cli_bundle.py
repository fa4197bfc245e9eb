"""`everstep debug bundle` of a real daemon: what is in it, what is not, and a daemon that hangs or is gone."""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.layout_plan import plan_layout
from everstep.checkpoint.testing import SMALL_LEAVES
from everstep.core.ids import CheckpointId
from everstep.daemon.cli.bundle_plan import (
    ITEM_BYTES_MAX,
    TOTAL_BYTES_MAX,
    Item,
    cut,
    fitting,
    redacted,
)
from everstep.daemon.testing import FakeTrainer, node_daemon
from everstep.proto import frames

EVERSTEP = Path(sys.executable).with_name("everstep")
SECRET = "correct-horse-battery-staple-0123456789"


def bundle(path: Path, *arguments: str, code: int = 0) -> dict[str, bytes]:
    done = subprocess.run(
        [EVERSTEP, "debug", "bundle", path, *arguments],
        capture_output=True, text=True, check=False, timeout=100, cwd="/",
    )  # fmt: skip
    assert done.returncode == code, done
    if code:
        return {"said": done.stderr.encode()}
    content = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=64 * 1024 * 1024)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = archive.getmembers()
        assert {member.mode for member in members} == {0o600}
        return {
            member.name.removeprefix("everstep-debug/"): archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in members
        }


def missing(files: dict[str, bytes]) -> set[str]:
    return {each["name"] for each in json.loads(files["manifest.json"])["missing"]}


def test_a_bundle_has_all_and_gives_no_secret_away(
    node_config: Path, socket_path: Path, devices: list[Path], tmp_path: Path
) -> None:
    secret = tmp_path / "cache.token"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    node_config.write_text(
        node_config.read_text()
        + f'[cache]\nlisten = "127.0.0.1:0"\nmembers = ["127.0.0.1:1"]\ntoken_file = "{secret}"\n'
    )
    environment = {
        **os.environ,
        "EVERSTEP_SINK": "http://user:hunter22@sink/",  # ours by name, and no key
        "EVERSTEP_UPLOAD_TOKEN": "very-secret-upload",
        "OTHER_PASSWORD": "never-looked-at",
    }
    with node_daemon(node_config, socket_path, environment=environment), FakeTrainer(socket_path) as trainer:
        assert isinstance(trainer.hello, frames.Welcome)
        trainer.open_run(["nvme0", "nvme1"], name="resnet")  # type: ignore[list-item]
        trainer.begin_attempt(1)
        arena = trainer.make_arena(plan_layout(SMALL_LEAVES, [], segment_count=2))
        arena.save(CheckpointId(attempt=1, step=5), seed=3)
        trainer.event(frames.Persisted)
        with socket_path.with_name("daemon.log").open("a") as log:
            log.write(f"x authorization: Bearer abcdef and {trainer.hello.token}\n{SECRET}\n")
        stored = [path for device in devices for path in device.rglob("*.safetensors")]
        assert stored
        bytes_stored = [path.read_bytes()[4096:4160] for path in stored if path.stat().st_size > 4160]
        path = tmp_path / "b.tar.zst"
        files = bundle(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert missing(files) == set()
    assert {"doctor.json", "status.json", "files.txt", "daemon/stacks.txt", "daemon/metrics.txt"} <= set(
        files
    )
    assert json.loads(files["status.json"])["runs"][0]["name"] == "resnet"
    assert b"_until_told" in files["daemon/stacks.txt"] or b"run_daemon" in files["daemon/stacks.txt"]
    assert b"daemon_ready" in files["daemon/log.txt"]
    assert b"everstep_build_info" in files["daemon/metrics.txt"]
    assert b"Max open files" in files["daemon/process.txt"]
    assert b".safetensors" in files["files.txt"]
    assert f'token_file = "{secret}"'.encode() in files["configuration.toml"]
    whole = b"\0".join(files.values())
    for hidden in (
        SECRET,
        trainer.hello.token,
        "hunter22",
        "abcdef ",
        "very-secret-upload",
        "never-looked-at",
    ):
        assert hidden.encode() not in whole, hidden
    assert bytes_stored
    assert not [content for content in bytes_stored if content in whole]


def test_a_daemon_that_stands_still_does_not_hold_the_bundle(
    node_config: Path, socket_path: Path, tmp_path: Path
) -> None:
    with node_daemon(node_config, socket_path) as daemon:
        daemon.send_signal(signal.SIGSTOP)
        try:
            files = bundle(tmp_path / "b.tar.zst", "--deadline-s", "3")
        finally:
            daemon.send_signal(signal.SIGCONT)
    assert {"status.json", "daemon/metrics.txt", "daemon/stacks.txt"} <= missing(files)
    assert {"daemon/log.txt", "daemon/process.txt", "versions.json", "node.txt"} <= set(files)
    assert files["daemon/file.toml"].decode() == node_config.read_text()


def test_without_a_daemon_the_bundle_says_what_is_missing(tmp_path: Path, devices: list[Path]) -> None:
    (devices[0] / "left").write_bytes(b"stored bytes")
    files = bundle(tmp_path / "b.tar.zst", "--storage", str(devices[0]))
    assert {"daemon/", "status.json"} <= missing(files)
    assert json.loads(files["doctor.json"])["verdict"] in ("ok", "warn", "fail")
    assert b"'left'" in files["files.txt"]
    assert b"stored bytes" not in files["files.txt"]


def test_a_file_behind_the_directories_is_not_taken_for_one(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.zst"
    words = [EVERSTEP, "debug", "bundle", "--storage", tmp_path, path]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"argument --storage: {path} is no directory; FILE comes before --storage" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_room_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.zst"
    done = subprocess.run(
        ["prlimit", "--fsize=512", EVERSTEP, "debug", "bundle", path, "--deadline-s", "5"],
        capture_output=True, text=True, check=False, timeout=100, cwd="/",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, ""), done
    assert done.stderr.startswith(f"everstep: cannot write {path}: File too large"), done.stderr
    assert "Traceback" not in done.stderr
    assert not path.exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("mine")
    assert b"File exists" in bundle(path, code=2)["said"]
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    bundle(link, code=2)
    assert path.read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("url=https://u:p4ssw0rd@host/x", "url=https://***@host/x"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("token = 'abc'", "token = '***'"),
        ('"api_key": "abc def"', '"api_key": "***"'),
        ("password=abc&x=1", "password=***&x=1"),
        ('token_file = "/etc/x"', 'token_file = "/etc/x"'),
        ("a" * 64, "<64 hex digits>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "*** private key ***"),
    ],
)
def test_secrets_are_taken_out_of_texts(text: str, left: str) -> None:
    assert redacted(f"x {text} y") == f"x {left} y"


@given(st.text(max_size=200), st.text("abcdefgh0123", min_size=8, max_size=30))
def test_a_known_secret_is_never_left(text: str, secret: str) -> None:
    assert secret not in redacted(f"{text}{secret}{text}", [secret])


def test_a_bundle_is_bounded() -> None:
    log = cut("log", b"a" * 5 + b"b" * ITEM_BYTES_MAX, keep_end=True)
    assert (log.cut_bytes, log.content[:1], len(log.content)) == (5, b"b", ITEM_BYTES_MAX)
    head = cut("head", b"a" * ITEM_BYTES_MAX + b"b", keep_end=False)
    assert (head.cut_bytes, head.content[-1:]) == (1, b"a")
    items = [Item(name=str(n), content=bytes(ITEM_BYTES_MAX)) for n in range(10)]
    kept, left = fitting(items)
    assert sum(len(item.content) for item in kept) <= TOTAL_BYTES_MAX
    assert [item.name for item in kept] + [each.name for each in left] == [item.name for item in items]
    assert left
