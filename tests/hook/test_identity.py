"""Objects are the same where they are the very same, however they compare."""

import pytest

from everstep.hook import identity
from everstep.hook.identity import same


class Agreeable:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture(params=["by pointers", "one by one"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one by one":
        monkeypatch.setattr(identity, "_PROVEN", False)


def test_this_interpreter_keeps_pointers_as_expected() -> None:
    assert identity._is_proven()


def test_the_same_objects_in_the_same_order_are_the_same() -> None:
    seen = tuple(Agreeable() for _ in range(1000))
    assert same(seen, seen)
    assert same(list(seen), seen)
    assert same(iter(seen), seen)
    assert same((), ())


@pytest.mark.parametrize("place", [0, 500, 999])
def test_one_that_is_only_equal_is_seen(place: int) -> None:
    seen = tuple(Agreeable() for _ in range(1000))
    found = list(seen)
    found[place] = Agreeable()
    assert found == list(seen)
    assert not same(found, seen)


def test_fewer_more_or_another_order_is_seen() -> None:
    one, other = Agreeable(), Agreeable()
    assert not same([one], (one, other))
    assert not same([one, other, one], (one, other))
    assert not same([other, one], (one, other))
