"""When a cold run counts as a lower bound, and a warm one as an upper bound, of its stall."""

from everstep.dataloader.analysis.cold_plan import cold_reasons, warm_reasons

MIB = 2**20


def test_a_cold_run_that_read_everything_from_storage() -> None:
    assert cold_reasons(file_bytes=10 * MIB, storage_bytes=11 * MIB, unseen=[], kept=[]) == []
    assert cold_reasons(file_bytes=10 * MIB, storage_bytes=9.5 * MIB, unseen=[], kept=[]) == []
    assert cold_reasons(file_bytes=0, storage_bytes=0, unseen=[], kept=[]) == [], "a dataset without files"


def test_bytes_that_came_from_memory_are_named() -> None:
    (reason,) = cold_reasons(file_bytes=10 * MIB, storage_bytes=5 * MIB, unseen=[], kept=[])
    assert reason == "5.0 MiB of 10.0 MiB that were read came from memory all the same"
    (reason,) = cold_reasons(file_bytes=10 * MIB, storage_bytes=0, unseen=[], kept=[])
    assert "counts none from storage" in reason


def test_files_are_named_the_first_few_of_them() -> None:
    (reason,) = cold_reasons(file_bytes=0, storage_bytes=0, unseen=[f"/d/{n}" for n in range(8)], kept=[])
    assert reason == "native code opened files by itself: /d/0, /d/1, /d/2, /d/3, /d/4 and 3 more"
    (reason,) = cold_reasons(file_bytes=0, storage_bytes=0, unseen=[], kept=["/dev/shm/x"])
    assert reason.endswith("/dev/shm/x")


def test_a_warm_run_that_read_from_storage() -> None:
    assert warm_reasons(file_bytes=10 * MIB, storage_bytes=0.5 * MIB) == []
    assert warm_reasons(file_bytes=0, storage_bytes=100 * 1024) == []
    (reason,) = warm_reasons(file_bytes=10 * MIB, storage_bytes=5 * MIB)
    assert reason.startswith("5.0 MiB came from storage")
    assert warm_reasons(file_bytes=0, storage_bytes=5 * MIB), "mapped files"
