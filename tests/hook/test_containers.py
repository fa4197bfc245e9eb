"""What dicts held is proven, whatever class of dict it is."""

from collections import OrderedDict, defaultdict
from typing import Any

import pytest

from everstep.hook.containers import Contents


class Listing(dict[str, object]):
    """Its values are a list of what there was when it was asked."""

    def values(self) -> Any:
        return list(super().values())


@pytest.mark.parametrize("kind", [dict, OrderedDict, defaultdict, Listing])
def test_another_value_key_or_order_is_seen(kind: type[Any]) -> None:
    one, other = [1], [1]  # they are equal, and not the same
    table, empty = kind(), kind()
    table |= {"a": one, "b": other}
    contents = Contents([table, empty])
    assert contents.hold()
    table["a"] = other
    assert not contents.hold()
    table["a"] = one
    assert contents.hold()
    table["b"] = table.pop("b")
    assert contents.hold()
    table["a"] = table.pop("a")
    assert not contents.hold()
    table["b"] = table.pop("b")
    empty["c"] = one
    assert not contents.hold()
    del empty["c"], table["b"]
    assert not contents.hold()


@pytest.mark.parametrize("kind", [dict, Listing])
def test_a_loose_value_may_become_another_loose_one_alone(kind: type[Any]) -> None:
    table = kind()
    table |= {"fixed": [1], "loose": 1}
    contents = Contents([table], is_loose=lambda value: isinstance(value, int))
    table["loose"] = 2
    assert contents.hold()
    table["loose"] = [2]
    assert not contents.hold()
    table |= {"fixed": 1, "loose": 2}
    assert not contents.hold()


def test_values_are_seen_though_keys_of_another_kind_came_and_went() -> None:
    one, other = [1], [1]
    table: dict[object, object] = {"a": one, "b": other}
    contents = Contents([table])
    table[1] = one
    assert not contents.hold()
    del table[1]
    again = Contents([table])
    assert again.hold()
    table["a"] = other
    assert not again.hold()
    assert not contents.hold()
    table["a"] = one
    assert again.hold()
