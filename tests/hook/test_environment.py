"""Where a private daemon would die together with its job."""

from pathlib import Path

import pytest

from everstep.hook.environment import killed_with_the_job, news_of_its_end
from everstep.proto.frames import PROTOCOL, Welcome

VARIABLES = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")
IN_A_CONTAINER = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


@pytest.fixture(autouse=True)
def _no_batch_system(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("name", "said"), list(zip(VARIABLES, ("Slurm", "Kubernetes"), strict=True)))
def test_a_batch_system_is_named(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.setenv(name, "17")
    assert killed_with_the_job().startswith(said)


def test_without_one_a_container_is_all_that_counts() -> None:
    assert ("container" in killed_with_the_job()) == IN_A_CONTAINER
    assert bool(killed_with_the_job()) == IN_A_CONTAINER


def daemon(socket: Path, pid: int, *, private: bool = True) -> Welcome:
    return Welcome(
        version="9", protocol=PROTOCOL, token="t", private=private, pid=pid, control_socket=str(socket)
    )


def test_of_each_private_daemon_it_is_news_once_though_pids_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    seen = [
        (tmp_path / "a", 5),
        (tmp_path / "a", 5),
        (tmp_path / "b", 5),
        (tmp_path / "a", 6),
        (tmp_path / "a", 5),
    ]
    assert [bool(news_of_its_end(daemon(*each))) for each in seen] == [True, False, True, True, True]
    assert not news_of_its_end(daemon(tmp_path / "c", 5, private=False))
