"""State of everything that is neither a module nor an optimizer: what state_dict() gives, and generators."""

import logging
import random
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch.amp.grad_scaler import GradScaler

from ..core.errors import EverstepError, LoaderStateError, StateTypeError
from ..dataloader.ledger import Ledger
from ..dataloader.loader import DataLoader
from ..dataloader.state_format import parse_state
from .document import Document, class_name, mismatch, other_class, read_document
from .loaders import LOADERS, AnyLoader
from .object_tree import TreeDecoder, TreeEncoder, leaf_names, numpy_module
from .plain_errors import read_named
from .rng_state import pack_python, unpack_python
from .state_protocol import Component, Laziness, Sink
from .stored_state import StoredState

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """What most objects of a training loop offer: schedulers, samplers, metrics, user objects."""

    def state_dict(self) -> object:
        """Return the object's state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:  # the object's own type
        """Take a state that `state_dict` returned."""
        ...


class ObjectState:
    """Component of an object by two functions: one reads its state as a tree of values, one puts it back.

    All its tensors are EAGER. `load` gets new, plain tensors on the device type that they were on; those of which one
    lies within another without holes share memory again.
    `kind` is compared at restore, then `check` may look at the state.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        read: Callable[[], object],
        load: Callable[[Any], object],
        check: Callable[[Any], object] | None = None,
        *,
        of: object = None,
    ) -> None:
        """Keep the functions; nothing is read yet. `of`: the object, whose class the checkpoint names."""
        self.name = name
        self._kind = kind
        self._read = read
        self._load = load
        self._check = check
        self._of = of
        self.checks_bytes = check is not None

    def capture(self, sink: Sink) -> None:
        """Hand over the state as the object gives it now."""
        read = read_named(self._read, f"state_dict() of {self.name!r}")
        state = TreeEncoder(sink).encode(read, self.name)
        known = {} if self._of is None else {"class": class_name(self._of)}
        sink.value({"kind": self._kind, **known, "state": state})

    def check(self, stored: StoredState) -> None:
        """Return if the stored state is of the same kind and whole; whether an object takes it only it knows."""
        document = read_document(stored, self.name, self._kind)
        if problems := other_class(document, self._of):
            raise mismatch(self.name, problems)
        for leaf in leaf_names(document.value("state")):
            stored.spec(leaf)
        if self._check is not None:
            self._check(TreeDecoder(stored).decode(document.value("state")))

    def apply(self, stored: StoredState) -> None:
        """Make the state again and give it to the object.

        Raises:
            StateMismatchError: the object does not take it, and raised something of its own.
        """
        document = read_document(stored, self.name, self._kind)
        state = TreeDecoder(stored).decode(document.value("state"))
        try:
            self._load(state)
        except EverstepError:
            raise
        except Exception as error:
            said = f"its load_state_dict() raised {type(error).__name__}: {error}"
            raise mismatch(self.name, [said]) from error


class ScalerState:
    """Component of a GradScaler. Its state_dict() would wait for the GPU: scale and growth are read as tensors."""

    kind = "scaler"
    checks_bytes = True

    def __init__(self, name: str, scaler: GradScaler) -> None:
        """Keep the scaler."""
        self.name = name
        self._scaler = scaler

    def capture(self, sink: Sink) -> None:
        """Hand over the two tensors, or the numbers before the first scaled loss made tensors of them."""
        scaler, own = self._scaler, vars(self._scaler)
        numbers: dict[str, object] = {}
        if scaler.is_enabled():
            numbers = {
                "growth_factor": scaler.get_growth_factor(),
                "backoff_factor": scaler.get_backoff_factor(),
                "growth_interval": scaler.get_growth_interval(),
                "scale": own["_init_scale"],  # what get_scale() returns until there is a tensor
                "_growth_tracker": own["_init_growth_tracker"],
            }
        tensors = self._tensors()
        for key, tensor in tensors.items():
            numbers.pop(key)
            sink.leaf(f"{self.name}.{key}", tensor, Laziness.EAGER)
        encoded = TreeEncoder(sink).encode(numbers, self.name)
        sink.value({"kind": self.kind, "numbers": encoded, "tensors": list(tensors)})

    def _tensors(self) -> dict[str, torch.Tensor]:
        own = vars(self._scaler)
        found = {"scale": own.get("_scale"), "_growth_tracker": own.get("_growth_tracker")}
        return {key: tensor for key, tensor in found.items() if isinstance(tensor, torch.Tensor)}

    def check(self, stored: StoredState) -> None:
        """Return if both scalers are enabled or both are not."""
        state = self._state(stored)
        if bool(state) != self._scaler.is_enabled():
            raise mismatch(
                self.name, [f"it is {'disabled' if state else 'enabled'} here, not in the checkpoint"]
            )

    def apply(self, stored: StoredState) -> None:
        """Give the scaler what its own state_dict() would have held."""
        self._scaler.load_state_dict(self._state(stored))

    def _state(self, stored: StoredState) -> dict[str, Any]:
        document = read_document(stored, self.name, self.kind)
        state = cast(dict[str, Any], TreeDecoder(stored).decode(document.mapping("numbers")))
        for key in document.texts("tensors"):
            state[key] = stored.tensor(f"{self.name}.{key}").item()
        return state


def loader_state(name: str, loader: AnyLoader) -> Component:
    """Return the component of a loader of everstep's own: its position and its ledger of samples.

    The document's key `ledger` is what a merge of ranks and the proof of exactly-once look for.
    """

    told: list[str] = []

    def read() -> object:
        if not told and isinstance(loader, DataLoader) and not loader.is_resumable:
            told.append(name)
            logger.warning(
                "loader_not_resumable name=%s: its dataset does not say where it stands, so that with it no checkpoint "
                "in the middle of an epoch can be restored: give the dataset state_dict() and load_state_dict(), or "
                "attach all but this loader, whose epoch begins anew then",
                name,
            )
        return {"loader": loader.state_dict(), "ledger": loader.ledger.state()}

    def check(state: object) -> None:
        loader.check_unmoved()
        parts = Document(name, state)
        Ledger.from_state(parts.value("ledger"))
        saved, here = parse_state(parts.value("loader")), parse_state(loader.state_dict())
        if (saved.fingerprint, saved.sample_count) != (here.fingerprint, here.sample_count):
            raise LoaderStateError(
                f"the checkpoint has a position in dataset {saved.fingerprint!r} of {saved.sample_count} samples,"
                f" {name!r} has {here.fingerprint!r} of {here.sample_count}",
                hint="give the dataset that the checkpoint was made with",
            )
        loader.check_state(parts.value("loader"))

    def load(state: dict[str, Any]) -> None:
        loader.load_state_dict(state["loader"])
        loader.ledger = Ledger.from_state(state["ledger"])

    return ObjectState(name, "loader", read, load, check)


def object_component(name: str, value: object) -> Component:
    """Return the component of an object that is neither a module nor an optimizer.

    Raises:
        StateTypeError: it has no state that could be saved; the hint says what to do.
    """
    if isinstance(value, LOADERS):
        return loader_state(name, cast(AnyLoader, value))
    if isinstance(value, GradScaler) and _says_what_torch_does(value):
        return ScalerState(name, value)
    made = _torch_generator(name, value) or _python_generator(name, value) or _numpy_generator(name, value)
    if made is not None:
        return made
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        stateful = cast(Stateful, value)
        return ObjectState(name, "object", stateful.state_dict, stateful.load_state_dict, of=value)
    raise StateTypeError(f"{name} is a {class_name(value)}, which cannot be saved", hint=_hint(name, value))


def _says_what_torch_does(scaler: GradScaler) -> bool:
    """Tell whether a scaler's class adds nothing to what torch's says of itself."""
    names = ("state_dict", "load_state_dict")
    return all(getattr(type(scaler), name) is getattr(GradScaler, name) for name in names)


def _torch_generator(name: str, value: object) -> Component | None:
    if not isinstance(value, torch.Generator):
        return None
    return ObjectState(name, f"torch.Generator on {value.device.type}", value.get_state, value.set_state)


def _python_generator(name: str, value: object) -> Component | None:
    if not isinstance(value, random.Random) or isinstance(value, random.SystemRandom):
        return None
    if type(value).getstate is not random.Random.getstate:
        return None  # what that returns only the class knows
    return ObjectState(
        name,
        "random.Random",
        lambda: pack_python(value.getstate()),
        lambda state: value.setstate(unpack_python(state)),
    )


def _numpy_generator(name: str, value: object) -> Component | None:
    numpy = numpy_module()
    if numpy is None or "numpy.random" not in sys.modules:
        return None
    if isinstance(value, numpy.random.Generator):
        bits: Any = cast(Any, value).bit_generator
        kind = f"numpy.random.{type(bits).__name__}"
        return ObjectState(name, kind, lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, numpy.random.RandomState):
        legacy = cast(Any, value)
        return ObjectState(
            name, "numpy.random.RandomState", lambda: legacy.get_state(legacy=False), legacy.set_state
        )
    return None


def _hint(name: str, value: object) -> str:
    if isinstance(value, random.Random):
        return "its state is not that of random.Random: give its class state_dict() and load_state_dict()"
    if value is None:
        return "leave it out of attach() where there is none"
    if isinstance(value, torch.utils.data.DataLoader):
        return "use everstep.dataloader.DataLoader, which knows its position, or leave it out"
    if isinstance(value, torch.Tensor):
        return "register it as a buffer of a module, or keep it in an object with state_dict/load_state_dict"
    if isinstance(value, list | tuple | dict):
        return "give each object its own keyword"
    if isinstance(value, int | float):
        return (
            f"run.log({name}={value!r}) makes it part of each checkpoint, run.history({name!r}) gives it back; or keep"
            " it in an object with state_dict() and load_state_dict()"
        )
    if isinstance(value, str | bytes):
        return "keep it in an object with state_dict() and load_state_dict(), which may hold it in a dict"
    return "give its class state_dict() and load_state_dict(), with numbers, strings, lists and tensors"
