"""What the image holds: the Dockerfile's rules, and that its packages are all that daemon and command line need."""

import json
import os
import re
import shlex
import site
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest
from pausing import wait_until

from everstep.core.ids import CheckpointId
from everstep.daemon.testing import FakeTrainer
from everstep.proto import frames

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "container" / "Dockerfile"
sys.path.insert(0, str(ROOT / "tools"))
import node_requirements  # pyright: ignore[reportMissingImports]


def instructions() -> list[tuple[str, str]]:
    """Return (INSTRUCTION, arguments) of the Dockerfile, continued lines joined."""
    lines = [
        line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (head.upper(), rest.strip())
        for head, _, rest in (line.partition(" ") for line in joined.splitlines())
    ]


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    if not hadolint.exists():
        pytest.skip("needs hadolint, whose package is for x86-64 alone")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_final_stage_is_slim_and_nobody_s() -> None:
    found = instructions()
    stages = [index for index, (head, _) in enumerate(found) if head == "FROM"]
    assert len(stages) == 2
    assert {found[index][1].split()[0] for index in stages} == {"${PYTHON_IMAGE}"}
    (base,) = (
        rest.partition("=")[2] for head, rest in found if head == "ARG" and rest.startswith("PYTHON_IMAGE")
    )
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", base), (
        "a version of Python and of its system, not `latest`"
    )
    final = dict(found[stages[-1] :])
    uid, _, gid = final["USER"].partition(":")
    assert int(uid) > 0, "a number: only then Kubernetes can check runAsNonRoot"
    assert int(gid) > 0
    assert "RUN" not in final, "everything is made in the first stage"
    assert final["COPY"].startswith("--from=build ")
    assert json.loads(final["ENTRYPOINT"]) == ["everstep"]
    assert json.loads(final["CMD"])[:2] == ["daemon", "--config"]
    assert "everstep" in final["HEALTHCHECK"]
    assert "ADD" not in dict(found)
    assert not re.search(r"https?://", " ".join(rest for _, rest in found))


def test_the_context_holds_what_the_build_reads_and_no_more() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    import build_wheel  # pyright: ignore[reportMissingImports]

    needed = {*build_wheel.FILES, *build_wheel.FOLDERS}
    run = next(rest for head, rest in instructions() if head == "RUN")
    read = {word for word in shlex.split(run) if (ROOT / word).is_file()}
    assert {"constraints.txt", "tools/build_wheel.py", "tools/node_requirements.py"} <= read
    assert allowed == needed | read


def test_the_image_s_packages_are_the_package_s_but_for_torch_and_numpy() -> None:
    left_out = {each.name for each in required("everstep")} - {
        Wanted(each).name for each in node_requirements.node_requirements()
    }
    assert left_out == {"torch", "numpy"}


class Wanted:
    """A requirement, by its normalized name."""

    def __init__(self, text: str) -> None:
        self.name = re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9_.-]", text, maxsplit=1)[0]).lower()


def required(name: str) -> list[Wanted]:
    """Return what a distribution needs here, without extras."""
    found = metadata.requires(name) or []
    return [Wanted(each) for each in found if "extra ==" not in each and "python_version" not in each]


def distributions() -> Iterator[metadata.Distribution]:
    """Yield what the image installs, with what that needs."""
    waiting = [Wanted(each).name for each in node_requirements.node_requirements()]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            yield metadata.distribution(name)
            waiting += [each.name for each in required(name)]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment made as the Dockerfile makes it, of packages that are installed here."""
    folder = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    packages = next((folder / "env" / "lib").glob("python3.*")) / "site-packages"
    for distribution in distributions():
        tops = {PurePosixPath(file).parts[0] for file in distribution.files or ()} - {".."}
        for top in tops - {"__pycache__"}:
            source = Path(str(distribution.locate_file(top)))
            if not (packages / top).exists():
                (packages / top).symlink_to(source.resolve())
    wheel = subprocess.run(
        [sys.executable, ROOT / "tools" / "build_wheel.py", folder / "dist"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    programs = folder / "env" / "bin"
    program = programs / "everstep"
    program.write_text(
        f"#!{programs / 'python'}\nimport sys\nfrom everstep.daemon.cli.main import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    return programs


def run(image: Path, *arguments: object, code: int | None = 0) -> str:
    done = subprocess.run(
        [str(each) for each in (image / "everstep", *arguments)], capture_output=True, text=True, check=False
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_nothing_of_training_is_in_the_image(image: Path) -> None:
    code = (
        "import importlib.util as u, everstep\n"
        "print([n for n in ('torch', 'numpy', 'pytest', 'pip') if u.find_spec(n)], everstep.__file__)"
    )
    done = subprocess.run([image / "python", "-I", "-c", code], capture_output=True, text=True, check=True)
    found, _, place = done.stdout.strip().partition("] ")
    assert found == "["
    assert place.startswith(str(image.parent)), "the checkout's everstep is not seen"
    assert not any(place.startswith(each) for each in site.getsitepackages())


ALL_READ_ONLY = """
for each in $WRITABLE; do mount --bind "$each" "$each"; done
for each in $WRITTEN_TO; do mount -o remount,bind,ro "$each"; done
exec "$@"
"""
"""What a container with a read-only root file system sees: only its volumes can be written to."""


def mount_point(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.is_mount())


@pytest.mark.parametrize("root", ["read-only", "writable"])
def test_a_daemon_of_the_image_saves_and_its_commands_answer(
    image: Path, tmp_path: Path, socket_path: Path, root: str
) -> None:
    device = tmp_path / "d0"
    device.mkdir(mode=0o700)
    start, environment = [], dict(os.environ)
    if root == "read-only":
        if os.geteuid():
            pytest.skip("a mount namespace needs root")
        start = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", ALL_READ_ONLY, "sh"]
        (tmp_path / "tmp").mkdir()
        written_to = {
            mount_point(Path(each)) for each in ("/", "/tmp", "/var", "/run", "/home", tmp_path, image)
        }
        environment |= {
            "TMPDIR": str(tmp_path / "tmp"),
            "WRITABLE": f"{device} {socket_path.parent} {tmp_path / 'tmp'}",
            "WRITTEN_TO": " ".join(map(str, written_to)),
        }
    config = tmp_path / "node.toml"
    config.write_text(f'[devices]\nnvme0 = "{device}"\n[daemon]\nsocket = "{socket_path}"\n')
    log = tmp_path / "log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            [*start, image / "everstep", "daemon", "--config", config],
            stdout=output, stderr=output, env=environment,
        )  # fmt: skip
    try:
        wait_until(lambda: socket_path.with_name("daemon.json").exists() or daemon.poll() is not None)
        assert daemon.poll() is None, log.read_text()
        seen = Path(f"/proc/{daemon.pid}/mountinfo").read_text().splitlines()
        options = {fields[4]: fields[5].split(",") for line in seen if (fields := line.split())}
        assert ("ro" in options["/"]) == (root == "read-only")
        with FakeTrainer(socket_path) as trainer:
            trainer.open_run([Path("nvme0")])
            trainer.begin_attempt(1)
            arena = trainer.make_arena(trainer.layout())
            arena.save(CheckpointId(1, 1), seed=1)
            assert isinstance(trainer.event(frames.Persisted), frames.Persisted)
            arena.close()
            loaded = Path(f"/proc/{daemon.pid}/maps").read_text()
            assert not re.search(r"libtorch|/numpy/", loaded)
            status = json.loads(run(image, "status", "--json"))
            assert status["daemon"]["pid"] == daemon.pid
            assert "1.1" in run(image, "ls", "test")
            run(image, "verify", "test")
    finally:
        daemon.terminate()
        assert daemon.wait(60) == 0, log.read_text()
    assert "test" in run(image, "ls", "--storage", device)
    assert "kernel AIO" in run(image, "doctor", device, code=None)  # which finds what this machine lacks
