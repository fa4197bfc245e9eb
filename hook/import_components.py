"""From what others saved to components of a training state, as `attach` would have captured them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
import torch

from ..core.converter import Converter
from ..core.errors import CorruptDataError, StateTypeError, UsageError
from .history import NAME as HISTORY_NAME
from .module_state import KIND as MODULE_KIND
from .object_tree import TreeEncoder
from .optimizer_state import BY_NUMBER
from .optimizer_state import KIND as OPTIMIZER_KIND
from .rng_state import NAME as RNG_NAME
from .run_state import RUN_COMPONENT, RunState
from .state_protocol import Captured, Laziness, Sink
from .tensor_bytes import torch_dtype

STEP = "step"
EXTRA_STATE = "_extra_state"
SUFFIXES = ("_state_dict", "_state", "_dict")
"""Scripts name what they save `model_state_dict`; `attach` calls it `model`."""

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""What torch's own normalisations keep beside their parameters: in state_dict(), and in no optimizer."""
_LOADER_KEYS = {"loader", "ledger"}
_SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ImportedModule:
    """A state dict of a module."""

    name: str
    tensors: Tensors
    extra: dict[str, object]

    def capture(self, sink: Sink) -> None:
        """Hand over what ModuleState would."""
        plain = [fqn for fqn, tensor in self.tensors.items() if tensor.layout is torch.strided]
        for fqn in plain:
            sink.leaf(f"{self.name}.{fqn}", self.tensors[fqn], Laziness.EAGER)
        tree = TreeEncoder(sink)
        sparse = {
            fqn: tree.encode(tensor, f"{self.name}.{fqn}")
            for fqn, tensor in self.tensors.items()
            if fqn not in plain
        }
        extra = {
            key.removesuffix(EXTRA_STATE): tree.encode(value, f"{self.name}.{key}")
            for key, value in self.extra.items()
        }
        sink.value({"kind": MODULE_KIND, "tensors": plain, "caches": [], "sparse": sparse, "extra": extra})


@dataclass(frozen=True, slots=True)
class ImportedOptimizer:
    """A state dict of an optimizer, its parameters by name."""

    name: str
    groups: list[tuple[list[str], dict[object, object]]]
    """Names and hyper-parameters of each group."""
    state: dict[str, dict[object, object]]
    by_number: bool
    """The file had numbers, which were taken for the module's parameters in their order."""

    def capture(self, sink: Sink) -> None:
        """Hand over what OptimizerState would."""
        tree = TreeEncoder(sink)
        groups = [
            {"params": names, "options": tree.encode(options, f"{self.name}.groups[{index}]")}
            for index, (names, options) in enumerate(self.groups)
        ]
        state = {name: self._state(sink, name, found) for name, found in self.state.items()}
        document = {"kind": OPTIMIZER_KIND, "groups": groups, "state": state, "shared": []}
        sink.value(document | ({BY_NUMBER: True} if self.by_number else {}))

    def _state(self, sink: Sink, parameter: str, found: dict[object, object]) -> object:
        prefix = f"{self.name}.state.{parameter}"
        tensors: list[str] = []
        rest: dict[object, object] = {}
        for key, value in found.items():
            if type(key) is str and isinstance(value, torch.Tensor) and value.layout is torch.strided:
                sink.leaf(f"{prefix}.{key}", value, Laziness.EAGER)
                tensors.append(key)
            else:
                rest[key] = value
        document: dict[str, object] = {"tensors": tensors}
        return document | ({"rest": TreeEncoder(sink).encode(rest, prefix)} if rest else {})


@dataclass(frozen=True, slots=True)
class ImportedObject:
    """The state of anything else."""

    name: str
    value: object

    def capture(self, sink: Sink) -> None:
        """Hand over what the component of such an object would."""
        encoded = TreeEncoder(sink).encode(self.value, self.name)
        if isinstance(self.value, dict) and cast(dict[object, object], self.value).keys() == _SCALER_KEYS:
            sink.value({"kind": "scaler", "numbers": encoded, "tensors": []})
            return
        sink.value({"kind": _kind_of(cast(object, self.value)), "state": encoded})


def _kind_of(value: object) -> str:
    """Return the kind of object that has such a state (object_state.py)."""
    if isinstance(value, torch.Tensor) and value.dtype is torch.uint8:
        return "torch.Generator on cpu"
    if isinstance(value, dict) and cast(dict[object, object], value).keys() == _LOADER_KEYS:
        return "loader"
    return "object"


@dataclass(frozen=True, slots=True)
class ImportedDocument:
    """A component of an everstep export: its exact document and its tensors by their full names."""

    name: str
    document: object
    tensors: Tensors = field(default_factory=Tensors)

    def capture(self, sink: Sink) -> None:
        """Hand over what was exported."""
        for name, tensor in self.tensors.items():
            sink.leaf(name, tensor, Laziness.EAGER)
        sink.value(self.document)


_KEPT_BY = "an export --to safetensors keeps them"
_OF_THE_PROCESS = {
    RNG_NAME: f"random states of such a source are not taken, the run begins with those of its process; {_KEPT_BY}",
    HISTORY_NAME: f"series of run.log in such a source are not taken, they begin empty; {_KEPT_BY}",
}
"""Why components that every run has of its own do not come from a plain file."""
_OWN_WEIGHTS = f"weights that only an optimizer had are not taken from such a source; {_KEPT_BY}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Components to commit, and what a user should know of them."""

    components: tuple[Captured, ...]
    left_out: dict[str, str]
    """What of the source is no part of the state: its name, and its value or why."""
    run: Mapping[str, object] = field(default_factory=dict[str, object])
    """Step, epoch and end of the run, if the source says so."""


def components_of(tree: Mapping[str, object], *, as_name: str, without: Sequence[str] = ()) -> Imported:
    """Return the components of a tree as `torch.save({"model": …, "optimizer": …})` makes it.

    A flat state dict becomes one module named `as_name`. A whole number `step` beside the objects is the run's; other
    numbers and texts are no state of any object: they are left out and told.

    Raises:
        UsageError: an optimizer's parameters cannot be told by name, or names clash.
        StateTypeError: something cannot be stored.
    """
    if not tree:
        raise UsageError("the source holds nothing", hint="save a state dict")
    if _is_module(tree):
        tree = {as_name: tree}
    modules: list[ImportedModule] = []
    optimizers: dict[str, Mapping[str, object]] = {}
    others: list[Captured] = []
    left_out: dict[str, str] = {}
    seen: set[str] = set()
    for key, value in tree.items():
        name = component_name(key)
        if name in (*without, *_OF_THE_PROCESS) or key in without:
            left_out[key] = _OF_THE_PROCESS.get(name, "as --without says")
            continue
        if name != RUN_COMPONENT and (not name.isidentifier() or name in seen):
            raise UsageError(f"{key!r} cannot be the name of an attached object", hint=f"--without {key}")
        seen.add(name)
        if name == RUN_COMPONENT:
            continue
        if isinstance(value, dict) and _is_module(cast(dict[str, object], value)):
            modules.append(_module(name, cast(dict[str, object], value)))
        elif isinstance(value, dict) and _is_optimizer(cast(dict[str, object], value)):
            optimizers[name] = {"state": {}} | cast(dict[str, object], value)
        elif key == STEP and _count_or_0(cast(object, value)):
            continue  # _run_of takes it
        elif isinstance(value, dict | list | torch.Tensor):
            others.append(ImportedObject(name, cast(object, value)))
        else:
            left_out[key] = repr(value)[:200]
    made = [_optimizer(name, value, modules) for name, value in optimizers.items()]
    left_out |= {f"{name}.own": _OWN_WEIGHTS for name, value in optimizers.items() if "own" in value}
    return Imported(components=(*modules, *made, *others), left_out=left_out, run=_run_of(tree))


def _is_optimizer(value: dict[str, object]) -> bool:
    """Tell whether it is one's state dict, of which DCP leaves an empty `state` out."""
    groups = value.get("param_groups")
    if "state" in value:
        return groups is not None
    return isinstance(groups, list) and all(
        isinstance(group, dict) and "params" in group for group in cast(list[object], groups)
    )


def component_name(key: str) -> str:
    """Return the keyword that `attach` would have for something that was saved under `key`."""
    for suffix in SUFFIXES:
        if key.endswith(suffix) and key != suffix:
            return key.removesuffix(suffix)
    return key


def exported_components(side: Mapping[str, object], tensors: Mapping[str, object]) -> Imported:
    """Return the components of an everstep export: documents from beside it, tensors from its safetensors files.

    Raises:
        CorruptDataError: they do not belong together.
    """
    documents, described = side.get("values"), side.get("tensors")
    if not isinstance(documents, dict) or not isinstance(described, dict):
        raise CorruptDataError("the document beside the safetensors files has no values or no tensors")
    found = _as_they_were(cast(Mapping[str, object], described), tensors)
    components: list[Captured] = []
    for name, document in cast(dict[str, object], documents).items():
        own = {key: tensor for key, tensor in found.items() if _belongs(key, name)}
        if name == RUN_COMPONENT:
            continue
        components.append(ImportedDocument(name, document, own))
    run = _run_of(cast(dict[str, object], documents))
    return Imported(components=tuple(components), left_out={}, run=run)


def _belongs(leaf: str, component: str) -> bool:
    """Tell whether a leaf is named after the component: `draws`, `model.weight`, `notes[0]`, but not `models`."""
    rest = leaf.removeprefix(component)
    return leaf.startswith(component) and not (rest and f"a{rest[0]}".isidentifier())


class _Described(msgspec.Struct, frozen=True):
    """What the document beside safetensors files says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None = None


_DESCRIBED = Converter(_Described)


def _as_they_were(described: Mapping[str, object], tensors: Mapping[str, object]) -> Tensors:
    """Return the tensors with their dtypes and shapes; one that is stored twice for its alias is one again."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name not in described or not isinstance(tensor, torch.Tensor):
            raise CorruptDataError(f"the document beside the safetensors files does not describe {name!r}")
        try:
            entry = _DESCRIBED.convert(described[name])
        except msgspec.ValidationError as error:
            raise CorruptDataError(
                f"the document beside the safetensors files says of {name!r}: {error}"
            ) from error
        dtype, shape = torch_dtype(entry.dtype), entry.shape
        try:
            found[name] = (tensor if tensor.dtype == dtype else tensor.view(dtype)).reshape(shape)
        except (RuntimeError, TypeError) as error:  # TypeError: a dimension beyond 64 bits
            raise CorruptDataError(f"{name!r} is no {dtype} of {list(shape)}: {error}") from error
        holder = found.get(entry.alias_of or "")
        if holder is not None and _alike(holder, found[name]):
            found[name] = holder
    return found


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _is_module(tree: Mapping[str, object]) -> bool:
    """Tell whether all values are tensors, extra state aside; an empty one is a module without parameters."""
    return any(isinstance(value, torch.Tensor) for value in tree.values()) and all(
        isinstance(value, torch.Tensor) or key.rpartition(".")[2] == EXTRA_STATE
        for key, value in tree.items()
    )


def _module(name: str, tree: Mapping[str, object]) -> ImportedModule:
    extra = {key: value for key, value in tree.items() if key.rpartition(".")[2] == EXTRA_STATE}
    tensors = {key: cast(torch.Tensor, value) for key, value in tree.items() if key not in extra}
    return ImportedModule(name, tensors, extra)


def _run_of(tree: Mapping[str, object]) -> Mapping[str, object]:
    """Return what an export says of the run, else the step where the source has it beside the objects."""
    run = tree.get(RUN_COMPONENT)
    return cast(dict[str, object], run) if isinstance(run, dict) else {STEP: tree.get(STEP)}


def run_state(imported: Imported, step: int | None) -> RunState:
    """Return how far the run is: as the source says, at `step` if that is given."""
    made, run = RunState(learnt=lambda: None), imported.run
    made.is_last = True  # whatever it was, it did not die in this run
    known, epoch = run.get(STEP), run.get("epoch")
    made.step = step if step is not None else _count_or_0(known)
    made.epoch, made.finished = _count_or_0(epoch), run.get("finished") is True
    return made


def _count_or_0(value: object) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else 0


# --- optimizers -------------------------------------------------------------------------------------------------------


def _optimizer(name: str, tree: Mapping[str, object], modules: Sequence[ImportedModule]) -> ImportedOptimizer:
    groups = [dict(cast(dict[object, object], group)) for group in cast(list[object], tree["param_groups"])]
    state = cast(dict[object, object], tree["state"])
    keys = [key for group in groups for key in cast(list[object], group.get("params", []))]
    names, by_number = _parameter_names(name, groups, keys, state, modules)
    unknown = [key for key in state if _number(key) not in names]
    if unknown:
        raise StateTypeError(
            f"{name} has state of {unknown[0]!r}, which is in no group", hint=f"--without {name}"
        )
    return ImportedOptimizer(
        name,
        [
            (
                [names[_number(key)] for key in cast(list[object], group.get("params", []))],
                {key: value for key, value in group.items() if key not in ("params", "param_names")},
            )
            for group in groups
        ],
        {names[_number(key)]: cast(dict[object, object], found) for key, found in state.items()},
        by_number,
    )


def _number(key: object) -> object:
    """DCP makes text of numbers."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _parameter_names(
    name: str,
    groups: Sequence[Mapping[object, object]],
    keys: Sequence[object],
    state: Mapping[object, object],
    modules: Sequence[ImportedModule],
) -> tuple[dict[object, str], bool]:
    """Return the name of each parameter that a group has, and whether it was guessed from a number.

    Restore goes by names, and takes guessed ones only where the optimizer has them in the same order.
    """
    given = [text for group in groups for text in cast(list[str], group.get("param_names", []))]
    if len(given) == len(keys):
        return dict(zip(map(_number, keys), given, strict=True)), False
    if all(isinstance(_number(key), str) for key in keys):
        return {key: str(key) for key in keys}, False
    candidates = [_parameters(module) for module in modules]
    if len(modules) > 1:
        candidates.append([(f"{m.name}.{fqn}", tensor) for m in modules for fqn, tensor in _parameters(m)])
    for parameters in candidates:
        if len(parameters) == len(keys) and _fits(parameters, keys, state):
            return {_number(key): fqn for key, (fqn, _) in zip(keys, parameters, strict=True)}, True
    counts = (
        ", ".join(f"{module.name} has {len(_parameters(module))}" for module in modules) or "none is there"
    )
    raise UsageError(
        f"{name} has {len(keys)} parameters by number, and no module's parameters are these ({counts})",
        hint=f"build the optimizer from named_parameters() before saving, or --without {name}",
    )


def _parameters(module: ImportedModule) -> list[tuple[str, torch.Tensor]]:
    """Return what parameters() would give, in its order: no buffers that are known as such, tied weights once."""
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for fqn, tensor in module.tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if fqn.rpartition(".")[2] in _BUFFERS or (tensor.numel() and place in seen):
            continue
        seen.add(place)
        found.append((fqn, tensor))
    return found


def _fits(
    parameters: Sequence[tuple[str, torch.Tensor]], keys: Sequence[object], state: Mapping[object, object]
) -> bool:
    """Tell whether the state of each number could be of that parameter: a moment is shaped like its parameter."""
    by_number = {_number(key): found for key, found in state.items()}
    for key, (_, parameter) in zip(keys, parameters, strict=True):
        own = cast(dict[str, object], by_number.get(_number(key), {}))
        moments = [
            own.get(moment) for moment in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "square_avg")
        ]
        if any(isinstance(moment, torch.Tensor) and moment.shape != parameter.shape for moment in moments):
            return False
    return True
