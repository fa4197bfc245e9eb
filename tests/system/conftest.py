"""Each test gets a job of its own, over a daemon of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.hook.trainer_start_testing import Start, trainer_servers
from everstep.hook.trainer_testing import Job, end_daemon

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "small_train.py"


@pytest.fixture(scope="session")
def start_trainer() -> Iterator[Start]:
    """Starts trainers that find torch imported."""
    with trainer_servers() as start:
        yield start


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path, start_trainer: Start) -> Iterator[Job]:
    """Of the script that the module names in JOB_SCRIPT, or the small one."""
    made = Job(tmp_path / "job", getattr(request.module, "JOB_SCRIPT", SCRIPT), start_trainer)
    try:
        yield made
    finally:
        made.end()
        end_daemon()


@pytest.fixture
def devices(tmp_path: Path) -> list[Path]:
    """Two empty directories for a store."""
    paths = [tmp_path / "d0", tmp_path / "d1"]
    for path in paths:
        path.mkdir()
    return paths


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, start_trainer: Start) -> str:
    """Digest of the small run that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERSTEP_SOCKET", str(folder / "s" / "data.sock"))
        (done,) = Job(folder / "job", SCRIPT, start_trainer).start().done()
        end_daemon()
    return str(done["done"])
