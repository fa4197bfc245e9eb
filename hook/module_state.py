"""State of an nn.Module: parameters, all buffers, extra state, under names without wrapper prefixes."""

import itertools
import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import msgspec
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ..checkpoint.leaf import LeafSpec
from ..checkpoint.value_format import dump_part
from .document import Document, mismatch, read_document
from .lazy_leaves import may_be_statistics
from .object_tree import TreeDecoder, TreeEncoder, leaf_names
from .overlaps import lying_within, overlapping, put_overlapping
from .plain_errors import read_named
from .state_protocol import Laziness, Sink, Watch
from .stored_state import StoredState, TensorMaker
from .structure_watch import CACHES, GroupsWatch, ModulesWatch
from .tensor_bytes import dtype_name, require_plain, same_bits, torch_dtype
from .unwritable import unwritable

logger = logging.getLogger(__name__)

KIND = "module"

_WRAPPED_CHILDREN = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Names that torch.compile and the activation checkpoint wrapper give their only child; nobody else uses them."""


class Role(Enum):
    """What a tensor is to its module."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CACHE = "non-persistent buffer"
    """Not in state_dict(); its size may be made by the forward pass, so another size is no mismatch."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a module tree and where it hangs."""

    fqn: str
    """Dotted path without the prefixes of wrappers."""
    tensor: torch.Tensor
    role: Role
    owner: nn.Module
    key: str
    replicas: int


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module of a tree, with the prefix of what hangs below it (empty or ending with a dot)."""

    prefix: str
    module: nn.Module
    replicas: int
    ignored: frozenset[int] = frozenset()
    """Ids of tensors that the DistributedDataParallel above leaves each rank of its own."""


def walk(root: nn.Module, world_size: int) -> Iterator[NamedModule]:
    """Yield each module under every name that it has, wrappers removed, in the order of named_modules().

    What lies under DistributedDataParallel is held by all ranks: `replicas` is then `world_size`, else 1.
    """
    pending = [NamedModule("", root, 1)]
    while pending:
        named = pending.pop()
        module, prefix, replicas = named.module, named.prefix, named.replicas
        ignored = named.ignored
        if isinstance(module, DistributedDataParallel):
            replicas, ignored = world_size, ignored | _ignored_by(module)
        yield NamedModule(prefix, module, replicas, ignored)
        unwrap = isinstance(module, DistributedDataParallel | DataParallel)
        children: list[NamedModule] = []
        for name, child in _table(module, "_modules").items():  # named_children() drops shared modules
            if child is not None:
                below = prefix if unwrap or name in _WRAPPED_CHILDREN else f"{prefix}{name}."
                children.append(NamedModule(below, child, replicas, ignored))
        pending += reversed(children)


def _ignored_by(ddp: DistributedDataParallel) -> frozenset[int]:
    """Return the ids of the tensors that it is told to leave alone; those that it only reduces later it does not."""
    names = cast(set[str], ddp.parameters_to_ignore)
    if not names:
        return frozenset()
    module = cast(nn.Module, ddp.module)
    later = {id(each) for each in cast(list[torch.Tensor], getattr(ddp, "_delay_all_reduce_params", []))}
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return (
        frozenset(id(tensor) for name, tensor in itertools.chain(parameters, buffers) if name in names)
        - later
    )


def _table(module: nn.Module, field: str) -> dict[str, Any]:
    """A module's own registry. Its public iterators drop what is shared, or walk the tree again for each module."""
    return cast(dict[str, Any], getattr(module, field))


def tensors_of(named: NamedModule) -> Iterator[NamedTensor]:
    """Yield the parameters and buffers that hang directly at a module."""
    module, prefix, ignored = named.module, named.prefix, named.ignored
    for key, tensor in _table(module, "_parameters").items():  # named_parameters() walks the tree again
        if tensor is not None:
            replicas = 1 if id(tensor) in ignored else named.replicas
            yield NamedTensor(prefix + key, tensor, Role.PARAMETER, module, key, replicas)
    for key, tensor in _table(module, "_buffers").items():
        if tensor is not None:
            role = Role.CACHE if key in cast(set[str], getattr(module, CACHES, ())) else Role.BUFFER
            replicas = 1 if id(tensor) in ignored else named.replicas
            yield NamedTensor(prefix + key, tensor, role, module, key, replicas)


def own_buffers(root: nn.Module) -> list[str]:
    """Return names of the buffers below DistributedDataParallel that it does not spread from rank 0 to the others."""
    return [
        tensor.fqn
        for ddp in root.modules()
        if isinstance(ddp, DistributedDataParallel) and not ddp.broadcast_buffers
        for named in walk(ddp, 1)
        for tensor in tensors_of(named)
        if tensor.role is Role.BUFFER
    ]


@dataclass(slots=True)
class ParameterRegistry:
    """Who names and who owns each parameter, shared by the modules and optimizers of one run.

    A module refreshes its part whenever it is captured, checked or applied; modules come before optimizers.
    """

    world_size: int
    modules: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list[torch.optim.Optimizer])
    named: dict[str, dict[int, NamedTensor]] = field(default_factory=dict[str, dict[int, NamedTensor]])
    """Module's keyword -> id of the parameter -> its first name. The entry keeps the tensor, so the id is its own."""
    _groups: GroupsWatch | None = field(default=None, init=False)

    def watch_groups(self) -> GroupsWatch:
        """Return the proof that all groups are as they are now: one for all that ask in one walk."""
        if self._groups is None or not self._groups.holds():
            self._groups = GroupsWatch(self.optimizers)
        return self._groups

    def refresh(self, name: str) -> tuple[list[NamedModule], list[NamedTensor]]:
        """Walk one module again; return its modules and tensors."""
        modules = list(walk(self.modules[name], self.world_size))
        tensors = [tensor for module in modules for tensor in tensors_of(module)]
        found: dict[int, NamedTensor] = {}
        for tensor in tensors:
            if tensor.role is Role.PARAMETER:
                found.setdefault(id(tensor.tensor), tensor)
        self.named[name] = found
        return modules, tensors

    def find(self, name: str, tensor: torch.Tensor) -> NamedTensor | None:
        """Return what a module calls a parameter, or None when it has none such."""
        found = self.named[name].get(id(tensor))
        return found if found is not None and found.tensor is tensor else None

    def parameters(self, name: str | None) -> list[NamedTensor]:
        """Return the parameters of one module, or of all."""
        return [
            named for module in ([name] if name else self.modules) for named in self.named[module].values()
        ]

    def owned(self) -> set[int]:
        """Return the ids of all parameters in the groups of hooked optimizers."""
        return {
            id(parameter)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in cast(list[torch.Tensor], group["params"])
        }


class ModuleState:
    """Component of an nn.Module.

    Parameters are OWNED when a hooked optimizer has them, FROZEN when they take no gradient, else EAGER; so is all
    that averages (AveragedModel), and what a forward pass may change: every buffer, and embeddings of bounded norm.
    `replicas` is the world size below DistributedDataParallel. There buffers count too: rank 0's are the ones that
    DDP spreads before a forward pass, but between two passes each rank has its own running statistics.
    """

    def __init__(self, name: str, module: nn.Module, registry: ParameterRegistry) -> None:
        """Register the module; its structure is read again at each capture."""
        self.name = name
        self._averages = isinstance(module, AveragedModel)
        self._registry = registry
        self._found = _Found()
        registry.modules[name] = module

    checks_bytes = False

    def capture(self, sink: Sink) -> None:
        """Hand over every parameter, buffer and extra state."""
        self.walk(sink)
        self.rest(sink)

    def walk(self, sink: Sink) -> Sequence[Watch]:
        """Hand over every dense parameter and buffer."""
        modules, tensors = self._registry.refresh(self.name)
        owned = self._registry.owned()
        for named in tensors:
            if named.tensor.layout is torch.strided:
                leaf = f"{self.name}.{named.fqn}"
                sink.leaf(leaf, named.tensor, self._laziness(named, owned), replicas=named.replicas)
        found = self._found = _Found(
            plain=dump_part([named.fqn for named in tensors if named.tensor.layout is torch.strided]),
            caches=dump_part([named.fqn for named in tensors if named.role is Role.CACHE]),
            sparse=[named for named in tensors if named.tensor.layout is not torch.strided],
            extra=[named for named in modules if _has_extra_state(named.module)],
        )
        watch = ModulesWatch((named.module for named in modules), [named.tensor for named in found.sparse])
        return watch, self._registry.watch_groups()

    def rest(self, sink: Sink) -> None:
        """Hand over sparse tensors and extra state, which may be made anew at each call."""
        found = self._found
        sparse = {
            named.fqn: TreeEncoder(sink, replicas=named.replicas).encode(
                named.tensor, f"{self.name}.{named.fqn}"
            )
            for named in found.sparse
        }
        extra = {named.prefix: self._extra_state(named, sink) for named in found.extra}
        document = {"kind": KIND, "tensors": found.plain, "caches": found.caches}
        sink.value(document | {"sparse": sparse, "extra": extra})

    def _extra_state(self, named: NamedModule, sink: Sink) -> object:
        place = f"{self.name}.{named.prefix}"
        read = read_named(named.module.get_extra_state, f"get_extra_state() of {place[:-1]!r}")
        return TreeEncoder(sink, replicas=named.replicas).encode(read, f"{place}_extra_state")

    def _laziness(self, named: NamedTensor, owned: set[int]) -> Laziness:
        if named.role is not Role.PARAMETER or _is_renormalised(named) or _is_observed(named):
            return Laziness.EAGER
        if may_be_statistics(named.tensor):
            return Laziness.EAGER
        if id(named.tensor) in owned:
            return Laziness.OWNED
        return Laziness.EAGER if self._averages or named.tensor.requires_grad else Laziness.FROZEN

    def check(self, stored: StoredState) -> None:
        """Return if the module has the stored tensors with their dtypes and shapes, and the same extra state.

        Raises:
            StateTypeError: a tensor has no memory to restore into (on the meta device, or without a shape yet).
            StateMismatchError: as any component.
        """
        document = _Document.read(stored, self.name)
        modules, tensors = self._registry.refresh(self.name)
        for named in tensors:
            if named.tensor.layout is torch.strided or named.tensor.is_meta:
                require_plain(named.tensor, f"{self.name}.{named.fqn}")
        here = {named.fqn: named for named in tensors}
        stored_here = {id(named.tensor) for fqn, named in here.items() if fqn in document.tensors}
        """Of tied ones some tools write one name alone."""
        places = {named.prefix: named.module for named in modules}
        problems = [
            f"{fqn} is in the checkpoint and not in the module"
            for fqn in (*document.tensors, *document.sparse)
            if fqn not in here and not _can_add(document, fqn, places)
        ]
        for fqn, named in here.items():
            if fqn in document.tensors:
                problems += _differences(named, stored, f"{self.name}.{fqn}")
            elif fqn in document.sparse:
                problems += _sparse_differences(named, document.sparse[fqn], stored)
            elif named.role is not Role.CACHE and id(named.tensor) not in stored_here:
                problems.append(f"{fqn} is in the module and not in the checkpoint")
        # One of two weights would be lost; another buffer gets memory of its own, or is compared.
        apart = self._apart_in_checkpoint(tensors, document, stored)
        problems += [text for _, named, text in apart if named.role is Role.PARAMETER]
        extra = {named.prefix for named in modules if _has_extra_state(named.module)}
        problems += [
            f"{prefix}_extra_state is on one side only" for prefix in sorted(extra ^ document.extra.keys())
        ]
        for leaf in leaf_names([document.sparse, document.extra]):
            stored.spec(leaf)
        if problems:
            raise mismatch(self.name, problems)

    def compared(self, stored: StoredState) -> list[str]:
        """Return the leaves that `check_compared` reads: of buffers of one part that is in several places here alone.

        A copy of one's own would be the other place's, too; constants, as a table of positions, may be the same.
        """
        return [leaf for pair, _ in self._of_one_part(stored) for leaf in pair]

    def check_compared(self, stored: StoredState) -> None:
        """Return if buffers that `compared` names have the same value in each of their places; after `check`.

        Raises:
            StateMismatchError: they have not.
        """
        problems = [text for pair, text in self._of_one_part(stored) if not _equal(stored, *pair)]
        if problems:
            raise mismatch(self.name, problems)

    def _of_one_part(self, stored: StoredState) -> list[tuple[tuple[str, str], str]]:
        document = _Document.read(stored, self.name)
        _, tensors = self._registry.refresh(self.name)
        return [
            ((leaf, f"{self.name}.{named.fqn}"), text)
            for (leaf, first), named, text in self._apart_in_checkpoint(tensors, document, stored)
            if named.role is Role.BUFFER and _have_one_place(first, named)
        ]

    def _apart_in_checkpoint(
        self, tensors: Sequence[NamedTensor], document: "_Document", stored: StoredState
    ) -> Iterator[tuple[tuple[str, NamedTensor], NamedTensor, str]]:
        """Yield who shares memory here with another one (its leaf and itself come first) from which the checkpoint
        keeps it apart, among these and those of earlier modules, and what to say of it.
        """
        for first, named in _tied_here_alone(tensors, document.tensors, stored, self.name):
            tied, leaf = f"{first.fqn} and {named.fqn} are one tensor here (tied)", f"{self.name}.{first.fqn}"
            yield (leaf, first), named, f"{tied}, and two in the checkpoint: build them untied"
        before = itertools.takewhile(lambda name: name != self.name, self._registry.modules)  # checked by now
        for leaf, theirs, own in self._tied_to_others(tensors, stored, before):
            shared = f"{leaf} and {self.name}.{own.fqn} share memory here"
            yield (leaf, theirs), own, f"{shared}, and did not when they were saved: build them apart"

    def _tied_to_others(
        self, tensors: Sequence[NamedTensor], stored: StoredState, modules: Iterable[str]
    ) -> list[tuple[str, NamedTensor, NamedTensor]]:
        """Return who shares memory here with a tensor (its leaf comes first) of another of these attached modules, from
        which the checkpoint keeps it apart, and has to give way.

        Buffers give way to weights, since these stay where they are; else the later module's tensor does.
        """
        others = [name for name in modules if name != self.name]
        if stored.is_imported or not others:
            return []
        closed = unwritable(named.tensor for named in tensors)
        order = {name: number for number, name in enumerate(self._registry.modules)}
        found: dict[str, tuple[bool, int, NamedTensor]] = {}
        for module in sorted((*others, self.name), key=order.__getitem__):
            here = tensors if module == self.name else self._registry.refresh(module)[1]
            for each in here:
                if (leaf := f"{module}.{each.fqn}") in stored:
                    found[leaf] = each.role is not Role.PARAMETER, order[module], each
        own = {f"{self.name}.{each.fqn}" for each in tensors}

        def place(leaf: str) -> tuple[str, int]:
            holder, offset_bytes = stored.holder_of(leaf)
            return holder, offset_bytes - found[leaf][2].tensor.data_ptr()

        tied: list[tuple[str, NamedTensor, NamedTensor]] = []
        for pair in lying_within({leaf: each.tensor for leaf, (_, _, each) in found.items()}):
            stays, yields = sorted(pair, key=lambda leaf: found[leaf][:2])
            theirs, ours = found[stays][2], found[yields][2]
            gets_its_own = id(ours.tensor) in closed and ours.tensor is not theirs.tensor
            if yields in own and stays not in own and place(stays) != place(yields) and not gets_its_own:
                tied.append((stays, theirs, ours))
        return tied

    def destinations(self, stored: StoredState) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each leaf that `apply` puts into an existing tensor as its bytes are, with that tensor."""
        document = _Document.read(stored, self.name)
        _, tensors = self._registry.refresh(self.name)
        apart = unwritable(named.tensor for named in tensors) | overlapping(named.tensor for named in tensors)
        tied = self._names_apart(tensors, document, stored)
        for named in tensors:
            leaf = f"{self.name}.{named.fqn}"
            stays = named.fqn in document.tensors and named.role is not Role.CACHE and named.fqn not in tied
            if stays and id(named.tensor) not in apart and stored.lies_in(leaf, named.tensor):
                yield leaf, named.tensor

    def apply(self, stored: StoredState) -> None:
        """Write into the existing tensors; buffers that the forward pass makes anew are replaced.

        A tensor whose memory cannot be written to gets memory of its own, and so does a buffer that shares some here,
        or is one with another tensor here, where the checkpoint keeps the two apart.

        Raises:
            StateMismatchError: two weights share memory here and did not when they were saved.
        """
        document = _Document.read(stored, self.name)
        modules, tensors = self._registry.refresh(self.name)
        decoder, maker = TreeDecoder(stored), TensorMaker(stored)
        closed = unwritable(named.tensor for named in tensors)
        tied = self._names_apart(tensors, document, stored)
        self._say_untied(tensors, document, stored)
        overlaps, shared = overlapping(named.tensor for named in tensors), list[NamedTensor]()
        apart = closed | overlaps
        for named in tensors:  # what is made anew shares memory with what stays
            stays = named.fqn in document.tensors and named.fqn not in tied
            if stays and id(named.tensor) not in apart:
                maker.share(f"{self.name}.{named.fqn}", named.tensor)
        for named in tensors:
            leaf = f"{self.name}.{named.fqn}"
            if named.fqn in document.sparse:
                _put_sparse(named, decoder.decode(document.sparse[named.fqn]))
            elif named.fqn not in document.tensors:
                continue  # a cache that was not there yet
            elif named.fqn in tied:
                _table(named.owner, "_buffers")[named.key] = maker.make(leaf, named.tensor.device)
            elif id(named.tensor) in closed and stored.fits(leaf, named.tensor):
                named.tensor.data = maker.make(leaf, named.tensor.device)
            elif id(named.tensor) in overlaps and stored.fits(leaf, named.tensor):
                shared.append(named)
            elif named.role is Role.PARAMETER or stored.fits(leaf, named.tensor):
                stored.copy_to(leaf, named.tensor)
            else:
                _table(named.owner, "_buffers")[named.key] = maker.make(leaf, named.tensor.device)
        self._put_shared(shared, stored, maker)
        self._add_buffers(maker, document, {named.prefix: named.module for named in modules})
        for named in modules:
            if named.prefix in document.extra:
                named.module.set_extra_state(cast(Any, decoder.decode(document.extra[named.prefix])))

    def _names_apart(
        self, tensors: Sequence[NamedTensor], document: "_Document", stored: StoredState
    ) -> set[str]:
        """Return which buffers get memory of their own; not those of one part, which are the same in all its places."""
        within = _tied_here_alone(tensors, document.tensors, stored, self.name)
        others = self._tied_to_others(tensors, stored, self._registry.modules)
        pairs = [*within, *((theirs, named) for _, theirs, named in others)]
        return {named.fqn for first, named in pairs if not _have_one_place(first, named)}

    def _say_untied(self, tensors: Sequence[NamedTensor], document: "_Document", stored: StoredState) -> None:
        """Warn of weights that were one tensor when they were saved and are several here: they part in training."""
        first: dict[tuple[object, ...], NamedTensor] = {}
        for named in tensors:
            if named.role is Role.PARAMETER and named.fqn in document.tensors and named.tensor.numel():
                leaf = f"{self.name}.{named.fqn}"
                spec = stored.spec(leaf)
                other = first.setdefault((*stored.holder_of(leaf), spec.shape, spec.strides), named)
                if other.tensor.data_ptr() != named.tensor.data_ptr():
                    logger.warning(
                        "weights_untied module=%s first=%s second=%s: one tensor when they were saved, and two here:"
                        " tie them before attach()",
                        self.name,
                        other.fqn,
                        named.fqn,
                    )

    def _put_shared(self, shared: Sequence[NamedTensor], stored: StoredState, maker: TensorMaker) -> None:
        named = {f"{self.name}.{each.fqn}": each for each in shared}
        kept = [(leaf, each.tensor) for leaf, each in named.items() if each.role is Role.PARAMETER]
        free = [(leaf, each.tensor) for leaf, each in named.items() if each.role is not Role.PARAMETER]
        apart, wrong = put_overlapping(kept, free, stored)
        for leaf in apart:
            each = named[leaf]
            _table(each.owner, "_buffers")[each.key] = maker.make(leaf, each.tensor.device)
        if wrong:
            text = "shares memory with another tensor here, and did not when it was saved: build them apart"
            raise mismatch(self.name, [f"{named[leaf].fqn} {text}" for leaf in wrong])

    def _add_buffers(self, maker: TensorMaker, document: "_Document", places: dict[str, nn.Module]) -> None:
        """Fill in the buffers that the checkpointed module had made by then and a new one has not yet."""
        for fqn in document.tensors:
            prefix, key = _split(fqn)
            module = places.get(prefix)
            if module is not None and _can_add(document, fqn, places):
                device = _device_of(module, self._registry.modules[self.name])
                tensor = maker.make(f"{self.name}.{fqn}", device)
                module.register_buffer(key, tensor, persistent=fqn not in document.caches)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the last walk found besides the leaves."""

    plain: msgspec.Raw = field(default_factory=msgspec.Raw)
    caches: msgspec.Raw = field(default_factory=msgspec.Raw)
    sparse: list[NamedTensor] = field(default_factory=list[NamedTensor])
    extra: list[NamedModule] = field(default_factory=list[NamedModule])


@dataclass(frozen=True, slots=True)
class _Document:
    tensors: dict[str, None]
    caches: set[str]
    sparse: dict[str, object]
    extra: dict[str, object]

    @classmethod
    def read(cls, stored: StoredState, name: str) -> "_Document":
        document = read_document(stored, name, KIND)
        return cls(
            tensors=dict.fromkeys(document.texts("tensors")),
            caches=set(document.texts("caches")),
            sparse=document.mapping("sparse"),
            extra=document.mapping("extra"),
        )


def _is_renormalised(named: NamedTensor) -> bool:
    """Tell whether a forward pass writes to it in place, before the optimizer does: an embedding of bounded norm."""
    if named.key != "weight" or not isinstance(named.owner, nn.Embedding | nn.EmbeddingBag):
        return False
    return named.owner.max_norm is not None


def _is_observed(named: NamedTensor) -> bool:
    """Tell whether a forward pass writes to it through `.data`: a scale that fake quantisation observes or learns."""
    return any(kind.__name__ == "FakeQuantizeBase" for kind in type(named.owner).__mro__)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _look(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _is_cast(tensor: torch.Tensor, spec: LeafSpec) -> bool:
    """Tell whether both are floating-point numbers of one shape."""
    return (
        tuple(tensor.shape) == spec.shape
        and tensor.is_floating_point()
        and torch_dtype(spec.dtype).is_floating_point
    )


def _is_observer(module: nn.Module) -> bool:
    """Tell whether it is one of torch's observers and fake quantisers, which take ranges and scales of any shape."""
    loads = cast("Any", type(module))._load_from_state_dict
    return str(loads.__module__).startswith("torch.ao.")


def _tied_here_alone(
    tensors: Sequence[NamedTensor], names: Container[str], stored: StoredState, component: str
) -> list[tuple[NamedTensor, NamedTensor]]:
    """Return who is one tensor here with another one (first) that the checkpoint keeps apart from it.

    Not where it was imported: other tools write a tied tensor under each of its names.
    """
    if stored.is_imported:
        return []
    first: dict[int, NamedTensor] = {}
    found: list[tuple[NamedTensor, NamedTensor]] = []
    # Weights first: they stay where they are.
    for named in sorted(tensors, key=lambda named: named.role is not Role.PARAMETER):
        if named.fqn not in names or named.role is Role.CACHE or not named.tensor.numel():
            continue
        tied = first.setdefault(id(named.tensor), named)
        if len({stored.holder_of(f"{component}.{each.fqn}") for each in (tied, named)}) > 1:
            found.append((tied, named))
    return found


def _have_one_place(one: NamedTensor, other: NamedTensor) -> bool:
    """Tell whether they are one buffer of one module under two names, which is more than a cache."""
    return one.owner is other.owner and one.key == other.key and other.role is not Role.CACHE


def _equal(stored: StoredState, one: str, other: str) -> bool:
    """Tell whether two leaves have the same dtype, shape and bits."""
    look, others = stored.spec(one), stored.spec(other)
    alike = (look.dtype, look.shape) == (others.dtype, others.shape)
    return alike and same_bits(stored.copy_of(one), stored.copy_of(other))


def _differences(named: NamedTensor, stored: StoredState, leaf: str) -> list[str]:
    """What keeps the stored bytes from the tensor: one problem or none.

    A buffer that the forward pass makes anew is replaced instead: a cache, one that is empty here or there, one of
    another floating-point dtype, and what an observer of quantisation has.
    """
    if stored.fits(leaf, named.tensor) or named.role is Role.CACHE:
        return []
    spec = stored.spec(leaf)
    if named.role is Role.BUFFER and named.tensor.layout is torch.strided:
        is_empty = not (named.tensor.numel() and spec.size_bytes)
        if is_empty or _is_cast(named.tensor, spec) or _is_observer(named.owner):
            return []
    here = _look(named.tensor) if named.tensor.layout is torch.strided else str(named.tensor.layout)
    return [f"{named.fqn} is {spec.dtype} {list(spec.shape)} in the checkpoint, {here} in the module"]


_SPARSE_TAGS = {torch.sparse_coo: "$sparse_coo", torch.sparse_csr: "$sparse_csr"}


def _sparse_differences(named: NamedTensor, encoded: object, stored: StoredState) -> list[str]:
    content = Document(named.fqn, encoded)
    tag = _SPARSE_TAGS.get(named.tensor.layout)
    if tag is None or tag not in cast(dict[str, object], encoded):
        return [f"{named.fqn} is stored in another sparse layout than {named.tensor.layout}"]
    parts = Document(named.fqn, content.mapping(tag))
    dtypes = [stored.spec(leaf).dtype for leaf in leaf_names(parts.value("values"))]
    if dtypes != [dtype_name(named.tensor.dtype)] or parts.items("size") != list(named.tensor.shape):
        return [
            f"{named.fqn} is {dtypes} {parts.items('size')} in the checkpoint, {_look(named.tensor)} in the module"
        ]
    return []


def _can_add(document: _Document, fqn: str, places: dict[str, nn.Module]) -> bool:
    """Tell whether a stored tensor is a buffer that its module has only as None, or not yet."""
    prefix, key = _split(fqn)
    module = places.get(prefix)
    if module is None or fqn not in document.tensors:
        return False
    buffers = _table(module, "_buffers")
    if key in buffers:
        return buffers[key] is None
    return fqn in document.caches and not hasattr(module, key)


def _split(fqn: str) -> tuple[str, str]:
    prefix, dot, key = fqn.rpartition(".")
    return prefix + dot, key


def _device_of(module: nn.Module, root: nn.Module) -> torch.device:
    tensors = itertools.chain(module.parameters(), module.buffers(), root.parameters(), root.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _put_sparse(named: NamedTensor, made: object) -> None:
    """Into the tensor object that exists: others may hold it too."""
    value, target = cast(torch.Tensor, made), named.tensor
    with torch.no_grad():
        if target.layout is not torch.sparse_coo:  # a compressed one copies only as many elements as it has
            target.resize_as_sparse_(value)
        target.copy_(value)
