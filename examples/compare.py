"""Compares the final checkpoints of two runs byte for byte, reading the committed files and nothing else."""

import os
from pathlib import Path

from everstep.checkpoint.manifest_types import Manifest
from everstep.checkpoint.recovery import recover
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.segment_format import parse_header
from everstep.checkpoint.storage_ops import RealStorage
from everstep.checkpoint.store import open_store
from everstep.checkpoint.store_format import LockHolder
from everstep.checkpoint.value_format import decode_value, load_values
from everstep.dataloader.ledger_format import ledger_problems


def compare_runs(first: list[Path], second: list[Path]) -> list[str]:
    """Return every difference between the newest checkpoints of the runs in two stores, and every ledger problem."""
    (a, leaves_a), (b, leaves_b) = _newest(first), _newest(second)
    problems = (
        []
        if a.checkpoint.step == b.checkpoint.step
        else [f"step {a.checkpoint.step} and {b.checkpoint.step}"]
    )
    problems += [f"leaf {name!r} is only in one" for name in sorted(leaves_a.keys() ^ leaves_b.keys())]
    problems += [
        f"leaf {name!r}"
        for name in sorted(leaves_a.keys() & leaves_b.keys())
        if leaves_a[name] != leaves_b[name]
    ]
    values_a, values_b = load_values(a.values), load_values(b.values)
    assert isinstance(values_a, dict)
    assert isinstance(values_b, dict)
    for values in (values_a, values_b):
        for unseeded in ("python", "numpy"):  # the script seeds and uses torch's generator only
            values["rng"].pop(unseeded, None)
    problems += [f"values of {name!r}" for name in values_a if values_a[name] != values_b.get(name)]
    for values in (values_a, values_b):
        loader = decode_value(values["loader"]["state"])
        assert isinstance(loader, dict)
        problems += ledger_problems([loader["ledger"]], loader["loader"])
    return problems


def _newest(directories: list[Path]) -> tuple[Manifest, dict[str, bytes]]:
    holder = LockHolder(pid=os.getpid(), socket="", uid=os.getuid(), kind="compare")
    with open_store(directories, ops=RealStorage(), holder=holder, uid=os.getuid(), read_only=True) as store:
        recover(store)
        (run,) = store.runs()
        newest = run.checkpoints()[0].checkpoint
        manifest = run.manifest(newest, 0)
        return manifest, _leaves(run, manifest)


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
