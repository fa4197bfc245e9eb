"""Single bits that flip on the devices, one at a time, anywhere in segments and manifests: each must be found."""

import math
import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from places import memory_folder
from summary import Summary

from everstep.checkpoint.fetch import read_shard, shard_slot_offsets
from everstep.checkpoint.leaf import whole_leaf
from everstep.checkpoint.manifest_format import decode_manifest, decode_manifest_head
from everstep.checkpoint.run_store import RunStore
from everstep.checkpoint.testing import SMALL_LEAVES, each_engine, make_state, memory_arena, opened, save
from everstep.checkpoint.verify import verify_checkpoint
from everstep.core.errors import DataError
from everstep.core.ids import CheckpointId

_UID = os.geteuid()
_BROKEN, _OTHER = CheckpointId(1, 2), CheckpointId(1, 1)
_LEAVES = (*SMALL_LEAVES, whole_leaf("model.large", "uint8", (300_007,)))
_RESTART_EVERY, _VERIFY_EVERY = 40, 10
"""A restart of the store, and reading all of a checkpoint, for every so many flips."""


class _Store:
    """Two checkpoints in a closed store of two devices, with copies of the files that flips go to."""

    def __init__(self, folder: Path) -> None:
        self.dirs = [folder / "a", folder / "b"]
        for path in self.dirs:
            path.mkdir()
        with opened(self.dirs) as (store, _):
            run = store.run(_UID, "flips", create=True)
            run.begin_attempt(1, fresh=False)
            for checkpoint in (_OTHER, _BROKEN):
                save(run, make_state(store, checkpoint.step, _LEAVES), checkpoint)
            self.record = run.shard(_BROKEN, 0)
            self.segments = [run.segment_path(segment) for segment in self.record.segments]
            self.manifests = [run.commits_path(device) / f"{_BROKEN}.0.mf" for device in store.devices]
        self._template = folder / "template"
        for path in self.dirs:
            shutil.copytree(path, self._template / path.name)

    def put_back(self) -> None:
        """Undo everything."""
        for path in self.dirs:
            shutil.rmtree(path)
            shutil.copytree(self._template / path.name, path)


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file; again is as before."""
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


class _Search:
    def __init__(self, store: _Store, source: random.Random) -> None:
        self.failures: list[str] = []
        self.count = 0
        self.restart_count = 0
        self._store, self._random = store, source

    def run(self, run: RunStore, count_max: int, deadline_s: float) -> bool:
        """Flip bits in an opened store; True when the last one stays for a restart, False at the end."""
        manifest = run.manifest(_BROKEN, 0)
        _, size = shard_slot_offsets(manifest)
        with memory_arena(size) as arena, each_engine(run.store) as engines:
            while self.count < count_max and time.monotonic() < deadline_s:
                self.count += 1
                paths, bit = self._place()
                for path in paths:
                    flip(path, bit)
                try:
                    if self.count % _VERIFY_EVERY == 0:
                        self._expect(paths, bit, verify_checkpoint(run, _BROKEN).is_intact)
                    else:
                        read_shard(run, run.manifest(_BROKEN, 0), arena, engines=engines)
                        self._expect(paths, bit, is_unnoticed=True)
                except DataError:
                    pass
                if paths[0].suffix == ".mf":
                    self._decode(paths[0].read_bytes(), bit)
                if self.count % _RESTART_EVERY == 0:
                    return True
                for path in paths:
                    flip(path, bit)
        return False

    def restart(self) -> None:
        """Open the store as the last flip left it: the other checkpoint stands, this one is found to be bad."""
        self.restart_count += 1
        with opened(self._store.dirs) as (store, _):
            run = store.run(_UID, "flips")
            if _OTHER not in run.offered():
                self.failures.append(f"flip {self.count}: checkpoint {_OTHER} is not offered")
            if _BROKEN in run.offered() and verify_checkpoint(run, _BROKEN).is_intact:
                self.failures.append(f"flip {self.count}: not found after a restart")
        self._store.put_back()

    def _place(self) -> tuple[Sequence[Path], int]:
        """Return a bit of a segment, or of all copies of the manifest: one alone is made good by another."""
        paths = self._store.manifests
        if self._random.random() < 0.6:
            paths = [self._random.choice(self._store.segments)]
        size = paths[0].stat().st_size
        # Most of them where headers stand and files end: that is where rules meet.
        edge = self._random.choice((range(size), range(min(size, 4096)), range(max(0, size - 512), size)))
        return paths, 8 * self._random.choice(edge) + self._random.randrange(8)

    def _decode(self, content: bytes, bit: int) -> None:
        for decode in (decode_manifest, decode_manifest_head):
            try:
                decode(content)
            except DataError:
                continue
            self.failures.append(f"flip {self.count}: {decode.__name__} does not find bit {bit}")

    def _expect(self, paths: Sequence[Path], bit: int, is_unnoticed: bool) -> None:
        if is_unnoticed:
            self.failures.append(f"flip {self.count}: bit {bit} of {paths[0].name} is not found")


def flip_bits(*, count: int, seed: int, duration_s: float = math.inf) -> Summary:
    """Flip so many bits, or for so long, each alone, and return those that nobody noticed."""
    deadline_s = time.monotonic() + duration_s
    with memory_folder() as folder:
        store = _Store(folder)
        search = _Search(store, random.Random(seed))
        is_flipped = True
        while is_flipped:
            with opened(store.dirs) as (opened_store, _):
                is_flipped = search.run(opened_store.run(_UID, "flips"), count, deadline_s)
            if is_flipped:
                search.restart()
    return Summary(
        what="bit flips",
        count=search.count,
        failures=tuple(search.failures),
        seed=seed,
        counted={"of them seen by a restart too": search.restart_count},
    )
