"""Values that were decoded, as structs: what `msgspec.convert` does, safe from several threads.

msgspec learns the fields of a struct when somebody first decodes one. Until it has learned those of the structs inside,
which runs Python and may let another thread in, it gives others what it has, and who decodes by that reads through a
null pointer: the process dies (seen with 0.22.0, where two threads read the identities of two drives). So what is
decoded is learned while its module is imported: by a `Decoder`, or by a `Converter`, made there once and for all.
"""

from typing import Any, Generic, TypeVar, cast

import msgspec

T = TypeVar("T")


class Converter(Generic[T]):
    """Makes a struct of plain values. One is made for each struct, at the level of its module."""

    def __init__(self, kind: type[T]) -> None:
        """Learn the fields of `kind`, and of what they are made of."""
        msgspec.json.Decoder(cast(Any, kind))
        self._kind = kind

    def convert(self, value: object) -> T:
        """Return the struct; msgspec.ValidationError where the value is of another form."""
        return msgspec.convert(value, self._kind)
