"""Compares the final checkpoints of two runs byte for byte, reading the committed files and nothing else."""

import os
from pathlib import Path
from typing import Any

from everstep.checkpoint.manifest_types import Manifest
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.recovery import recover
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.segment_format import parse_header
from everstep.checkpoint.store import open_store
from everstep.checkpoint.store_format import LockHolder
from everstep.checkpoint.value_format import decode_value, load_values
from everstep.dataloader.ledger_format import ledger_problems

Shard = tuple[Manifest, dict[str, bytes]]
"""What one rank committed: its manifest, and the bytes of each leaf."""


def compare_runs(first: list[Path], second: list[Path]) -> list[str]:
    """Return every difference between the newest checkpoints of the runs in two stores, and every ledger problem."""
    shards_a, shards_b = _newest(first), _newest(second)
    problems: list[str] = []
    for (a, leaves_a), (b, leaves_b) in zip(shards_a, shards_b, strict=True):
        problems += [f"rank {a.rank}: {problem}" for problem in _compare_shards(a, b)]
        problems += [
            f"rank {a.rank}: leaf {name!r}"
            for name in sorted(leaves_a.keys() | leaves_b.keys())
            if leaves_a.get(name) != leaves_b.get(name)
        ]
    return problems + _ledger_problems(shards_a) + _ledger_problems(shards_b)


def _compare_shards(a: Manifest, b: Manifest) -> list[str]:
    if a.checkpoint.step != b.checkpoint.step:
        return [f"step {a.checkpoint.step} and {b.checkpoint.step}"]
    values_a, values_b = _values(a), _values(b)
    for values in (values_a, values_b):
        for unseeded in ("python", "numpy"):  # the script seeds and uses torch's generator only
            values["rng"].pop(unseeded, None)
    names = sorted(values_a.keys() | values_b.keys())
    return [f"values of {name!r}" for name in names if values_a.get(name) != values_b.get(name)]


def _ledger_problems(shards: list[Shard]) -> list[str]:
    """Return what is wrong with the samples delivered, summed over all ranks."""
    loaders: list[Any] = [decode_value(_values(manifest)["loader"]["state"]) for manifest, _ in shards]
    return ledger_problems([loader["ledger"] for loader in loaders], loaders[0]["loader"])


def _values(manifest: Manifest) -> dict[str, Any]:
    values = load_values(manifest.values)
    assert isinstance(values, dict)
    return values


def _newest(directories: list[Path]) -> list[Shard]:
    """Return what each rank saved in the newest checkpoint."""
    holder = LockHolder(pid=os.getpid(), socket="", uid=os.getuid(), kind="compare")
    with open_store(directories, ops=RealStorage(), holder=holder, uid=os.getuid(), read_only=True) as store:
        recover(store)
        (run,) = store.runs()
        newest = run.checkpoints()[0]
        manifests = [run.manifest(newest.checkpoint, rank) for rank in newest.ranks]
        return [(manifest, _leaves(run, manifest)) for manifest in manifests]


def _leaves(run: RunStore, manifest: Manifest) -> dict[str, bytes]:
    """Return the bytes of every leaf, put together from its pieces."""
    content: dict[tuple[int, str], bytes] = {}
    for segment in manifest.segments:
        data = run.segment_path(segment).read_bytes()
        _, entries = parse_header(data[: segment.header_size_bytes], len(data))
        body = memoryview(data)[segment.header_size_bytes :]
        content |= {(segment.segment, entry.key): bytes(body[entry.begin : entry.end]) for entry in entries}
    leaves = {leaf.name: bytearray(leaf.size_bytes) for leaf in manifest.leaves}
    for piece in manifest.pieces:
        begin = piece.offset_in_leaf_bytes
        leaves[piece.leaf][begin : begin + piece.size_bytes] = content[piece.segment, piece.key]
    return {name: bytes(data) for name, data in leaves.items()}
