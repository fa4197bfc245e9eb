"""What could not be written is whole in memory: each segment as its file would be, however early writing it failed."""

import errno
import os
from pathlib import Path

import pytest

from everstep.checkpoint.checksum import first_bad_block
from everstep.checkpoint.commit import persist_shard
from everstep.checkpoint.real_storage import RealStorage
from everstep.checkpoint.segment_format import parse_header
from everstep.checkpoint.slot_manifest import slot_manifest
from everstep.checkpoint.testing import FaultyStorage, each_engine, make_state, memory_arena, opened
from everstep.core.errors import StorageError
from everstep.core.ids import CheckpointId


@pytest.mark.parametrize("call", ["free_bytes", "make_directory", "open_new_segment", "write_segment"])
def test_a_slot_can_be_restored_from_though_writing_it_failed(tmp_path: Path, call: str) -> None:
    faulty = FaultyStorage(RealStorage())
    (tmp_path / "d").mkdir()
    with opened([tmp_path / "d"], ops=faulty.as_ops()) as (store, _):
        run = store.run(os.geteuid(), "demo", create=True)
        run.begin_attempt(1, fresh=False)
        state = make_state(store, segment_count=3)
        draft = state.draft(CheckpointId(1, 1))
        with memory_arena(state.layout.slot_size_bytes) as arena, each_engine(store) as engines:
            state.copy_into(arena)
            faulty.arm(1, times=99, number=errno.ENOSPC, only=lambda made: made.name == call)
            with pytest.raises(StorageError):
                persist_shard(run, draft, arena, engines=engines)
            faulty.arm(0)
            manifest = slot_manifest(run, draft, arena)
            assert len(manifest.segments) == len(draft.segments)
            for record, plan in zip(manifest.segments, draft.segments, strict=True):
                with arena.view(plan.slot_offset_bytes, plan.file_size_bytes) as content:
                    stamp, entries = parse_header(bytes(content), record.file_size_bytes)
                    bad = first_bad_block(content, record.file_size_bytes, record.block_checksums)
                assert (stamp.segment, stamp.checkpoint) == (plan.segment, draft.checkpoint)
                assert entries == plan.entries
                assert bad is None
