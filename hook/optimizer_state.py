"""State of an optimizer, read and written by us: Optimizer.load_state_dict casts it to the parameter's dtype."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import torch

from ..checkpoint.value_format import dump_part
from ..core.errors import StateTypeError, UsageError
from .document import Document, class_name, mismatch, other_class, read_document
from .lazy_leaves import may_be_statistics
from .memory_ranges import RangeMap
from .module_state import ParameterRegistry
from .object_tree import TreeDecoder, TreeEncoder, leaf_names
from .state_protocol import Laziness, Sink, Watch
from .stored_state import StoredState, TensorMaker, has_memory_order, say_apart
from .structure_watch import StateWatch, is_plain_tensor
from .tensor_bytes import copy_bits, dtype_name, reach_of, require_plain

logger = logging.getLogger(__name__)

KIND = "optimizer"
BY_NUMBER = "by_number"
"""Of an import: its file had numbers, which were taken for a module's parameters in their order."""

_NOT_OPTIONS = ("params", "param_names")
"""Keys of a group that say which parameters it has: names in the document, not hyper-parameters."""

_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
"""Keys that schedulers add to a group."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    tensor: torch.Tensor
    replicas: int
    leaf: str
    """By which its value is stored."""
    is_held: bool = True
    """An attached module has it; else its value is saved with the optimizer's state."""


@dataclass(frozen=True, slots=True)
class _Former:
    """What a parameter was called at an earlier walk, as long as it lives."""

    name: str
    tensor: "weakref.ref[torch.Tensor]"


@dataclass(slots=True, kw_only=True)
class _Found:
    """What the last walk found besides the leaves."""

    groups: list[msgspec.Raw] = field(default_factory=list[msgspec.Raw])
    """Names of each group's parameters."""
    state: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])
    """By parameter: what its document says of its plain tensors."""
    plain: msgspec.Raw = field(default_factory=msgspec.Raw)
    """The same, encoded."""
    rest: list[tuple[_Parameter, dict[object, object]]] = field(
        default_factory=list[tuple[_Parameter, dict[object, object]]]
    )
    """Parameters with state that is no plain tensor."""
    shared: list[object] = field(default_factory=list[object])
    """Keys of the state that are no parameters."""
    own: list[str] = field(default_factory=list[str])
    """Parameters that no attached module has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Restoring:
    """What is needed to put one optimizer's state back."""

    stored: StoredState
    maker: TensorMaker
    steps_on_device: dict[int, bool] = field(default_factory=dict[int, bool])
    """Of parameters whose group says so: whether `step` lies with them."""
    known: RangeMap[_Parameter]
    """Parameters that have their values, by their memory: state that was that when it was saved is it again."""
    written: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])
    """What was written into a tensor that stays, by its address."""

    def may_write(self, leaf: str, present: torch.Tensor) -> bool:
        """Tell whether a leaf may go into a tensor that stays: not where one that was another at the checkpoint has
        been written there, as with a default of the optimizer that all of its groups have; nor over a weight.
        """
        touched = self.known.touching(_memory_of(present))
        if not all(self._lay_alike(leaf, present, each) for each in touched):
            return False
        holder = self.stored.holder_of(leaf)
        return not present.numel() or self.written.setdefault(present.data_ptr(), holder) == holder

    def _lay_alike(self, leaf: str, present: torch.Tensor, weight: _Parameter) -> bool:
        """Tell whether state and a weight had the same bytes in common when they were saved as they have here: then
        to write the one writes into the other what it has.
        """
        tensors = {leaf: present, weight.leaf: weight.tensor}
        places = {name: self.stored.holder_of(name) for name in tensors}
        begins = {(places[name][0], places[name][1] - each.data_ptr()) for name, each in tensors.items()}
        specs = {name: self.stored.spec(name) for name in tensors}
        as_stored = all(has_memory_order(each, specs[name]) for name, each in tensors.items())
        in_one_order = (
            present.stride() == weight.tensor.stride() and specs[leaf].strides == specs[weight.leaf].strides
        )
        return len(begins) == 1 and (as_stored or in_one_order)

    def share(self, leaf: str, present: torch.Tensor) -> None:
        """Let what shared a leaf's memory lie on the tensor that stays and has been written; said where a weight, or
        state that was written before, had it too and stays elsewhere.
        """
        if not self.maker.share(leaf, present):
            say_apart(leaf)

    def is_in_place(self, parameter: _Parameter, key: str, present: torch.Tensor) -> bool:
        """Tell whether a tensor that stays lies where the group says: it may have said otherwise when it was made."""
        with_parameter = self.steps_on_device.get(id(parameter.tensor)) if key == "step" else None
        return with_parameter is None or present.device == (
            parameter.tensor.device if with_parameter else _CPU
        )

    def device(self, parameter: _Parameter, key: str, host: Sequence[str] | None) -> torch.device:
        """Where a new state tensor goes: with its parameter, but for what lay on the CPU beside one that did not.

        `step` goes where the group says (`capturable`, `fused`); where nobody knows, to the CPU as torch's does.
        `host`: what lay on the CPU; None where all did, or nobody has written it down.
        """
        is_on_host = key == "step" if host is None else key in host
        if key == "step":
            is_on_host = not self.steps_on_device.get(id(parameter.tensor), not is_on_host)
        return _CPU if is_on_host else parameter.tensor.device


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    address = tensor.data_ptr()
    return address, address + reach_of(tensor) * tensor.element_size()


class OptimizerState:
    """Component of a torch optimizer: per-parameter state by parameter name, and the groups' hyper-parameters.

    Leaves are `<optimizer>.state.<FQN>.<key>`, OWNED. The FQN is the parameter's path in an attached module, with
    the module's keyword before it only where the optimizer's parameters come from several; a parameter that no
    attached module has (fp32 master weights, a head of its own) goes by its group's `param_names`, and is a leaf
    `<optimizer>.params.<name>` itself. Tensors among the hyper-parameters are EAGER: a scheduler may write them at any
    time.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, registry: ParameterRegistry) -> None:
        """Register the optimizer.

        Raises:
            StateTypeError: its state is spread over ranks in a way that cannot be saved yet.
        """
        self.name = name
        self._optimizer = optimizer
        self._registry = registry
        self._found = _Found()
        self._former: dict[int, _Former] = {}
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            raise StateTypeError(
                f"{name} is a ZeroRedundancyOptimizer, whose state is sharded by whole parameters",
                hint="use the plain optimizer under DistributedDataParallel",
            )
        registry.optimizers.append(optimizer)

    checks_bytes = False

    def capture(self, sink: Sink) -> None:
        """Hand over the state of every parameter and every group."""
        self.walk(sink)
        self.rest(sink)

    def walk(self, sink: Sink) -> Sequence[Watch]:
        """Hand over the tensors of each parameter's own state."""
        names = self._names()
        found = self._found = _Found(
            groups=[
                dump_part([names.of(parameter).name for parameter in _parameters(group)])
                for group in self._groups
            ]
        )
        for parameter in names.held_by_nobody():
            lazy = Laziness.EAGER if may_be_statistics(parameter.tensor) else Laziness.OWNED
            sink.leaf(parameter.leaf, parameter.tensor, lazy)
            found.own.append(parameter.name)
        for key, state in cast(dict[object, object], self._optimizer.state).items():
            if not isinstance(key, torch.Tensor):
                found.shared.append(key)
                continue
            parameter = names.of_state(key)
            if parameter is None:
                continue
            if not isinstance(state, dict):
                raise StateTypeError(
                    f"{self.name}.state.{parameter.name} is a {type(state).__qualname__}, which cannot be saved",
                    hint="an optimizer keeps one dict per parameter in `state`",
                )
            self._hand_over(sink, found, parameter, cast(dict[object, object], state))
        found.plain = dump_part(found.state)
        return StateWatch(self._optimizer), self._registry.watch_groups()

    def _hand_over(
        self, sink: Sink, found: "_Found", parameter: _Parameter, state: dict[object, object]
    ) -> None:
        """Plain tensors under string keys alone, since their leaves are named after them."""
        tensors: list[str] = []
        host: list[str] = []
        for key, value in state.items():
            if _is_leaf(key, value):
                leaf, tensor = f"{self.name}.state.{parameter.name}.{key}", cast(torch.Tensor, value)
                sink.leaf(leaf, tensor, Laziness.OWNED, replicas=parameter.replicas)
                tensors.append(cast(str, key))
                if tensor.device.type == "cpu" and parameter.tensor.device.type != "cpu":
                    host.append(cast(str, key))
        is_on_host = parameter.tensor.device.type == "cpu"
        found.state[parameter.name] = (
            {"tensors": tensors} if is_on_host else {"tensors": tensors, "host": host}
        )
        if len(tensors) < len(state):
            found.rest.append((parameter, state))

    def rest(self, sink: Sink) -> None:
        """Hand over everything else in the state, and the groups' hyper-parameters."""
        found = self._found
        state = dict(found.state) if found.rest else {}
        for parameter, own in found.rest:
            others = {key: value for key, value in own.items() if not _is_leaf(key, value)}
            tree = TreeEncoder(sink, laziness=Laziness.OWNED, replicas=parameter.replicas)
            encoded = tree.encode(others, f"{self.name}.state.{parameter.name}")
            state[parameter.name] = found.state[parameter.name] | {"rest": encoded}
        tree, path = TreeEncoder(sink, laziness=Laziness.OWNED), f"{self.name}.shared"
        held = cast(dict[object, object], self._optimizer.state)
        shared = [
            [tree.encode(key, path), tree.encode(held[key], f"{path}[{key!r}]")] for key in found.shared
        ]
        groups = [
            {"params": names, "options": self._options(sink, index)}
            for index, names in enumerate(found.groups)
        ]
        document = {"kind": KIND, "groups": groups, "state": state if found.rest else found.plain}
        sink.value(document | {"class": class_name(self._optimizer), "shared": shared, "own": found.own})

    def _options(self, sink: Sink, index: int) -> object:
        group = self._groups[index]
        options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        return TreeEncoder(sink).encode(options, f"{self.name}.groups[{index}]")

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def check(self, stored: StoredState) -> None:
        """Return if the groups have the same parameters and every stored state belongs to one."""
        document = read_document(stored, self.name, KIND)
        if problems := other_class(document, self._optimizer):
            raise mismatch(self.name, problems)
        names = self._names()
        groups = [Document(self.name, group) for group in document.items("groups")]
        if len(groups) != len(self._optimizer.param_groups):
            raise mismatch(
                self.name,
                [
                    f"{len(groups)} parameter groups in the checkpoint, {len(self._optimizer.param_groups)} here"
                ],
            )
        problems: list[str] = []
        for index, (group, here) in enumerate(zip(groups, self._optimizer.param_groups, strict=True)):
            found = [names.of(parameter).name for parameter in _parameters(here)]
            saved = group.texts("params")
            problems += _group_differences(index, saved, found, self._depends_on_order())
            if BY_NUMBER in document and saved != found and not problems:
                problems.append(
                    f"group {index} was imported by number, in the module's order, and has another one here: save with"
                    " an optimizer of named_parameters(), or import --without it"
                )
            problems += self._other_kind(index, group.value("options"), here)
        if problems:
            raise mismatch(self.name, problems)
        for name, state in document.mapping("state").items():
            if names.find(name) is None:
                raise mismatch(self.name, [f"the checkpoint has state of {name}, which is no parameter here"])
            for key in Document(self.name, state).texts("tensors"):
                stored.spec(f"{self.name}.state.{name}.{key}")
        problems += self._other_weights(stored, document, names)
        if problems:
            raise mismatch(self.name, problems)
        for leaf in leaf_names([document.items("groups"), document.value("state"), document.items("shared")]):
            stored.spec(leaf)

    def _other_weights(self, stored: StoredState, document: Document, names: "_Names") -> list[str]:
        """Return what keeps weights that only the optimizer has from those of the checkpoint."""
        if "own" not in document:
            return []
        own = {parameter.name: parameter for parameter in names.held_by_nobody()}
        saved = document.texts("own")
        problems = [
            f"{name} was the optimizer's alone, and an attached module has it here"
            for name in saved
            if name not in own
        ]
        for name, parameter in own.items():
            leaf = parameter.leaf
            require_plain(parameter.tensor, leaf)
            if name not in saved:
                problems.append(f"{name} was an attached module's, and is the optimizer's alone here")
            elif not stored.fits(leaf, parameter.tensor):
                spec = stored.spec(leaf)
                look = f"{dtype_name(parameter.tensor.dtype)} {list(parameter.tensor.shape)}"
                problems.append(f"{name} is {spec.dtype} {list(spec.shape)} in the checkpoint, {look} here")
        return problems

    def _other_kind(self, index: int, saved: object, here: Mapping[str, object]) -> list[str]:
        """Return what shows that another class saved a group: options that this one has not, and those that it needs.

        One of both alone is another version of torch, or a scheduler's.
        """
        if not isinstance(saved, dict) or not self._optimizer.defaults:
            return []
        options = set(cast("dict[str, object]", saved))
        foreign = sorted(options - here.keys() - self._optimizer.defaults.keys() - _OF_SCHEDULERS)
        missing = sorted(self._optimizer.defaults.keys() - options)
        if not foreign or not missing:
            return []
        kind = type(self._optimizer).__name__
        saved_with, here_with = ", ".join(foreign), ", ".join(missing)
        text = f"group {index} in the checkpoint is of an optimizer with {saved_with}, and here of a {kind}"
        return [f"{text} with {here_with}: build the one that was saved"]

    def _depends_on_order(self) -> bool:
        """LBFGS keeps one flat vector over all parameters in their order."""
        return isinstance(self._optimizer, torch.optim.LBFGS)

    def apply(self, stored: StoredState) -> None:
        """Put back state and hyper-parameters; what the checkpoint has no state of loses its own.

        A hyper-parameter that the checkpoint does not know (of a newer torch) keeps its value.
        """
        document = read_document(stored, self.name, KIND)
        names = self._names()
        own = names.held_by_nobody()
        if "own" in document:
            for parameter in own:
                stored.copy_to(parameter.leaf, parameter.tensor)
        elif own:
            logger.warning(
                "weights_left_as_given optimizer=%s weights=%s: no attached module has them, and the checkpoint, which"
                " was imported or is of an older version, neither",
                self.name,
                ",".join(parameter.name for parameter in own),
            )
        known = [parameter for parameter in names.all() if parameter.leaf in stored]
        places = RangeMap((_memory_of(parameter.tensor), parameter) for parameter in known)
        restoring = _Restoring(stored=stored, maker=TensorMaker(stored), known=places)
        for parameter in known:
            restoring.maker.share(parameter.leaf, parameter.tensor)
        for group, saved in zip(self._optimizer.param_groups, document.items("groups"), strict=True):
            self._put_options(restoring, group, Document(self.name, saved).value("options"))
        restoring.steps_on_device.update(
            self._steps_on_device()
        )  # as the options say that were just put back
        states = document.mapping("state")
        held = cast("dict[object, object]", self._optimizer.state)
        for key in list(held):
            parameter = names.of_state(key) if isinstance(key, torch.Tensor) else None
            if parameter is None or parameter.name not in states:
                del held[key]
        for name, saved in states.items():
            parameter = names.find(name)
            assert parameter is not None  # checked
            state = cast(dict[object, object], held.get(parameter.tensor) or {})
            held[parameter.tensor] = state
            self._put_state(restoring, parameter, state, Document(self.name, saved))
        decoder = TreeDecoder(stored, maker=restoring.maker)
        for pair in document.items("shared"):
            key, value = cast(list[object], pair)
            held[decoder.decode(key)] = decoder.decode(value)

    @staticmethod
    def _put_options(restoring: _Restoring, group: dict[str, Any], saved: object) -> None:
        device = next((parameter.device for parameter in _parameters(group)), None)
        decoder = TreeDecoder(restoring.stored, device=device, maker=restoring.maker)
        options = cast(dict[str, object], decoder.decode(saved))
        for key, value in options.items():
            present: object = group.get(key)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(present, torch.Tensor)
                and _alike(present, value)
            ):
                leaves = leaf_names([cast(dict[str, object], saved)[key]])
                if all(restoring.may_write(leaf, present) for leaf in leaves):
                    copy_bits(value, to=present)
                    for leaf in leaves:
                        restoring.share(leaf, present)
                    continue
            group[key] = value

    def _put_state(
        self, restoring: _Restoring, parameter: _Parameter, state: dict[object, object], saved: Document
    ) -> None:
        stored, prefix = restoring.stored, f"{self.name}.state.{parameter.name}"
        made: dict[object, object] = {}
        host = saved.texts("host") if "host" in saved else None
        for key in saved.texts("tensors"):
            leaf = f"{prefix}.{key}"
            present = state.get(key)
            if (
                isinstance(present, torch.Tensor)
                and stored.fits(leaf, present)
                and restoring.is_in_place(parameter, key, present)
                and restoring.may_write(leaf, present)
            ):
                stored.copy_to(leaf, present)
                restoring.share(leaf, present)
                made[key] = present
            else:
                made[key] = restoring.maker.make(leaf, restoring.device(parameter, key, host))
        if "rest" in saved:
            decoder = TreeDecoder(stored, device=parameter.tensor.device, maker=restoring.maker)
            made |= cast(dict[object, object], decoder.decode(saved.value("rest")))
        state.clear()
        state.update(made)

    def _steps_on_device(self) -> dict[int, bool]:
        """Return whether the `step` of a parameter lies with it, by id, where its group says so."""
        return {
            id(parameter): bool(group.get("capturable") or group.get("fused"))
            for group in self._groups
            if "capturable" in group or "fused" in group
            for parameter in _parameters(group)
        }

    def _names(self) -> "_Names":
        names = _Names(self.name, self._optimizer, self._registry, self._former)
        self._former = names.remembered()
        return names


class _Names:
    """The names of an optimizer's parameters at this moment, and of those it still has state of."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        registry: ParameterRegistry,
        former: "Mapping[int, _Former]",
    ) -> None:
        self._optimizer_name = name
        self._former = former
        self._registry = registry
        for module in registry.modules:
            if module not in registry.named:
                registry.refresh(module)
        placed = [
            (parameter, group, position)
            for group, found in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(_parameters(found))
        ]
        self._only = self._module_of_all([parameter for parameter, _, _ in placed])
        self._by_id: dict[int, _Parameter] = {}
        self._by_name: dict[str, _Parameter] = {}
        for parameter, group, position in placed:
            names = cast(list[str], optimizer.param_groups[group].get("param_names") or [])
            own = names[position] if position < len(names) else None
            self._add(parameter, own, f"parameter {position} of group {group}")
        for key in cast(dict[object, object], optimizer.state):
            if isinstance(key, torch.Tensor) and id(key) not in self._by_id:
                self._add_left(key)

    def remembered(self) -> "dict[int, _Former]":
        """Return what the parameters are called, and were before, by id."""
        now = {key: _Former(each.name, weakref.ref(each.tensor)) for key, each in self._by_id.items()}
        return {key: each for key, each in self._former.items() if each.tensor() is not None} | now

    def of(self, tensor: torch.Tensor) -> _Parameter:
        """Return the parameter that a tensor of the groups is."""
        return self._by_id[id(tensor)]

    def of_state(self, tensor: torch.Tensor) -> _Parameter | None:
        """Return the parameter that a key of the state is; None for what a replaced layer has left there."""
        return self._by_id.get(id(tensor))

    def all(self) -> list[_Parameter]:
        """Return the parameters of the groups, and those in no group that have state."""
        return [*self._by_id.values()]

    def held_by_nobody(self) -> list[_Parameter]:
        """Return the parameters that no attached module has."""
        return [parameter for parameter in self._by_id.values() if not parameter.is_held]

    def find(self, name: str) -> _Parameter | None:
        """Return the parameter of that name, also one that is in no group: state may be kept for it."""
        if name not in self._by_name:
            for named in self._registry.parameters(self._only):
                parameter = self._named(named.tensor)
                if parameter is not None:
                    self._by_name.setdefault(parameter.name, parameter)
        return self._by_name.get(name)

    def _module_of_all(self, parameters: list[torch.Tensor]) -> str | None:
        """The first attached module that has every parameter of the optimizer."""
        for module in self._registry.modules:
            if all(self._registry.find(module, parameter) for parameter in parameters):
                return module
        return None

    def _add(self, tensor: torch.Tensor, own_name: str | None, what: str) -> None:
        parameter = self._named(tensor)
        if parameter is None and own_name is not None:
            leaf = f"{self._optimizer_name}.params.{own_name}"
            parameter = _Parameter(own_name, tensor, 1, leaf, is_held=False)
        if parameter is None:
            raise self._nobodys(tensor, what)
        if id(tensor) in self._by_id:
            return  # twice in the groups, as a tied weight may be: torch warns of it
        self._put(parameter)

    def _add_left(self, tensor: torch.Tensor) -> None:
        """Know a tensor that has state and is in no group: a module's, or of a replaced layer, whom no step asks."""
        if (parameter := self._named(tensor)) is not None:
            self._put(parameter)
        elif not self._former_name(tensor):
            raise self._nobodys(tensor, "a tensor that is in no group but has state", is_state=True)

    def _former_name(self, tensor: torch.Tensor) -> str:
        former = self._former.get(id(tensor))
        return former.name if former is not None and former.tensor() is tensor else ""

    def _nobodys(self, tensor: torch.Tensor, what: str, *, is_state: bool = False) -> UsageError:
        text = f"{self._optimizer_name} has {what} (shape {list(tensor.shape)}), which"
        if former := self._former_name(tensor):
            return UsageError(
                f"{text} was {former!r} and is in no attached module any more",
                hint="where a layer is replaced, build the optimizer anew from what the model has, and attach() again",
            )
        otherwise = (
            f"delete its entry of {self._optimizer_name}.state"
            if is_state
            else "build the optimizer from named_parameters()"
        )
        return UsageError(
            f"{text} no attached module has", hint=f"attach the module that owns it, or {otherwise}"
        )

    def _put(self, parameter: _Parameter) -> None:
        if parameter.name in self._by_name:
            raise UsageError(
                f"{self._optimizer_name} has two parameters named {parameter.name!r}",
                hint="attach the modules that own them",
            )
        self._by_id[id(parameter.tensor)] = parameter
        self._by_name[parameter.name] = parameter

    def _named(self, tensor: torch.Tensor) -> _Parameter | None:
        for module in (self._only,) if self._only is not None else self._registry.modules:
            named = self._registry.find(module, tensor)
            if named is not None:
                leaf = f"{module}.{named.fqn}"
                return _Parameter(named.fqn if self._only is not None else leaf, tensor, named.replicas, leaf)
        return None


def _is_leaf(key: object, value: object) -> bool:
    return type(key) is str and is_plain_tensor(value)


def _parameters(group: dict[str, Any]) -> list[torch.Tensor]:
    return cast(list[torch.Tensor], group["params"])


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _group_differences(index: int, stored: list[str], here: list[str], ordered: bool) -> list[str]:
    stored_set, here_set = set(stored), set(here)
    lost = [f"group {index} has {name} in the checkpoint only" for name in stored if name not in here_set]
    new = [f"group {index} has {name} here only" for name in here if name not in stored_set]
    if not lost and not new and ordered and stored != here:
        return [f"group {index} has its parameters in another order"]
    return lost + new
