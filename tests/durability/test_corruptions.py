"""Structures that no write leaves behind: refused with a declared error, or made good by a copy; never believed."""

import os
import random
from collections.abc import Callable, Generator

import pytest
from corruptions import CHANGES, NEEDS_ROOT, Change, Places
from places import memory_folder
from spoil_search import spoil_stores
from spoilt_store import (
    FIRST,
    SECOND,
    SPOTS,
    Checkpoints,
    Template,
    check_fsck,
    check_opened,
    make_template,
    spoil,
    survivors,
)
from structures import SPOILS_BOTH, STRUCTURES

from everstep.core.ids import CheckpointId


@pytest.fixture(scope="module")
def template() -> Generator[Template]:
    with memory_folder() as folder:
        yield make_template(folder)


@pytest.mark.parametrize("check", [check_opened, check_fsck], ids=["opened", "fsck"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_spoilt_file_is_found_and_never_believed(
    template: Template, change: Change, check: Callable[[Template, Places, Checkpoints | None, str], None]
) -> None:
    if change in NEEDS_ROOT and os.geteuid() != 0:
        pytest.skip("needs root: device nodes")
    source = random.Random(change.__name__)
    for name, spot in SPOTS.items():
        with template.copy() as places:
            spoil([spot], [change], places, source)
            check(template, places, spot.stay, name)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_that_no_write_makes_is_refused(template: Template, name: str) -> None:
    with template.copy() as places:
        STRUCTURES[name](places)
        found = survivors(template, places)
        assert found is not None
        assert SECOND not in found
        assert FIRST in found or name in SPOILS_BOTH


@pytest.mark.parametrize("name", STRUCTURES)
def test_fsck_finds_a_structure_that_no_write_makes(template: Template, name: str) -> None:
    stay = frozenset[CheckpointId]() if name in SPOILS_BOTH else frozenset((FIRST,))
    with template.copy() as places:
        STRUCTURES[name](places)
        check_fsck(template, places, stay, name)


def test_these_are_two_hundred() -> None:
    assert len(CHANGES) * len(SPOTS) + len(STRUCTURES) >= 200


def test_the_search_of_soak_spoils_several_things_at_once() -> None:
    found = spoil_stores(seed=20261122, count=60)
    found.check()
    assert found.count == 60
    assert found.counted["structures"] > 0
    assert found.counted["spoilt files"] > 0
