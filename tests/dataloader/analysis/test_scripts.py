"""`everstep analyze` on a real script, in child processes: workers however started, and all that goes wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from everstep.core.errors import DeadlineError, InternalError, UsageError
from everstep.daemon.cli.main import main
from everstep.dataloader.analysis.measured_format import Analysis, Measured, Phase, decode
from everstep.dataloader.analysis.names import Names
from everstep.dataloader.analysis.page_cache import drop
from everstep.dataloader.analysis.runs import Asked, analyze_script, run_phase

FILES, SIZE = 80, 64 * 1024
STRANGER = 60001
"""A user that has no account and needs none."""
SCRIPT = Path(__file__).with_name("analysed_script.py")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's working folder, with data beside it, a script, a checkpoint and a log in a folder."""
    (tmp_path / "data").mkdir()
    for number in range(FILES):
        (tmp_path / "data" / f"{number}.bin").write_bytes(os.urandom(SIZE))
    folder = tmp_path / "project"
    (folder / "runs").mkdir(parents=True)
    (folder / "best.pt").write_text("mine")
    (folder / "runs" / "log.txt").write_text("mine")
    shutil.copy(SCRIPT, folder / "train.py")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run_once(project: Path, tmp_path: Path) -> Callable[..., tuple[Measured, Names]]:
    def run(
        phase: Phase, *arguments: str, names: Names | None = None, steps: int = 8
    ) -> tuple[Measured, Names]:
        names = names or Names()
        folder = tmp_path / phase.value
        folder.mkdir()
        asked = Asked(script=project / "train.py", arguments=arguments, directory=project, steps=steps)
        return run_phase(asked, phase, folder, None, names), names

    return run


def is_on_storage(folder: Path) -> bool:
    """Return whether files here can leave memory: not on tmpfs."""
    return not drop(map(str, (folder.parent / "data").iterdir())).kept


def test_the_command_end_to_end(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["analyze", "train.py", "--steps", "8", "--html", "out.html", "--json", "out.json"]
    assert main([*words, "--", "--workers", "2", "--method", "fork"]) == 0
    said = capfd.readouterr()
    found = decode((project / "out.json").read_bytes(), Analysis)
    assert found.subject == "train.py --workers 2 --method fork"
    assert [run.phase for run in found.runs] == [Phase.SYNTHETIC, Phase.WARM, Phase.COLD]
    assert [run.times.count for run in found.runs] == [8, 8, 8]
    assert (found.loader.workers, found.loader.start_method, found.loader.batch_size) == (2, "fork", 4.0)
    assert found.loader.dataset_length == FILES
    if is_on_storage(project):
        assert found.runs[2].reasons == []
        assert found.model.sample_bytes == pytest.approx(SIZE, rel=0.2)
    assert found.unseen_files == []
    assert found.advice.sentence in said.out
    heads = r"RUN +SAMPLES/S +STEP, ms +COMPUTE +COPY +PREPARATION +FETCH *\n"
    rows = (rf"{run.phase.value} +≤?{run.samples_per_s:,.1f} .*\n" for run in found.runs)
    assert re.search(heads + "".join(rows), said.out), "the table"
    assert found.advice.sentence in (project / "out.html").read_text().replace("&#x27;", "'")
    assert "said by the script" not in said.out + said.err
    assert "run 3 of 3" in said.err
    assert (project / "best.pt").read_text() == "mine", "torch.save writes by native code"
    assert (project / "runs" / "log.txt").read_text() == "mine"
    assert found.written_files == []
    assert sorted(path.name for path in project.iterdir()) == [
        "best.pt", "out.html", "out.json", "runs", "train.py"
    ]  # fmt: skip


def test_spawned_workers_name_their_files_and_drop_them(
    run_once: Callable[..., tuple[Measured, Names]], project: Path
) -> None:
    """No run before has named them: they leave memory when they are opened."""
    measured, names = run_once(Phase.COLD, "--workers", "1", "--method", "spawn")
    assert measured.loader.start_method == "spawn"
    assert len([name for name in names.read if name.endswith(".bin")]) >= 4 * 8
    assert names.native == {}
    assert measured.work.samples > 0
    assert measured.work.busy_s > 0
    if is_on_storage(project):
        assert measured.work.storage_bytes >= 0.9 * measured.work.samples * SIZE


def test_what_native_code_opens_is_named(run_once: Callable[..., tuple[Measured, Names]]) -> None:
    _, names = run_once(Phase.SYNTHETIC, "--what", "native", "--workers", "1", "--method", "forkserver")
    assert len(names.native) >= 4 * 8
    assert all(name.endswith(".bin") for name in names.native)


AS_STRANGER = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]


def strangers_python(place: Path) -> Path:
    """Return an interpreter that another user can start: this one, or the system's with the same packages."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    other = place / "venv" / "bin" / "python"
    other.parent.mkdir(parents=True)
    other.symlink_to(f"/usr/bin/{name}")
    (place / "venv" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (place / "venv" / "lib" / name).mkdir(parents=True)
    (place / "venv" / "lib" / name / "site-packages").symlink_to(Path(torch.__file__).parents[1])
    for path in (place / "venv", *(place / "venv").rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    code = "import subprocess, sys, everstep.daemon.cli.main; subprocess.run([sys.executable, '-c', ''], check=True)"
    said = ""
    for each in (Path(sys.executable), other):
        done = subprocess.run(
            [*AS_STRANGER, each, "-P", "-c", code], cwd=place, capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return each
        said += done.stderr[-200:]
    pytest.skip(f"another user cannot run {sys.executable}, nor /usr/bin/{name} with its packages: {said}")


@pytest.mark.root
def test_the_command_needs_no_root() -> None:
    """Run as another user, with files of its own and of root's, which it may read."""
    with tempfile.TemporaryDirectory(prefix="es-") as made:
        place = Path(made)
        for folder in place.parents:
            if any(
                part.startswith("es-") for part in folder.parts
            ):  # this test session's own: let others pass
                folder.chmod(0o711)
        (place / "data").mkdir()
        for number in range(FILES):
            (place / "data" / f"{number}.bin").write_bytes(os.urandom(SIZE))
        (place / "project" / "runs").mkdir(parents=True)
        shutil.copy(SCRIPT, place / "project" / "train.py")
        mine = [place, place / "project", place / "project" / "runs"]
        for path in [*mine, *sorted((place / "data").iterdir())[::2]]:
            os.chown(path, STRANGER, STRANGER)
        environment = {**os.environ, "HOME": made, "TMPDIR": made}
        environment.pop(
            "TORCHINDUCTOR_CACHE_DIR", None
        )  # a folder of this user's, named once torch is imported
        code = (
            "import os, sys; from everstep.daemon.cli.main import main; assert os.geteuid() != 0;"
            " sys.exit(main(sys.argv[1:]))"
        )
        words = ["analyze", "train.py", "--steps", "8", "--json", "--", "--workers", "2", "--method", "fork"]
        done = subprocess.run(
            [*AS_STRANGER, strangers_python(place), "-P", "-c", code, *words], env=environment,
            cwd=place / "project", capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = decode(done.stdout.encode(), Analysis)
        assert [seen.times.count for seen in found.runs] == [8, 8, 8]
        assert found.unseen_files == []
        if is_on_storage(place / "project"):
            assert found.runs[2].reasons == [], "it was cold"
            assert found.model.sample_bytes == pytest.approx(SIZE, rel=0.2)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_command_says_what_native_code_opened_and_marks_the_cold_run(
    project: Path, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The cold run drops the same files from memory, by Python: that must not make them Python's."""
    words = ["analyze", "train.py", "--steps", "8", "--json", "out.json"]
    assert main([*words, "--", "--what", "native", "--workers", "1", "--method", method]) == 0
    found = decode((project / "out.json").read_bytes(), Analysis)
    assert len(found.unseen_files) >= 4 * 8
    assert all(name.endswith(".bin") for name in found.unseen_files)
    assert found.runs[2].is_bound
    assert found.runs[2].reasons[0].startswith("native code opened files by itself: ")
    said = capfd.readouterr().out
    assert re.search(r"cold +≤", said)
    assert "native code opened files by itself" in said


def test_what_a_source_declares_leaves_memory_though_nobody_sees_it_opened(
    run_once: Callable[..., tuple[Measured, Names]], project: Path
) -> None:
    words = ("--what", "declares", "--workers", "1", "--method", "fork")
    _, names = run_once(Phase.SYNTHETIC, *words)
    assert sum(name.endswith(".bin") for name in names.read) == FILES
    assert names.native == {}
    measured, names = run_once(Phase.COLD, *words, names=names)
    assert names.native == {}
    assert measured.notes == []
    if is_on_storage(project):
        assert measured.work.storage_bytes >= 0.9 * measured.work.samples * SIZE


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_scripts_and_their_workers_do_to_the_working_folder_is_done_to_the_scratch_folder(
    run_once: Callable[..., tuple[Measured, Names]], project: Path, method: str
) -> None:
    (project / "old" / "sub").mkdir(parents=True)
    (project / "old" / "sub" / "1.txt").write_text("mine")
    (project / "notes.txt").write_text("mine")
    (project / "notes.txt").chmod(0o640)
    os.utime(project / "notes.txt", (1e9, 1e9))
    before = seen(project)
    measured, _ = run_once(Phase.WARM, "--what", "tidies", "--workers", "2", "--method", method)
    assert measured.times.count == 8
    assert seen(project) == before


def seen(folder: Path) -> dict[str, tuple[int, float, bytes]]:
    """Return the mode, time and content of all below a folder."""
    return {
        str(path): (status.st_mode, status.st_mtime, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
        for status in [path.stat()]
    }


def test_a_stream_of_samples(run_once: Callable[..., tuple[Measured, Names]]) -> None:
    measured, names = run_once(Phase.WARM, "--what", "stream")
    assert (measured.times.count, measured.loader.workers, measured.loader.dataset_length) == (8, 0, None)
    assert measured.work.samples == pytest.approx(4 * 8, abs=8)
    assert len(names.read) >= 4 * 8


def test_loops_with_gradients_off_are_passed_by(run_once: Callable[..., tuple[Measured, Names]]) -> None:
    measured, _ = run_once(Phase.SYNTHETIC, "--what", "validates")
    assert (measured.loader.number, measured.loaders_seen, measured.loader.batch_size) == (
        1,
        2,
        pytest.approx(3, abs=1),
    )


def test_the_run_that_a_script_attaches_to_is_left_alone(
    run_once: Callable[..., tuple[Measured, Names]], tmp_path: Path
) -> None:
    """Its steps are no training: the synthetic ones get the same batches again and again."""
    (tmp_path / "store").mkdir()
    measured, _ = run_once(Phase.SYNTHETIC, "--what", "attaches", "--storage", str(tmp_path / "store"))
    assert (measured.times.count, measured.loader.kind) == (8, "everstep.dataloader.loader.DataLoader")
    assert list((tmp_path / "store").iterdir()) == []
    assert not Path(os.environ["EVERSTEP_SOCKET"]).exists(), "no daemon was started"


def test_a_loop_shorter_than_asked_says_so(run_once: Callable[..., tuple[Measured, Names]]) -> None:
    measured, _ = run_once(Phase.WARM, "--epochs", "1", steps=50)
    assert measured.times.count == FILES // 4 - 3
    assert measured.notes == [
        "the loop was shorter than asked: 17 of 50 steps (20 batches an epoch, 3 of each not counted)"
    ]


def test_a_loader_made_anew_for_each_epoch_is_one(run_once: Callable[..., tuple[Measured, Names]]) -> None:
    measured, _ = run_once(Phase.WARM, "--what", "renews", "--epochs", "3", steps=40)
    assert (measured.times.count, measured.loaders_seen, measured.notes) == (40, 1, [])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raises", r"train.py: it raised ValueError: the loss is NaN \(line \d+\)\n.*said by the script"),
        ("exits", r"train.py: it called sys.exit\(3\) without iterating"),
        ("idle", r"train.py: it ended without iterating a torch.utils.data.DataLoader"),
        ("short", r"before there were 4 steps to count \(loader 0: 3 batches an epoch\)"),
    ],
)
def test_scripts_that_measure_nothing(project: Path, what: str, message: str) -> None:
    asked = Asked(script=project / "train.py", arguments=["--what", what], directory=project, steps=8)
    with pytest.raises(UsageError, match=f"(?s){message}") as caught:
        analyze_script(asked)
    assert caught.value.hint


def test_a_script_that_is_gone(project: Path) -> None:
    asked = Asked(script=project / "train.py", arguments=["--what", "vanishes"], directory=project)
    with pytest.raises(
        InternalError, match=r"(?s)the synthetic run ended without an answer.*said by the script"
    ):
        analyze_script(asked)


def test_a_script_that_hangs_is_ended(project: Path) -> None:
    asked = Asked(
        script=project / "train.py", arguments=["--what", "hangs"], directory=project, deadline_s=0.5
    )
    with pytest.raises(DeadlineError, match="the synthetic run took longer than its deadline"):
        analyze_script(asked)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["analyze", "absent.py"], "there is no script absent.py"),
        (["analyze", "train.py", "--html", "/no/folder/x.html"], "lies in no directory"),
        (["analyze", "train.py", "--steps", "2"], "fewer than 4 steps say nothing"),
        (["analyze", "train.py", "--seconds", "-1"], "is no number of seconds above 0"),
        (["analyze", "train.py", "--what", "idle"], "unrecognized arguments: --what idle"),
    ],
)
@pytest.mark.usefixtures("project")
def test_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("project")
def test_wrong_usage_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "absent.py", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "UsageError"
