"""The process's global random generators, as they are at a boundary."""

import random
import sys
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import torch

from ..checkpoint.value_format import dump_part
from ..core.errors import CorruptDataError
from .document import Document, read_document
from .object_tree import TreeDecoder, TreeEncoder
from .state_protocol import Laziness, Sink
from .stored_state import StoredState
from .tensor_bytes import copy_bytes

KIND = "rng"
NAME = "rng"


class RngState:
    """Component `rng`: Python's `random`, numpy's legacy generator, torch's CPU and CUDA generators.

    numpy's belongs to it once `numpy.random` is imported, CUDA's once CUDA is initialised; nothing is imported or
    initialised here. With another number of devices, or another current one, only the current device's generator
    is put back. `replicas` is 1: every rank has its own, and a restore at another world size must leave them out.
    """

    def __init__(self) -> None:
        """Know of no restored state."""
        self.name = NAME
        self._restored: list[tuple[str, object]] = []
        self._known: dict[str, tuple[object, msgspec.Raw]] = {}
        """States, and what was made of them: from a generator of which nobody draws nothing is made again."""
        self._tensors: dict[str, torch.Tensor] = {}
        """The leaves: each time the same memory, so that the addresses of all leaves stay as they were."""

    checks_bytes = True

    def capture(self, sink: Sink) -> None:
        """Hand over all states; draws nothing."""
        tree = TreeEncoder(sink)
        packed = pack_python(random.getstate())
        document: dict[str, object] = {"kind": KIND, "python": self._encoded(tree, "python", packed, packed)}
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            state: dict[str, Any] = numpy_random.get_state(legacy=False)
            document["numpy"] = self._encoded(tree, "numpy", state, _comparable(state))
        self._hand_over(sink, "rng.torch_cpu", torch.get_rng_state())
        if torch.cuda.is_initialized():
            for index, generator in enumerate(torch.cuda.default_generators):
                self._hand_over(sink, f"rng.torch_cuda.{index}", generator.get_state())
            document["cuda"] = {
                "count": len(torch.cuda.default_generators),
                "current": torch.cuda.current_device(),
            }
        sink.value(document)

    def _hand_over(self, sink: Sink, name: str, state: torch.Tensor) -> None:
        """An eager leaf is copied before the boundary is over: then its memory is free for the next state."""
        kept = self._tensors.setdefault(name, state)
        if kept.shape != state.shape:
            kept = self._tensors[name] = state
        copy_bytes(
            kept.data_ptr(), state.data_ptr(), state.nbytes
        )  # which may have been made in inference mode
        sink.leaf(name, kept, Laziness.EAGER)

    def _encoded(self, tree: TreeEncoder, what: str, state: object, comparable: object) -> object:
        """Return a state encoded; `comparable` tells it from others, None: nothing does."""
        known = self._known.get(what)
        if comparable is None or known is None or known[0] != comparable:
            known = self._known[what] = comparable, dump_part(tree.encode(state, f"rng.{what}"))
        return known[1]

    def check(self, stored: StoredState) -> None:
        """Return if the stored states can be read; CUDA's are left out where there is no CUDA now."""
        self._read(stored)

    def apply(self, stored: StoredState) -> None:
        """Put the states back, and keep them for `apply_again`."""
        self._restored = self._read(stored)
        self.apply_again()

    def apply_again(self) -> None:
        """Put back what `apply` put back last: whatever was drawn since is undone. Without one, do nothing.

        For the end of a restore, since objects may draw while they are loaded, and for the first batch after it:
        making any DataLoader iterator draws from torch's global generator.
        """
        for what, state in self._restored:
            _put(what, state)

    def _read(self, stored: StoredState) -> list[tuple[str, object]]:
        document = read_document(stored, self.name, KIND)
        decoder = TreeDecoder(stored)
        states: list[tuple[str, object]] = [
            ("python", unpack_python(decoder.decode(document.value("python")))),
            ("torch_cpu", stored.tensor("rng.torch_cpu")),
        ]
        if "numpy" in document:
            states.append(("numpy", decoder.decode(document.value("numpy"))))
        if "cuda" in document and torch.cuda.is_available():
            states += _cuda_states(stored, Document(self.name, document.value("cuda")))
        return states


@contextmanager
def generators_kept() -> Generator[None]:
    """Undo what the block draws from the generators of the processor."""
    numpy_random = sys.modules.get("numpy.random")
    before: list[tuple[str, object]] = [("python", random.getstate()), ("torch_cpu", torch.get_rng_state())]
    if numpy_random is not None:
        before.append(("numpy", numpy_random.get_state(legacy=False)))
    try:
        yield
    finally:
        for what, state in before:
            _put(what, state)


def _cuda_states(stored: StoredState, saved: Document) -> list[tuple[str, object]]:
    """Pairs of device index here and state, matched by index only on an equal machine."""
    count, current = saved.count("count"), saved.count("current")
    here = torch.cuda.current_device()
    pairs = [(here, current)]
    if (count, current) == (torch.cuda.device_count(), here):
        pairs = [(index, index) for index in range(count)]
    return [(f"torch_cuda.{to}", stored.tensor(f"rng.torch_cuda.{source}")) for to, source in pairs]


def _put(what: str, state: object) -> None:
    if what == "python":
        random.setstate(cast("tuple[Any, ...]", state))
    elif what == "numpy":
        import numpy as np  # noqa: PLC0415  # the checkpointed process had it

        np.random.set_state(cast("dict[str, Any]", state))  # the global generator is the point
    elif what == "torch_cpu":
        torch.set_rng_state(cast(torch.Tensor, state))
    else:
        index = int(what.removeprefix("torch_cuda."))
        torch.cuda.set_rng_state(cast(torch.Tensor, state), index)


def _comparable(state: dict[str, Any]) -> object:
    """Return what numpy's generator is known by, where it is what numpy makes: one that fits in the document."""
    if state["bit_generator"] != "MT19937":
        return None
    words = state["state"]
    return words["key"].tobytes(), words["pos"], state["has_gauss"], state["gauss"]


def pack_python(state: tuple[Any, ...]) -> list[object]:
    """Return `random.Random.getstate()` as a short list: its 625 words as bytes instead of numbers."""
    version, words, gauss = state
    return [version, array("I", cast("tuple[int, ...]", words)).tobytes(), gauss]


def unpack_python(packed: object) -> tuple[Any, ...]:
    """Return what `random.Random.setstate()` takes. Raises CorruptDataError for anything that is not packed so."""
    try:
        version, data, gauss = cast("list[Any]", packed)
        words = array("I")
        words.frombytes(data)
        state = (version, tuple(words), gauss)
        random.Random().setstate(state)
    except (TypeError, ValueError) as error:
        raise CorruptDataError(f"the stored state of Python's generator is malformed: {error}") from error
    return state
