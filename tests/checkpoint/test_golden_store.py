"""Stores written by earlier versions open forever; each is tested on a copy, since opening a store writes to it."""

import json
import random
import shutil
from pathlib import Path

import pytest
import safetensors

from everstep.checkpoint.catalogue import CheckpointState
from everstep.checkpoint.leaf import LeafSpec
from everstep.checkpoint.manifest_format import decode_manifest
from everstep.checkpoint.segment_format import build_header, parse_header
from everstep.checkpoint.testing import encode_manifest, load, make_state, opened, save
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.ids import CheckpointId

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    """Fresh files, so that they belong to whoever runs the test, under other paths than they were written to."""
    for source in sorted((GOLDEN / "store_v1").iterdir()):
        shutil.copytree(source, tmp_path / source.name, copy_function=shutil.copyfile)
    return sorted(tmp_path.iterdir())


def content_of(leaf: LeafSpec, checkpoint: CheckpointId, rank: int) -> bytes:
    """As golden/make_store_v1.py filled it."""
    return random.Random(f"{leaf.name} {checkpoint} {rank}").randbytes(leaf.size_bytes)


@pytest.mark.parametrize("read_only", [True, False])
def test_version_1_opens_with_everything_in_it(dirs: list[Path], read_only: bool) -> None:
    with opened(dirs, read_only=read_only) as (store, report):
        assert report.problems == []
        assert (report.shard_count, report.damaged_count, report.orphan_count) == (7, 0, 0)
        run = store.run(1000, "golden run")
        assert (run.highest_attempt(), run.fresh_floor()) == (3, 2)
        assert run.complete_floor() == CheckpointId(2, 8)
        infos = run.checkpoints()
        assert [(str(info.checkpoint), info.state, info.ranks) for info in infos] == [
            ("3.2", CheckpointState.LOCAL, (0,)),
            ("2.8", CheckpointState.COMPLETE, (0, 1)),
            ("2.4", CheckpointState.COMPLETE, (0, 1)),
            ("1.7", CheckpointState.COMPLETE, (0, 1)),
        ]
        assert [info.is_finished for info in infos] == [True, False, False, False]
        assert infos[0].parent == CheckpointId(2, 8)
        assert [str(each) for each in run.offered(rank=1)] == ["2.8", "2.4"]
        for info in infos:
            assert verify_checkpoint(run, info.checkpoint).is_intact
            for rank in info.ranks:
                manifest = run.manifest(info.checkpoint, rank)
                assert load(run, manifest) == {
                    leaf.name: content_of(leaf, info.checkpoint, rank) for leaf in manifest.leaves
                }
                assert json.loads(manifest.values)["big"] == 2**128 - 1
                assert manifest.aliases[0].of == "model.embedding.weight"


def test_version_1_goes_on(dirs: list[Path]) -> None:
    with opened(dirs) as (store, _):
        run = store.run(1000, "golden run")
        run.begin_attempt(4, fresh=False)
        save(run, make_state(store), CheckpointId(4, 1))
    with opened(dirs) as (store, report):
        assert store.run(1000, "golden run").offered()[0] == CheckpointId(4, 1)
        assert report.problems == []


def test_version_1_is_still_written_byte_for_byte() -> None:
    manifests = sorted((GOLDEN / "store_v1").rglob("*.mf"))
    assert len(manifests) == 14
    for path in manifests:
        assert encode_manifest(decode_manifest(path.read_bytes())) == path.read_bytes()
    segments = sorted((GOLDEN / "store_v1").rglob("*.safetensors"))
    assert len(segments) == 14
    for path in segments:
        content = path.read_bytes()
        stamp, entries = parse_header(content, len(content))
        header = build_header(entries, stamp)
        assert content[: len(header)] == header


def test_the_files_are_safetensors_for_everybody() -> None:
    found: dict[str, tuple[str, list[int]]] = {}
    for path in (GOLDEN / "store_v1").rglob("*.safetensors"):
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            found[name] = (str(tensor["dtype"]), list(tensor["shape"]))
    assert found == {
        "gewichte.größe ✓": ("U8", [16]),
        "model.conv.weight": ("F32", [2, 2, 2, 3]),
        "model.embedding.weight": ("BF16", [33, 5]),
        "model.empty": ("F64", [0, 4]),
        "model.fp8": ("U8", [9]),
        "model.mask": ("BOOL", [3]),
        "model.norm.num_batches_tracked": ("I64", []),
        "optimizer.state.model.embedding.weight.step": ("F32", []),
    }
