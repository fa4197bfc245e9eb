"""Which engine a directory gets: what files there can do, what the kernel gives, what the operator wants."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.checkpoint import uring
from everstep.checkpoint.engine import EngineKind
from everstep.checkpoint.engine_choice import EngineRules, choose_engine, fallback_engine
from everstep.checkpoint.engine_process import ProcessEngine
from everstep.checkpoint.linux import DioAlignment, dio_alignment
from everstep.checkpoint.uring_probe import refusal_text
from everstep.core.errors import StorageError


@pytest.fixture
def alignment(tmp_path: Path) -> DioAlignment:
    with (tmp_path / "probe").open("wb") as probe:
        found = dio_alignment(probe.fileno())
    (tmp_path / "probe").unlink()
    if found is None or not found.is_possible:
        pytest.skip(f"files in {tmp_path} cannot do direct I/O")
    return found


def test_aio_is_chosen_where_a_file_can_do_direct_io(tmp_path: Path, alignment: DioAlignment) -> None:
    choice = choose_engine(tmp_path)

    assert (choice.kind, choice.alignment) == (EngineKind.AIO, alignment)
    assert choice.reason == f"direct I/O in multiples of {alignment.offset_bytes} bytes; kernel AIO"
    assert list(tmp_path.iterdir()) == []
    made = choice.factory()
    assert made.name == choice.name == "aio"
    made.close()


def test_plain_is_chosen_where_no_file_can() -> None:
    choice = choose_engine(Path("/dev/shm"))

    assert choice.kind is EngineKind.PLAIN
    assert "/dev/shm cannot do direct I/O" in choice.reason
    made = choice.factory()
    assert made.name == "plain"
    made.close()


@pytest.mark.parametrize("wanted", EngineKind)
@pytest.mark.parametrize("place", ["disk", "/dev/shm"])
def test_the_wanted_engine_is_chosen_wherever_the_kernel_gives_it(
    tmp_path: Path, wanted: EngineKind, place: str
) -> None:
    choice = choose_engine(tmp_path if place == "disk" else Path(place), EngineRules(wanted=wanted))

    assert choice.kind is wanted
    assert choice.reason.endswith(" as configured")
    made = choice.factory()
    assert made.name == wanted.value
    made.close()


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    made = choose_engine(tmp_path, EngineRules(wanted=EngineKind.URING, in_process=True)).factory()
    assert isinstance(made, ProcessEngine)
    assert made.name == "uring in a process"
    made.close()


def test_a_wanted_engine_that_the_machine_cannot_have_is_replaced_and_the_reason_says_so(
    tmp_path: Path, alignment: DioAlignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring, "ORDERED_MACHINES", frozenset({"pdp11"}))

    choice = choose_engine(tmp_path, EngineRules(wanted=EngineKind.URING))

    assert (choice.kind, choice.alignment) == (EngineKind.AIO, alignment)
    assert "no io_uring: the order of memory accesses on" in choice.reason


def test_what_was_chosen_and_could_not_be_made_is_not_chosen_again(
    tmp_path: Path, alignment: DioAlignment
) -> None:
    """In processes until not even the plain engine can have one, then in threads; that one is the last."""
    rules: EngineRules | None = EngineRules(in_process=True)
    chosen: list[tuple[str, bool]] = []
    while rules is not None:
        choice = choose_engine(tmp_path, rules)
        chosen.append((choice.name, rules.in_process))
        assert ("no process of its own: no more" in choice.reason) == (not rules.in_process)
        assert ("no kernel AIO: no more" in choice.reason) == (choice.kind is not EngineKind.AIO)
        rules = rules.without(choice.kind, "no more")
    assert chosen == [(kind, where) for where in (True, False) for kind in ("aio", "uring", "plain")]


WITHOUT_CALLS = Path(__file__).parents[1] / "scripts" / "without_calls.py"
_CHOOSE = """
import sys
from pathlib import Path
from everstep.checkpoint.engine import EngineKind
from everstep.checkpoint.engine_choice import EngineRules, choose_engine

wanted = EngineKind(sys.argv[2]) if sys.argv[2] else None
choice = choose_engine(Path(sys.argv[1]), EngineRules(wanted=wanted))
choice.factory().close()
print(choice.kind.value, choice.reason, sep="|")
"""


@pytest.mark.parametrize(
    ("forbidden", "wanted", "expected"),
    [
        (
            "425=1",
            "uring",
            ("aio", "no io_uring: not permitted, though the kernel has it on: a seccomp filter"),
        ),
        (
            "425=1,206=1",
            "",
            ("plain", "no kernel AIO: io_setup(256): Operation not permitted; no io_uring: not"),
        ),
        ("206=1", "", ("uring", "no kernel AIO: io_setup(256): Operation not permitted; io_uring")),
    ],
)
def test_what_a_container_forbids_is_not_chosen(
    tmp_path: Path, alignment: DioAlignment, forbidden: str, wanted: str, expected: tuple[str, str]
) -> None:
    ended = subprocess.run(
        [sys.executable, WITHOUT_CALLS, forbidden, sys.executable, "-P", "-c", _CHOOSE, tmp_path, wanted],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    kind, reason = ended.stdout.strip().split("|")
    assert kind == expected[0]
    assert reason.startswith(f"direct I/O in multiples of {alignment.offset_bytes} bytes")
    assert expected[1] in reason


@pytest.mark.parametrize(
    ("number", "disabled", "words"),
    [
        (errno.EPERM, "2", "kernel.io_uring_disabled is 2"),
        (errno.EPERM, "1", "kernel.io_uring_disabled is 1"),
        (errno.EPERM, "0", "seccomp"),
        (errno.EPERM, "", "seccomp"),
        (errno.ENOSYS, "", "has no io_uring"),
        (errno.EINVAL, "0", "older than Linux 5.19"),
        (errno.ENOMEM, "", "RLIMIT_MEMLOCK"),
        (errno.EMFILE, "0", "Too many open files"),
    ],
)
def test_each_refusal_has_words(number: int, disabled: str, words: str) -> None:
    error = OSError(number, "Too many open files" if number == errno.EMFILE else "text of the kernel")
    assert words in refusal_text(error, disabled=disabled)


def test_a_directory_that_cannot_be_asked_is_an_error_and_has_a_fallback(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"/absent.*ENOENT"):
        choose_engine(tmp_path / "absent")

    fallback = fallback_engine("nobody knows")
    assert (fallback.kind, fallback.alignment) == (EngineKind.PLAIN, None)
    assert fallback.reason == "nobody knows; pwrite and pread"
    assert fallback_engine("nobody knows", EngineRules(wanted=EngineKind.AIO)).kind is EngineKind.AIO
