"""Where a private daemon would die together with its job."""

from pathlib import Path

import pytest

from everstep.hook.environment import killed_with_the_job

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
