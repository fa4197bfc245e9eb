"""Tensors of modules that share memory here, where a checkpoint may keep them apart: one overwrites the other."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from .stored_state import StoredState
from .tensor_bytes import copy_bits, reach_of, same_bits


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of those that share memory with another one of them, or of which two elements do.

    Those on the meta device, without elements, or that are not strided share nothing.
    """
    found, places = set[int](), list[tuple[str, int, int, int]]()
    for tensor in {id(each): each for each in tensors}.values():
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        reach = reach_of(tensor)
        if reach < tensor.numel():
            found.add(id(tensor))
        begin = tensor.data_ptr()
        places.append((str(tensor.device), begin, begin + reach * tensor.element_size(), id(tensor)))
    device, end, owner = "", 0, 0
    for place, begin, until, number in sorted(places):
        if place == device and begin < end:
            found |= {owner, number}
        if place != device or until > end:
            device, end, owner = place, until, number
    return found


def lying_within(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Return the pairs of names, in the order given, of one tensor, or of dense ones of which one lies in the other.

    Those and no others do a checkpoint's aliases tell of.
    """
    order = {name: number for number, name in enumerate(tensors)}
    places: list[tuple[str, int, int, int, str]] = []
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            begin, reach = tensor.data_ptr(), reach_of(tensor) * tensor.element_size()
            places.append((str(tensor.device), begin, -reach, order[name], name))
    found, device, around = list[tuple[int, int]](), "", list[tuple[int, str]]()
    for place, begin, minus_reach, number, name in sorted(places):
        around = [each for each in around if place == device and each[0] > begin]
        device, end, tensor = place, begin - minus_reach, tensors[name]
        for until, other in around:
            is_inside = end <= until and _is_dense(tensor) and _is_dense(tensors[other])
            if is_inside or tensors[other] is tensor:
                found.append((min(number, order[other]), max(number, order[other])))
        around.append((end, name))
    names = [*tensors]
    return [(names[one], names[other]) for one, other in sorted(found)]


def _is_dense(tensor: torch.Tensor) -> bool:
    return reach_of(tensor) == tensor.numel()


def put_overlapping(
    kept: Sequence[tuple[str, torch.Tensor]], free: Sequence[tuple[str, torch.Tensor]], stored: StoredState
) -> tuple[list[str], list[str]]:
    """Write leaves into tensors that share memory; return which of `free` need memory of their own, and who is wrong.

    `kept`, leaves and their tensors, stay where they are; those of `free` may be made anew: buffers that forward
    replaces. What is still wrong then are weights that were apart when they were saved.
    """
    values = {leaf: stored.copy_of(leaf) for leaf, _ in (*kept, *free)}
    for leaf, tensor in (
        *free,
        *kept,
    ):  # in this order: a buffer that is a view of a weight must not come out last
        copy_bits(values[leaf], to=tensor)
    apart = [leaf for leaf, tensor in free if not same_bits(values[leaf], tensor)]
    return apart, [leaf for leaf, tensor in kept if not same_bits(values[leaf], tensor)]
