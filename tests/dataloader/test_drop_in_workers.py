"""In the place of torch's DataLoader: what datasets, worker_init_fn and errors meet in worker processes.

docs/loader-drop-in.md says what of upstream's behaviour applies, and what differs on purpose.
"""

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drop_in import ours, torchs
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from everstep.core.errors import UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning"),
]


class Reporting:
    """Sample i is what `report(i)` returns."""

    def __init__(self, report: Any, count: int = 12) -> None:
        self._report = report
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> object:
        return self._report(index)


def reports(report: Any, count: int = 12, **arguments: object) -> list[Any]:
    defaults = {"num_workers": 2, "batch_size": None, "collate_fn": lambda sample: sample}
    return list(ours(Reporting(report, count), **{**defaults, **arguments}))


# -- who a worker is ------------------------------------------------------------------------------------------------


def test_get_worker_info() -> None:
    def report(_index: int) -> tuple[int, int, int, str, int]:
        info = get_worker_info()
        assert info is not None
        return info.id, info.num_workers, info.seed, type(info.dataset).__name__, torch.initial_seed()

    seen = reports(report, num_workers=3, augment_seed=False)
    assert get_worker_info() is None
    assert {(id_, count, name) for id_, count, _, name, _ in seen} == {(i, 3, "Reporting") for i in range(3)}
    base = {seed - id_ for id_, _, seed, _, _ in seen}
    assert len(base) == 1, "as in torch the seed is one base seed plus the worker's number"
    assert all(seed % 2**64 == initial % 2**64 for _, _, seed, _, initial in seen)


def test_workers_use_one_thread_no_cuda_and_may_have_no_children() -> None:
    def report(_index: int) -> tuple[int, bool, bool]:
        return torch.get_num_threads(), torch.cuda.is_initialized(), multiprocessing.current_process().daemon

    assert set(reports(report)) == {(1, False, True)}


def test_torch_computes_in_workers_after_the_trainer_used_its_threads() -> None:
    weight = torch.ones(64, 64)
    torch.nn.functional.conv2d(torch.ones(8, 3, 32, 32), torch.ones(4, 3, 3, 3))
    assert {float(each) for each in reports(lambda i: (weight @ weight)[0, i])} == {64.0}


def test_without_augment_seed_workers_take_turns_and_repeat_their_numbers() -> None:
    def report(_index: int) -> tuple[int, float, float]:
        info = get_worker_info()
        assert info is not None
        return info.id, float(torch.rand(())), float(np.random.rand())

    first = reports(report, augment_seed=False, seed=5)
    assert [worker for worker, *_ in first] == [0, 1] * 6
    assert len({number for _, number, _ in first}) == 12
    assert first == reports(report, augment_seed=False, seed=5)
    assert first != reports(report, augment_seed=False, seed=6)


def test_worker_init_fn_runs_once_in_each_worker_before_any_sample(tmp_path: Path) -> None:
    def init(worker: int) -> None:
        with (tmp_path / f"{worker}").open("a") as file:
            file.write("x")

    loader = ours(
        Reporting(lambda _index: sorted(path.name for path in tmp_path.iterdir()) != []),
        num_workers=2,
        worker_init_fn=init,
        persistent_workers=True,
    )
    for _ in range(2):
        assert all(bool(each.all()) for each in loader)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "x", "1": "x"}


def test_a_seed_that_worker_init_fn_sets_holds_with_augment_seed_off(tmp_path: Path) -> None:
    def init(_worker: int) -> None:
        torch.manual_seed(4321)
        (tmp_path / "ran").touch()

    def report(_index: int) -> int:
        return torch.initial_seed()

    assert set(reports(report, worker_init_fn=init, augment_seed=False)) == {4321}
    assert (tmp_path / "ran").exists()
    seen = reports(report, worker_init_fn=init)
    assert len(set(seen)) == 12, "each sample has a seed of its own, set just before it is read"
    assert seen == reports(report, num_workers=0)


@pytest.mark.parametrize(("num_workers", "ranks"), [(0, 1), (2, 1), (0, 2), (2, 2)])
def test_workers_and_ranks_share_a_datapipe_with_a_sharding_filter(num_workers: int, ranks: int) -> None:
    def epochs(seed: int) -> list[list[int]]:
        shared: list[list[int]] = [[], []]
        for rank in range(ranks):
            pipe: Any = IterableWrapper(range(24))
            pipe = pipe.shuffle(buffer_size=24).sharding_filter()
            place = {"rank": rank, "world_size": ranks}
            loader = ours(pipe, shuffle=True, num_workers=num_workers, seed=seed, **place)
            for seen in shared:
                seen += [int(each) for each in loader]
        return shared

    first, second = epochs(5)
    assert sorted(first) == sorted(second) == list(range(24)), "each sample once, over workers and ranks"
    assert first != second
    assert [first, second] == epochs(5)
    assert first != epochs(6)[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_datapipe_that_does_not_shuffle_is_given_a_shuffler(num_workers: int) -> None:
    def epoch(shuffle: bool | None) -> list[int]:
        pipe: Any = IterableWrapper(range(40))
        return [int(each) for each in ours(pipe.sharding_filter(), shuffle=shuffle, num_workers=num_workers)]

    with pytest.warns(UserWarning, match="does not contain a `Shuffler`"):
        shuffled = epoch(True)
    assert sorted(shuffled) == list(range(40))
    assert shuffled != list(range(40))
    assert epoch(False) == epoch(None) == list(range(40))


def test_workers_that_hand_out_more_than_a_streams_length_are_not_warned_of() -> None:
    class Unshared(IterableDataset[int]):
        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    loader = ours(Unshared(), num_workers=2)
    assert len(loader) == 6
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*samples have been fetched")
        assert sorted(int(each) for each in loader) == sorted([*range(6), *range(6)])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_seed_that_a_sample_sees_fits_into_a_tensor(num_workers: int) -> None:
    loader = ours(Reporting(lambda _index: torch.initial_seed(), 64), num_workers=num_workers, batch_size=8)
    seen = torch.cat(list(loader))
    assert len(set(seen.tolist())) == 64
    assert seen.dtype == torch.int64
    assert int(seen.min()) >= 0


def test_persistent_workers_keep_processes_and_their_dataset() -> None:
    class Counting:
        reads = 0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, _index: int) -> tuple[int, int]:
            self.reads += 1
            return os.getpid(), self.reads

    loader = ours(Counting(), num_workers=1, batch_size=None, persistent_workers=True)
    epochs = [list(loader) for _ in range(3)]
    assert len({pid for epoch in epochs for pid, _ in epoch}) == 1
    assert [reads for epoch in epochs for _, reads in epoch] == list(range(1, 13))
    again = ours(Counting(), num_workers=1, batch_size=None)
    assert len({next(iter(again))[0] for _ in range(1)} | {pid for pid, _ in epochs[0]}) == 2


def test_no_more_is_prefetched_than_prefetch_factor_says(tmp_path: Path) -> None:
    def report(index: int) -> int:
        (tmp_path / f"{index}").touch()
        return index

    loader = ours(Reporting(report, 100), num_workers=2, prefetch_factor=3, batch_size=1)
    iterator = iter(loader)
    for handed in (1, 2, 3):
        next(iterator)
        while len(list(tmp_path.iterdir())) < handed + 6:
            pass
    del iterator
    assert len(list(tmp_path.iterdir())) == 3 + 6


# -- errors ---------------------------------------------------------------------------------------------------------


class OddError(Exception):
    """Cannot be made from a message alone."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


class MessageError(Exception):
    """Wants its message by name."""

    message = "m"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)


def raising(make: Any) -> Any:
    def report(index: int) -> int:
        if index == 5:
            raise make()
        return index

    return report


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: ValueError("five"), ValueError),
        (lambda: OSError(5, "five"), OSError),
        (lambda: UnicodeDecodeError("utf8", b"five", 0, 1, "five"), RuntimeError),
        (lambda: OddError(1, 2), RuntimeError),
        (lambda: MessageError(message="five"), MessageError),
        (lambda: type("Local", (Exception,), {})("five"), RuntimeError),
        (lambda: NotImplementedError("five"), NotImplementedError),
    ],
    ids=["value", "os", "decode", "odd", "message", "local", "subclass"],
)
def test_an_error_of_the_dataset_keeps_its_class_and_the_workers_traceback(
    make: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as info:
        reports(raising(make))
    assert type(info.value) is kind
    text = str(info.value)
    assert text.startswith("Caught ")
    assert "in DataLoader worker process" in text
    assert "Original Traceback (most recent call last):" in text
    assert "in report" in text


def test_the_text_of_a_key_error_can_be_read() -> None:
    with pytest.raises(KeyError) as info:
        reports(raising(lambda: KeyError("no such key")))
    assert "\nOriginal Traceback" in str(info.value), "lines, not \\n"
    assert "no such key" in str(info.value)


def test_an_error_comes_in_its_turn() -> None:
    iterator = iter(ours(Reporting(raising(lambda: ValueError("five"))), num_workers=2))
    assert [int(next(iterator)) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(iterator)


def test_stop_iteration_of_the_dataset_does_not_end_the_epoch_quietly() -> None:
    with pytest.raises(UsageError, match="raised StopIteration at sample 5"):
        reports(raising(StopIteration))


def test_an_error_of_worker_init_fn_comes_with_the_first_batch() -> None:
    def init(worker: int) -> None:
        raise ValueError(f"init of {worker}")

    iterator = iter(ours(Reporting(lambda i: i), num_workers=2, worker_init_fn=init))
    with pytest.raises(ValueError, match=r"(?s)Caught ValueError in DataLoader worker process 0.*init of 0"):
        next(iterator)


def test_a_batch_that_cannot_be_sent_is_an_error_where_torch_hangs() -> None:
    with pytest.raises(Exception, match=r"(?s)worker process \d, which could not send its batch.*pickle"):
        reports(lambda _index: lambda: None)


def test_a_batch_that_cannot_be_received_is_an_error() -> None:
    class Unloadable:
        def __reduce__(self) -> tuple[object, ...]:
            return int, ("not a number",)

    with pytest.raises(ValueError, match="not a number"):
        reports(lambda _index: Unloadable())


# -- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"num_workers": 1, "prefetch_factor": -1},
        {"multiprocessing_context": "fork"},
        {"num_workers": 1, "multiprocessing_context": "none such"},
        {"num_workers": 1, "multiprocessing_context": 3.5},
    ],
    ids=str,
)
def test_bad_arguments_are_refused_as_torch_does(arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as theirs:
        torchs(list(range(4)), **arguments)
    with pytest.raises(type(theirs.value)) as info:
        ours(list(range(4)), **arguments)
    assert str(info.value) == str(theirs.value)


def test_what_torch_asserts_is_said_with_a_hint() -> None:
    with pytest.raises(UsageError, match="prefetch_factor=0"):
        iter(ours(list(range(4)), num_workers=1, prefetch_factor=0))
    with pytest.raises(UsageError, match="timeout=1 needs num_workers"):
        iter(ours(list(range(4)), timeout=1))


def test_pin_memory_without_a_device_warns_as_torch_does() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    for num_workers in (0, 1):
        with pytest.warns(
            UserWarning, match="no accelerator is found, then device pinned memory won't be used"
        ):
            assert len(list(ours(list(range(4)), num_workers=num_workers, pin_memory=True))) == 4
    with (
        pytest.warns(UserWarning, match="deprecated"),
        pytest.warns(UserWarning, match="no accelerator is found"),
    ):
        assert len(list(ours(list(range(4)), pin_memory=True, pin_memory_device="cuda"))) == 4


def test_a_context_may_be_a_name_or_an_object() -> None:
    context = multiprocessing.get_context("fork")
    assert (
        ours(list(range(4)), num_workers=1, multiprocessing_context=context).multiprocessing_context
        is context
    )
    loader = ours(list(range(4)), num_workers=1, multiprocessing_context="fork")
    assert type(loader.multiprocessing_context) is type(context)


# -- beside others --------------------------------------------------------------------------------------------------


def test_several_loaders_at_once_and_within_each_other() -> None:
    outer, inner = ours(list(range(6)), num_workers=2), ours(list(range(4)), num_workers=2)
    assert [(int(a), [int(b) for b in inner]) for a in outer] == [(a, [0, 1, 2, 3]) for a in range(6)]
    assert list(zip(ours([1, 2], num_workers=1), ours([3, 4], num_workers=1), strict=True)) == [
        (1, 3),
        (2, 4),
    ]


def test_a_loader_in_a_thread() -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend(int(i) for i in ours(list(range(9)), num_workers=2)))
    thread.start()
    thread.join()
    assert seen == list(range(9))


def test_a_dead_worker_raises_nothing_beside_torchs_own_loader(tmp_path: Path) -> None:
    """torch's SIGCHLD handler, installed with its first workers, raises wherever the trainer is; not for ours."""
    theirs = iter(torchs(list(range(100)), num_workers=1, multiprocessing_context="fork"))
    next(theirs)

    def report(index: int) -> int:
        if index == 3 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    assert reports(report) == list(range(12))
    assert (tmp_path / "died").exists()
    assert int(next(theirs)) == 1


def test_torchs_other_sharing_strategy() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        batches = reports(lambda i: torch.full((5000,), float(i)))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    assert [float(each[-1]) for each in batches] == [float(i) for i in range(12)]
