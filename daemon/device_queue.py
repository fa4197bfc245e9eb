"""The transfers of one device: those of all ranks of the node go through it, in the order they come."""

from concurrent.futures import Future, ThreadPoolExecutor

from ..checkpoint.engine import Engine, Transfer, TransferDone
from ..checkpoint.engine_choice import EngineChoice
from ..checkpoint.engine_lanes import LANE_COUNT, LanedEngine


class DeviceQueue:
    """An Engine that any thread may use: it hands each transfer to the device's own threads and waits."""

    def __init__(self, choice: EngineChoice) -> None:
        self.choice = choice
        self._threads = ThreadPoolExecutor(LANE_COUNT, thread_name_prefix="everstep-device")
        self._engine: Engine = LanedEngine(choice.factory)

    @property
    def name(self) -> str:
        """Name of the engine behind."""
        return self._engine.name

    def run(self, transfer: Transfer) -> TransferDone:
        """Block until the transfer has had its turn and every byte has moved."""
        return self._threads.submit(self._engine.run, transfer).result()

    def forget(self, arena_fd: int) -> None:
        """Let go of an arena, after the transfers before it."""
        self.forgetting(arena_fd).result()

    def forgetting(self, arena_fd: int) -> Future[None]:
        """Begin to let go of an arena: done after the transfers before it, which may take seconds."""
        return self._threads.submit(self._engine.forget, arena_fd)

    def close(self) -> None:
        """Finish what is queued, release the engines and end the threads."""
        self._threads.submit(self._engine.close).result()
        self._threads.shutdown()
