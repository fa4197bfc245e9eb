"""A source that hangs, as a network file system does: the log names the sample, and `timeout=` ends the wait."""

import logging
import os
import re
import threading
import time
from pathlib import Path

import pytest
from cached import Blocks
from fragile import loader_of
from pausing import wait_until

from everstep.core.errors import WorkerTimeoutError
from everstep.daemon.testing import daemon_process
from everstep.dataloader import CachedDataset
from everstep.dataloader.workers import pool

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")

COUNT, HANGS_AT = 24, 13
TIMEOUT_S = 4
"""Longer than a busy machine takes for a batch that nothing holds up, the start of its worker included."""
LONG_WAIT_S = 0.5


class Hanging(Blocks):
    """One sample waits in the kernel, in open(), until somebody writes to a pipe."""

    def __init__(self, folder: Path) -> None:
        super().__init__([100] * COUNT, folder / "reads")
        self.pipe = folder / "pipe"
        os.mkfifo(self.pipe)

    def get_bytes(self, index: int) -> bytes:
        if index == HANGS_AT:
            self.pipe.read_bytes()
        return super().get_bytes(index)

    def __getitem__(self, index: int) -> bytes:
        return self.get_bytes(index)

    def heal(self) -> None:
        """Let who waits go on, if anybody does, and whoever comes next."""
        end = os.open(self.pipe, os.O_RDWR)
        healed = self.pipe.with_name("healed")
        healed.touch()
        healed.replace(self.pipe)
        os.close(end)


def undisturbed(source: Hanging) -> list[list[bytes]]:
    """Return the batches of the epoch, made without the source."""
    contents = [source.content(index) for index in range(COUNT)]
    return list(loader_of(contents, num_workers=0, multiprocessing_context=None, collate_fn=list))


def test_the_log_says_once_which_sample_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "LONG_WAIT_S", LONG_WAIT_S)
    source = Hanging(tmp_path)
    said = re.compile(
        rf"loader_waits_long seconds=\d+: worker \d \(pid \d+\) is still reading sample {HANGS_AT}\b"
    )

    def heal_when_said() -> None:
        try:
            wait_until(lambda: said.search(caplog.text) is not None)
            time.sleep(4 * LONG_WAIT_S)  # it has time to say so again
        finally:
            source.heal()

    with caplog.at_level(logging.WARNING, "everstep"):
        iterator = iter(loader_of(source, collate_fn=list))
        healer = threading.Thread(target=heal_when_said)
        healer.start()
        assert list(iterator) == undisturbed(source), "nothing is lost by a long wait"
        healer.join()
    assert len(said.findall(caplog.text)) == 1


@pytest.mark.filterwarnings("ignore:iter.. goes on with epoch 0:UserWarning")
@pytest.mark.parametrize("prepared", [False, True])
def test_a_cached_source_that_hangs_is_named_at_the_timeout(tmp_path: Path, prepared: bool) -> None:
    """Workers and the process that trains are attached to the cache; none of them, nor the daemon, is held up."""
    source = Hanging(tmp_path)
    with daemon_process(Path(os.environ["EVERSTEP_SOCKET"])):
        dataset = CachedDataset[bytes](source, budget="4MB", prepared=prepared)
        loader = loader_of(dataset, timeout=TIMEOUT_S, collate_fn=list)
        seen = list[list[bytes]]()
        with pytest.raises(
            WorkerTimeoutError,
            match=rf"timed out after {TIMEOUT_S} seconds: worker \d \(pid \d+\) is still reading sample {HANGS_AT} ",
        ):
            seen.extend(loader)
        assert seen
        assert dataset[HANGS_AT - 1] == source.content(HANGS_AT - 1)
        assert dataset.flush(), "the daemon answers"
        source.heal()
        assert seen + list(loader) == undisturbed(source)
        dataset.close()
