"""Starting workers by spawn: what cannot be pickled is named by its path; after a fork nothing need be."""

import threading
from typing import Any

import pytest
from fragile import ids, loader_of

from everstep.core.errors import UsageError


class Plain:
    def __init__(self, **owned: object) -> None:
        self.__dict__.update(owned)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"dataset": Plain(transform=lambda x: x)}, r"dataset\.transform"),
        ({"dataset": Plain(files={"a": [threading.Lock()]})}, r"dataset\.files\['a'\]\[0\]"),
        ({"dataset": Plain(inner=Plain(connection=threading.local()))}, r"dataset\.inner\.connection"),
        ({"dataset": Plain(), "collate_fn": lambda batch: batch}, "collate_fn"),
        ({"dataset": Plain(), "worker_init_fn": lambda worker: None}, "worker_init_fn"),
    ],
    ids=["lambda", "lock", "deep", "collate_fn", "worker_init_fn"],
)
def test_what_cannot_be_pickled_is_named(arguments: dict[str, Any], path: str, method: str) -> None:
    loader = loader_of(**arguments, multiprocessing_context=method)
    with pytest.raises(UsageError, match=rf"^{path} cannot be pickled.*spawn or forkserver.*fork"):
        iter(loader)


def test_fork_needs_no_pickling() -> None:
    loader = loader_of(Plain(transform=lambda x: x), batch_size=2)
    assert sorted(each for batch in loader for each in ids(batch)) == [0, 1, 2, 3]
