"""The tree of errors: every class documented, none lost on its way over a socket, messages with hints."""

import pytest

from everstep.core import errors
from everstep.core.errors import EverstepError, NodeError, StorageError, error_from_code

CLASSES = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, EverstepError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_comes_back_from_its_code_with_message_and_hint(kind: type[EverstepError]) -> None:
    sent = kind("the thing is 7", hint="make it 8")
    received = error_from_code(sent.code, sent.message, sent.hint)
    assert type(received) is kind
    assert (received.message, received.hint) == ("the thing is 7", "make it 8")
    assert str(received) == "the thing is 7 (make it 8)"


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_stands_in_the_tree_of_the_docstring(kind: type[EverstepError]) -> None:
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__


def test_a_code_of_a_newer_peer_becomes_the_root() -> None:
    received = error_from_code("TooNewError", "something", "")
    assert type(received) is EverstepError
    assert str(received) == "something"


def test_the_class_says_whether_to_retry() -> None:
    assert NodeError("x").retryable
    assert StorageError("x").retryable
    assert not errors.VersionMismatchError("x").retryable
    assert not errors.UsageError("x").retryable
    assert not errors.CorruptDataError("x").retryable
