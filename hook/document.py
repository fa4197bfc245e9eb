"""Reading a component's document with the types that it must have, and one form for what does not fit."""

from collections.abc import Sequence
from typing import cast

from ..core.errors import CorruptDataError, StateMismatchError
from .stored_state import StoredState

_SHOWN = 5


class Document:
    """A JSON object of the non-tensor state; each getter raises CorruptDataError for a missing or wrong field."""

    def __init__(self, name: str, fields: object) -> None:
        """Take a decoded JSON value that must be an object; `name` is used in messages."""
        self._name = name
        if not isinstance(fields, dict):
            raise CorruptDataError(f"the stored state of {name} is not an object")
        self._fields = cast(dict[str, object], fields)

    def __contains__(self, field: str) -> bool:
        """Tell whether there is such a field."""
        return field in self._fields

    def value(self, field: str) -> object:
        """Return a field of any type."""
        if field not in self._fields:
            raise CorruptDataError(f"the stored state of {self._name} has no field {field!r}")
        return self._fields[field]

    def text(self, field: str) -> str:
        """Return a string."""
        found = self.value(field)
        if not isinstance(found, str):
            raise self._wrong(field, "a string")
        return found

    def count(self, field: str) -> int:
        """Return a non-negative integer."""
        found = self.value(field)
        if type(found) is not int or found < 0:
            raise self._wrong(field, "a count")
        return found

    def items(self, field: str) -> list[object]:
        """Return a list."""
        found = self.value(field)
        if not isinstance(found, list):
            raise self._wrong(field, "a list")
        return cast(list[object], found)

    def texts(self, field: str) -> list[str]:
        """Return a list of strings."""
        found = self.items(field)
        if not all(isinstance(item, str) for item in found):
            raise self._wrong(field, "a list of strings")
        return cast(list[str], found)

    def mapping(self, field: str) -> dict[str, object]:
        """Return an object."""
        found = self.value(field)
        if not isinstance(found, dict):
            raise self._wrong(field, "an object")
        return cast(dict[str, object], found)

    def _wrong(self, field: str, what: str) -> CorruptDataError:
        return CorruptDataError(f"the field {field!r} of the stored state of {self._name} is not {what}")


def read_document(stored: StoredState, name: str, kind: str) -> Document:
    """Return the document of a component that was written for the same kind of object.

    Raises:
        StateMismatchError: the checkpoint has no such component, or one of another kind.
        CorruptDataError: it is no object.
    """
    document = Document(name, stored.values(name))
    found = document.text("kind")
    if found != kind:
        raise StateMismatchError(
            f"{name!r} was of kind {found} when the checkpoint was made, it is of kind {kind} now",
            hint="give attach() the same objects under the same keywords",
        )
    return document


def class_name(value: object) -> str:
    """Return an object's class as a document names it."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def other_class(document: Document, value: object) -> list[str]:
    """Return the problem where one optimizer or scheduler of torch's saved a document, and another one would take it.

    Many of them take each other's state without a word, and go on as neither would. Classes of others may be renamed.
    """
    saved, here = document.text("class") if "class" in document else "", class_name(value)
    names = [each.rpartition(".")[2] for each in (saved, here) if each.startswith("torch.optim.")]
    if len(set(names)) < len((saved, here)):
        return []
    return [f"a torch.optim {names[0]} saved it, and here is a {names[1]}"]


def mismatch(name: str, problems: Sequence[str]) -> StateMismatchError:
    """Return the error that names a component and the first differences."""
    shown = "; ".join(problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return StateMismatchError(
        f"the checkpoint does not fit {name!r}: {shown}{more}",
        hint="build the objects as they were when the checkpoint was made; attach(..., back_to=) goes on from an"
        " older one, fresh=True begins this run anew, another name another run",
    )
