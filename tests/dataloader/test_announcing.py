"""What is read next reaches the datasets that want to hear it, through torch's that join or cut others."""

import pickle
from collections.abc import Sequence

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from everstep.dataloader.announcing import announcer


class Told(Dataset[int]):
    """Hears what is read next of it; a list of its own, so that a copy in a worker is another."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.heard: list[list[int]] = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index

    def will_read(self, indices: Sequence[int]) -> None:
        self.heard.append(list(indices))


class Deaf(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def tell(dataset: Dataset[int], ids: Sequence[int]) -> None:
    told = announcer(dataset)
    assert told is not None
    told(ids)


def test_a_concatenation_tells_each_part_its_own_samples() -> None:
    first, deaf, last = Told(4), Deaf(), Told(5)
    tell(ConcatDataset([first, deaf, last]), [0, 11, 3, 4, 7, 6, -1])
    assert first.heard == [[0, 3]]
    assert last.heard == [[4, 0, 4]]


def test_parts_of_parts_are_told_too() -> None:
    first, last = Told(4), Told(5)
    joined = ConcatDataset([Subset(first, [3, 1]), ConcatDataset([Deaf(), last])])
    tell(Subset(joined, [1, 0, 5, 9]), [0, 1, 2, 3])
    assert first.heard == [[1, 3]]
    assert last.heard == [[0, 4]]


@pytest.mark.parametrize("dataset", [Deaf(), ConcatDataset([Deaf(), Deaf()]), Subset(Deaf(), [0])])
def test_where_nobody_wants_to_hear_nothing_is_told(dataset: Dataset[int]) -> None:
    assert announcer(dataset) is None


def test_the_way_travels_to_workers() -> None:
    told = announcer(ConcatDataset([Deaf(), Told(5)]))
    copy = pickle.loads(pickle.dumps(told))  # as spawn does with a loader's dataset
    copy([4])
    assert copy.parts[1].__self__.heard == [[1]]
