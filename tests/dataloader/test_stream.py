"""Streams without random access: resumed by what they say of themselves, and refused where they say nothing."""

import io
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from everstep.core.errors import LoaderStateError, UsageError
from everstep.dataloader import DataLoader, ShardStream

pytestmark = pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
N = 30
State = dict[str, object]


class Plain(IterableDataset[int]):
    """Numbers, shared between workers; says nothing."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, N, step))


class Knowing(IterableDataset[float]):
    """The same with a state, and a random number between 0 and 1 added to each."""

    noise = False

    def __init__(self) -> None:
        self.next: int | None = None

    def __iter__(self) -> Iterator[float]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        self.next = first if self.next is None else self.next
        while self.next < N:
            self.next += step
            yield self.next - step + (random.random() if self.noise else 0)
        self.next = None

    def state_dict(self) -> State:
        return {"next": self.next}

    def load_state_dict(self, state_dict: State) -> None:
        self.next = cast("int | None", state_dict["next"])


class KnowingIterator:
    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> int:
        if self.at == N:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def __iter__(self) -> "KnowingIterator":
        return self

    def state_dict(self) -> State:
        return {"at": self.at}

    def load_state_dict(self, state_dict: State) -> None:
        self.at = cast(int, state_dict["at"])


class OfIterators(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return KnowingIterator()


def make(data: object, **arguments: object) -> DataLoader[object]:
    build = cast(Callable[..., DataLoader[object]], DataLoader)
    return build(data, **({"batch_size": 4, "seed": 1} | arguments))


def numbers(batch: object) -> list[float]:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [cast(float, batch)]


def stored(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return json.loads(json.dumps(torch.load(file, weights_only=True)))


def noisy() -> Knowing:
    data = Knowing()
    data.noise = True
    return data


@pytest.mark.parametrize("data", [noisy, OfIterators])
@pytest.mark.parametrize("arguments", [{}, {"drop_last": True}, {"batch_size": None}, {"batch_size": 5}])
def test_resumed_at_every_batch_it_goes_on_as_if_nothing_had_been(
    data: Callable[[], object], arguments: dict[str, object]
) -> None:
    undisturbed = make(data(), **arguments)
    epochs = [[numbers(batch) for batch in undisturbed] for _ in range(2)]
    for steps in range(len(epochs[0]) + 1):
        first = make(data(), **arguments)
        batches = iter(first)
        before = [numbers(next(batches)) for _ in range(steps)]
        state = stored(first.state_dict())
        second = make(data(), **arguments)
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert before + [numbers(batch) for batch in second] == epochs[0]
        assert second.epoch == 1
        assert [numbers(batch) for batch in second] == epochs[1]


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 8])
def test_two_workers_each_go_on_in_their_share(steps: int) -> None:
    """What they prefetched comes again: it was not handed out. The worker whose turn it was is first."""
    whole = [numbers(batch) for batch in make(noisy(), num_workers=2)]
    assert sorted(int(each) for batch in whole for each in batch) == list(range(N))
    first = make(noisy(), num_workers=2)
    batches = iter(first)
    before = [numbers(next(batches)) for _ in range(steps)]
    second = make(noisy(), num_workers=2)
    second.load_state_dict(stored(first.state_dict()))
    seen = before + [numbers(batch) for batch in second]
    assert seen == whole


def test_epochs_and_batches_are_torchs() -> None:
    for workers in (0, 2):
        ours = make(Plain(), num_workers=workers)
        for _ in range(2):
            theirs = TorchDataLoader(Plain(), batch_size=4, num_workers=workers)
            assert [numbers(batch) for batch in ours] == [numbers(batch) for batch in theirs]
        assert ours.epoch == 2
    with pytest.raises(TypeError):
        len(make(Plain()))
    for arguments in ({"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]], "batch_size": 1}):
        with pytest.raises(ValueError, match="DataLoader with IterableDataset"):
            make(Plain(), **arguments)


def test_a_stream_that_says_nothing_is_iterated_and_refused_for_resume() -> None:
    first = make(Plain())
    batches = iter(first)
    next(batches)
    state = stored(first.state_dict())
    with pytest.raises(
        LoaderStateError, match=r"Plain did not say where it stands.*give the dataset state_dict"
    ):
        make(Plain()).load_state_dict(state)
    assert len(list(batches)) == 7
    second = make(Plain())
    second.load_state_dict(stored(first.state_dict()))  # between epochs there is nothing to say
    assert (second.epoch, len(list(second))) == (1, 8)


def test_iter_after_a_break() -> None:
    knowing, plain = make(Knowing()), make(Plain())
    for loader in (knowing, plain):
        next(iter(loader))
    with pytest.warns(UserWarning, match="goes on with epoch 0 at sample 4"):
        assert numbers(next(iter(knowing))) == [4, 5, 6, 7]
    with pytest.warns(UserWarning, match="Plain does not say where it stands: iter.. begins its epoch anew"):
        assert numbers(next(iter(plain))) == [0, 1, 2, 3]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("workers", [0, 2])
def test_beside_another_that_ends_with_it_each_epoch_is_whole(workers: int) -> None:
    """A zip asks the second one for no batch beyond the first one's last, so that it never hears of its end."""
    loader = make(Knowing(), num_workers=workers)
    whole = [numbers(batch) for batch in make(Knowing(), num_workers=workers)]
    for epoch in range(3):
        pairs = list(zip(range(8), loader, strict=False))
        assert loader.epoch == epoch
        assert [numbers(batch) for _, batch in pairs] == whole


@pytest.mark.parametrize("unused", [False, True])
def test_a_state_of_an_end_has_an_empty_rest_once(unused: bool) -> None:
    first, second = make(Knowing()), make(Knowing())
    list(zip(range(8), first, strict=False))
    second.load_state_dict(stored(first.state_dict()))
    rest = iter(second)
    if not unused:
        assert list(rest) == []
    assert numbers(next(iter(second))) == [0, 1, 2, 3]
    assert second.epoch == 1


def test_other_ranks_are_refused_in_the_middle_of_an_epoch_and_fine_between_epochs() -> None:
    first = make(Knowing())
    batches = iter(first)
    next(batches)
    with pytest.raises(LoaderStateError, match="of rank 0 of 1, this is rank 1 of 2"):
        make(Knowing(), rank=1, world_size=2).load_state_dict(first.state_dict())
    assert len(list(batches)) == 7
    second = make(Knowing(), rank=1, world_size=2, num_workers=2)
    second.load_state_dict(stored(first.state_dict()))
    assert (second.epoch, len(list(second))) == (1, 8)


@pytest.mark.parametrize(
    "source",
    [
        {"shards": [1]},
        {"shards": []},
        {"shards": [{"own": 1}]},
        {"shards": "x"},
        {"next_worker": 1},
        {"workers": 2},
    ],
)
def test_garbage_is_refused(source: dict[str, object]) -> None:
    first = make(Knowing())
    next(iter(first))
    state = first.state_dict()
    with pytest.raises(LoaderStateError, match=r"is no position of \d workers"):
        make(Knowing()).load_state_dict({**state, "source": {**cast(State, state["source"]), **source}})


def test_a_dataset_that_lost_its_state_is_refused() -> None:
    first = make(Knowing())
    next(iter(first))
    other = make(Plain())
    state = first.state_dict()
    other.load_state_dict({**state, "dataset": other.state_dict()["dataset"]})
    with pytest.raises(LoaderStateError, match="Plain has no load_state_dict"):
        list(other)


def test_state_is_detached() -> None:
    first = make(Knowing())
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    copy = json.loads(json.dumps(state))
    next(batches)
    assert state == copy
    cast(State, state["source"])["shards"] = None
    assert cast(State, first.state_dict()["source"])["shards"] is not None


def test_only_the_newest_iterator_goes_on() -> None:
    loader = make(Knowing())
    old = iter(loader)
    next(old)
    loader.reset()
    with pytest.raises(UsageError, match="a newer one took over"):
        next(old)


class Failing(Plain):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        raise OSError("disk gone")


def test_an_error_of_the_stream_reaches_the_loop_once() -> None:
    batches = iter(make(Failing()))
    next(batches)
    with pytest.raises(OSError, match="disk gone"):
        next(batches)
    with pytest.raises(UsageError, match="ended with an error"):
        next(batches)


# -- shards ---------------------------------------------------------------------------------------------------------


class Lines:
    """Opens files; counts the lines that are read."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def __call__(self, name: str) -> Iterable[object]:
        self.opened.append(Path(name).name)
        with Path(name).open() as file:
            yield from file


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    for shard in range(5):
        (tmp_path / f"{shard}").write_text("".join(f"{100 * shard + line}\n" for line in range(shard + 3)))
    return [str(tmp_path / f"{shard}") for shard in range(5)]


ALL = sorted(100 * shard + line for shard in range(5) for line in range(shard + 3))


def as_number(line: object) -> int:
    return int(cast(str, line))


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_resume_inside_a_shard(shards: list[str], workers: int) -> None:
    def build() -> DataLoader[object]:
        return make(ShardStream(shards, Lines(), as_number, seed=4), batch_size=3, num_workers=workers)

    whole = [numbers(batch) for batch in build()]
    assert sorted(each for batch in whole for each in batch) == ALL
    for steps in range(0, len(whole) + 1, 1 + workers):
        first = build()
        batches = iter(first)
        before = [numbers(next(batches)) for _ in range(steps)]
        second = build()
        second.load_state_dict(stored(first.state_dict()))
        seen = before + [numbers(batch) for batch in second]
        assert sorted(each for batch in seen for each in batch) == ALL
        if workers == 0:
            assert seen == whole


def test_a_resume_opens_no_shard_before_and_decodes_no_sample_before(shards: list[str]) -> None:
    lines, decoded = Lines(), list[int]()

    def decode(line: object) -> int:
        decoded.append(as_number(line))
        return decoded[-1]

    stream = ShardStream(shards, lines, decode, shuffle=False)
    stream.load_state_dict({"epoch": 0, "turn": 2, "offset": 3, "shards": 5})
    assert list(stream) == decoded == [203, 204, *range(300, 306), *range(400, 407)]
    assert lines.opened == ["2", "3", "4"]


def test_ranks_share_shards_and_epochs_differ(shards: list[str]) -> None:
    def seen(rank: int, epoch: int) -> list[int]:
        stream = ShardStream(shards, Lines(), as_number, seed=4, ranks=(rank, 2))
        stream.set_epoch(epoch)
        return list(stream)

    assert sorted(seen(0, 0) + seen(1, 0)) == sorted(seen(0, 1) + seen(1, 1)) == ALL
    assert seen(0, 0) != seen(0, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_says_which_rank_a_worker_is_of(shards: list[str], workers: int) -> None:
    """torch.distributed is not there in a worker: each rank would take all shards."""
    seen: list[float] = []
    for rank in range(2):
        loader = make(ShardStream(shards, Lines(), as_number), rank=rank, world_size=2, num_workers=workers)
        seen += [each for batch in loader for each in numbers(batch)]
    assert sorted(seen) == ALL
    given = ShardStream(shards, Lines(), as_number, ranks=(0, 1))
    assert sorted(each for batch in make(given, rank=1, world_size=2) for each in numbers(batch)) == ALL


def test_shards_that_changed_are_found(shards: list[str]) -> None:
    stream = ShardStream(shards, Lines(), as_number, shuffle=False)
    with pytest.raises(LoaderStateError, match="the state is of 4 shards, here are 5"):
        stream.load_state_dict({"epoch": 0, "turn": 0, "offset": 0, "shards": 4})
    with pytest.raises(LoaderStateError, match="not a position in shards"):
        stream.load_state_dict({"epoch": 0})
    stream.load_state_dict({"epoch": 0, "turn": 0, "offset": 9, "shards": 5})
    with pytest.raises(LoaderStateError, match=r"0' has 3 samples, at the checkpoint at least 9"):
        list(stream)
    with pytest.raises(UsageError, match="at least one shard"):
        ShardStream([], Lines())


def test_a_stream_is_no_map() -> None:
    class Both(Dataset[int]):
        pass

    with pytest.raises(UsageError, match="has no __getitem__ or no __len__"):
        make(Both())
