"""Objects by fsspec: listing, retries with a deadline, one file system per process."""

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from flaky_store import OBJECTS, FlakyStore
from source_checks import check_in_workers, check_source, contents

from everstep.core.errors import SourceChangedError, StorageError, UsageError
from everstep.dataloader.sources import ObjectSource, object_source

ALL = list(OBJECTS.values())


@pytest.fixture(autouse=True)
def _fresh_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(object_source, "FIRST_DELAY_S", 0.001)
    FlakyStore.errors, FlakyStore.tried, FlakyStore.made, FlakyStore.objects = [], [], 0, dict(OBJECTS)
    FlakyStore.list_errors, FlakyStore.waits = [], []
    yield
    assert not FlakyStore.errors


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes for sources by their pauses only: what they are answered takes none of a deadline, however long."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(object_source, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))


def test_a_prefix_and_a_list() -> None:
    source = ObjectSource("flaky://bucket/train/")
    check_source(source, ALL)
    assert source.url(1) == "flaky://bucket/train/1.bin"
    listed = ObjectSource([f"flaky://bucket/train/{number}.bin" for number in (3, 0)])
    check_source(listed, [ALL[3], ALL[0]])
    assert len(ObjectSource("flaky://bucket/train/", extensions=("1.bin", "2.bin"))) == 2
    assert source.fingerprint() == "objects-1:f4a495ffe6b7f544e894f065042237c6"


def test_local_files_by_their_url(tmp_path: Path) -> None:
    for name in ("b.bin", "a.bin", "sub/c.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    check_source(ObjectSource(f"file://{tmp_path}"), [b"a.bin", b"b.bin", b"sub/c.bin"])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_it(tmp_path: Path, method: str) -> None:
    for number in range(5):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
    check_in_workers(ObjectSource(f"file://{tmp_path}"), [b"%d" % number for number in range(5)], method)


def test_each_process_has_a_file_system_of_its_own() -> None:
    source = ObjectSource("flaky://bucket/train/", storage_options={"token": "secret"})
    assert contents(source) == ALL
    assert FlakyStore.counts() == 1
    assert source._system.value().options == {"token": "secret", "use_listings_cache": False}
    ours = id(source._system.value())
    pid = os.fork()
    if pid == 0:
        same = contents(source) == ALL and FlakyStore.counts() == 2
        kept = [id(each) for each in source._system._inherited or ()]
        os._exit(not (same and kept == [ours] and id(source._system.value()) != ours))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert FlakyStore.counts() == 1


def test_failed_reads_are_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    source = ObjectSource("flaky://bucket/train/")
    FlakyStore.errors = [OSError("reset"), TimeoutError(), RuntimeError("throttled")]
    assert source.get_bytes(2) == ALL[2]
    assert FlakyStore.tried == ["bucket/train/2.bin"] * 4
    assert caplog.text.count("object_call_failed what='flaky://bucket/train/2.bin (sample 2)'") == 3


@pytest.mark.usefixtures("own_time")
def test_the_deadline_ends_it_and_names_the_object() -> None:
    source = ObjectSource("flaky://bucket/train/", deadline_s=60)
    FlakyStore.errors = [OSError("slow down")] * 1000
    with pytest.raises(
        StorageError,
        match=r"train/2\.bin \(sample 2\) could not be read within 60 s: OSError: slow down",
    ):
        source.get_bytes(2)
    assert 1 < len(FlakyStore.tried) < 100
    FlakyStore.errors = []


@pytest.mark.parametrize(
    "error", [PermissionError("denied"), ValueError("bad option"), NotImplementedError()]
)
def test_what_no_retry_mends_is_raised_at_once(error: Exception) -> None:
    source = ObjectSource("flaky://bucket/train/")
    FlakyStore.errors = [error]
    with pytest.raises(type(error)) as raised:
        source.get_bytes(1)
    assert raised.value.__notes__ == ["while flaky://bucket/train/1.bin (sample 1) was read"]
    assert len(FlakyStore.tried) == 1


def test_objects_that_change() -> None:
    source = ObjectSource("flaky://bucket/train/")
    before = source.fingerprint()
    FlakyStore.objects = {**OBJECTS, "bucket/train/1.bin": b"longer"}
    with pytest.raises(SourceChangedError, match=r"1\.bin has 6 bytes, 3 when it was listed \(sample 1\)"):
        source.get_bytes(1)
    assert ObjectSource("flaky://bucket/train/").fingerprint() != before
    FlakyStore.objects = {}
    with pytest.raises(SourceChangedError, match=r"flaky://bucket/train/3\.bin \(sample 3\) is gone"):
        source.get_bytes(3)


def test_a_kept_listing(tmp_path: Path) -> None:
    source = ObjectSource("flaky://bucket/train/", index=tmp_path / "lists")
    travelling = pickle.dumps(source)
    assert len(travelling) < 1000
    FlakyStore.objects = {**OBJECTS, "bucket/train/9.bin": b"new"}
    again = ObjectSource("flaky://bucket/train/", index=tmp_path / "lists")
    assert contents(again) == contents(pickle.loads(travelling)) == ALL
    refreshed = ObjectSource("flaky://bucket/train/", index=tmp_path / "lists", refresh=True)
    assert contents(refreshed) == [*ALL, b"new"]
    other = ObjectSource("flaky://bucket/", index=tmp_path / "lists")
    assert len(other) == 5
    assert len(list((tmp_path / "lists").iterdir())) == 2


def test_what_is_refused() -> None:
    for bad, message in {
        "flaky://bucket/none/": "there is no object",
        "nosuch://x": "fsspec cannot read nosuch://",
    }.items():
        with pytest.raises(UsageError, match=message):
            ObjectSource(bad)
    with pytest.raises(UsageError, match="several protocols: file, flaky"):
        ObjectSource(["flaky://a", "/b"])
    with pytest.raises(UsageError, match="list of objects is empty"):
        ObjectSource([])
    with pytest.raises(UsageError, match="deadline_s=0"):
        ObjectSource("flaky://bucket/train/", deadline_s=0)
    with pytest.raises(UsageError, match="there is no object: flaky://bucket/none is gone"):
        ObjectSource(["flaky://bucket/none"])


@pytest.mark.usefixtures("own_time")
def test_a_listing_that_fails_is_tried_again_and_named() -> None:
    """Whatever a client raises; what the store refuses is raised at once."""
    FlakyStore.list_errors = [RuntimeError("throttled"), OSError("reset")]
    assert contents(ObjectSource("flaky://bucket/train/")) == ALL
    FlakyStore.list_errors = [RuntimeError("down")] * 1000
    with pytest.raises(
        StorageError, match=r"flaky://bucket/train could not be listed within 60 s: RuntimeError: down"
    ):
        ObjectSource("flaky://bucket/train/", deadline_s=60)
    with pytest.raises(StorageError, match=r"train/1\.bin could not be asked for its size within 60 s"):
        ObjectSource(["flaky://bucket/train/1.bin"], deadline_s=60)
    FlakyStore.list_errors = [PermissionError("denied")]
    with pytest.raises(PermissionError, match="denied"):
        ObjectSource("flaky://bucket/train/")
    FlakyStore.list_errors = []


def test_a_file_system_that_is_not_asynchronous_and_hangs_is_given_up() -> None:
    go_on = threading.Event()
    FlakyStore.waits = [go_on]
    source = ObjectSource("flaky://bucket/train/", deadline_s=9.0)
    begun_s = time.monotonic()
    assert source.get_bytes(1) == ALL[1], "the second try"
    assert 2.9 < time.monotonic() - begun_s < 9.0
    assert len(FlakyStore.tried) == 2
    FlakyStore.waits = [go_on] * 100
    with pytest.raises(StorageError, match=r"1\.bin .* within 0\.3 s: TimeoutError: no answer within"):
        ObjectSource("flaky://bucket/train/", deadline_s=0.3).get_bytes(1)
    FlakyStore.waits = []
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "everstep-in-time":
            thread.join()


SIGNED = "signed://me:secret-word@store/bucket/1.bin?X-Amz-Signature=abcdef%2Fg&id=5"


@pytest.mark.usefixtures("own_time")
def test_what_signs_a_url_is_in_no_message_log_or_fingerprint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again = SIGNED.replace("abcdef", "uvwxyz")
    FlakyStore.objects = dict.fromkeys([SIGNED, again], b"1")
    source, later = ObjectSource([SIGNED], deadline_s=60), ObjectSource([again])
    assert source.get_bytes(0) == later.get_bytes(0) == b"1"
    assert source.fingerprint() == later.fingerprint()
    other = SIGNED.replace("id=5", "id=6")
    FlakyStore.objects[other] = b"1"
    assert ObjectSource([other]).fingerprint() != source.fingerprint()
    assert source.url(0) == "signed://me@store/bucket/1.bin?id=5"
    FlakyStore.errors = [OSError(f"403 for {SIGNED}, abcdef/g, secret-word")] * 1000
    with pytest.raises(StorageError) as raised:
        source.get_bytes(0)
    FlakyStore.errors = []
    with pytest.raises(UsageError, match="would keep what signs") as refused:
        ObjectSource([SIGNED], index=tmp_path)
    with pytest.raises(UsageError, match="there is no object") as missing:
        ObjectSource([SIGNED.replace("1.bin", "2.bin")])
    for text in (str(raised.value), str(refused.value), str(missing.value), caplog.text):
        assert "abcdef" not in text
        assert "secret-word" not in text
    assert "object_call_failed" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("own_time")
def test_secret_options_are_in_no_message(caplog: pytest.LogCaptureFixture) -> None:
    source = ObjectSource("flaky://bucket/train/", storage_options={"secret": "hunter22"}, deadline_s=60)
    FlakyStore.errors = [OSError("login hunter22 failed")] * 1000
    with pytest.raises(StorageError, match="login … failed"):
        source.get_bytes(0)
    FlakyStore.errors = []
    assert "hunter22" not in caplog.text
    assert "hunter22" not in source.fingerprint()


def test_host_and_user_come_from_the_url() -> None:
    names = ("/data/0.bin", "/data/1.bin")
    FlakyStore.objects = dict.fromkeys(names, b"x")
    urls = [f"hosted://me@store:22{name}" for name in names]
    source = ObjectSource(urls)
    assert contents(source) == [b"x", b"x"]
    assert source._system.value().options["host"] == "store"
    assert source.url(1) == "hosted://store/data/1.bin"
    with pytest.raises(UsageError, match=r"hosted://me@other/data/0\.bin is of another host or user"):
        ObjectSource([urls[0], "hosted://me@other/data/0.bin"])


def test_a_call_that_hangs_is_given_up_and_tried_again() -> None:
    """In a process of its own: fsspec's event loop is a thread that stays."""
    code = """
import os, sys
from flaky_store import HangingStore, OBJECTS
from everstep.core.errors import StorageError
from everstep.dataloader.sources import ObjectSource
names = [f"hanging://{name}" for name in OBJECTS]
source = ObjectSource(names, deadline_s=9.0)
assert source.get_bytes(1) == b"111" and HangingStore.started == 2
HangingStore.hangs = 1000
quick = ObjectSource(names)
quick._deadline_s = 0.3  # it has asked for their sizes
try:
    quick.get_bytes(2)
except StorageError as exc:
    print(exc)
HangingStore.hangs = 0
assert source.get_bytes(0) == b"000"
pid = os.fork()  # the loop's thread does not exist in the child: a file system of its own has one
if pid == 0:
    os._exit(source.get_bytes(3) != b"333")
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("done")
"""
    support = Path(__file__).parents[2] / "support"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(support)},
    )
    assert done.returncode == 0, done.stderr
    assert "hanging://bucket/train/2.bin (sample 2) could not be read within 0.3 s" in done.stdout
    assert done.stdout.endswith("done\n")
