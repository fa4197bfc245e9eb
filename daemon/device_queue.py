"""One submitter thread per device: transfers of all ranks of the node go through it, in the order they come."""

from concurrent.futures import Future, ThreadPoolExecutor

from ..checkpoint.engine import Engine, Transfer, TransferDone
from ..checkpoint.engine_choice import EngineChoice


class DeviceQueue:
    """An Engine that any thread may use: it hands each transfer to the device's own thread and waits."""

    def __init__(self, choice: EngineChoice) -> None:
        self.choice = choice
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="everstep-device")
        self._engine: Engine = self._thread.submit(choice.factory).result()

    @property
    def name(self) -> str:
        """Name of the engine behind."""
        return self._engine.name

    def run(self, transfer: Transfer) -> TransferDone:
        """Block until the transfer has had its turn and every byte has moved."""
        return self._thread.submit(self._engine.run, transfer).result()

    def forget(self, arena_fd: int) -> None:
        """Let go of an arena, after the transfers before it."""
        self.forgetting(arena_fd).result()

    def forgetting(self, arena_fd: int) -> Future[None]:
        """Begin to let go of an arena: done after the transfers before it, which may take seconds."""
        return self._thread.submit(self._engine.forget, arena_fd)

    def close(self) -> None:
        """Finish what is queued, release the engine and end the thread."""
        self._thread.submit(self._engine.close).result()
        self._thread.shutdown()
