"""Reads a configuration from where it is: its file, the environment, flags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ...core.errors import ConfigError
from .environment_plan import environment_layer, flags_layer, private_layer
from .layers_plan import Layer, Problem, Resolved, file_layer, resolve

SIZE_BYTES_MAX = 1024 * 1024

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSources:
    """Where to look; it can be asked again, and the file is read again."""

    path: Path | None
    """None: a private daemon, which has no file."""
    environment: Mapping[str, str]
    flags: Sequence[str] = ()
    """`KEY=VALUE` each."""

    def resolve(self, struct: type[ConfigT]) -> Resolved[ConfigT]:
        """Return what they give together.

        Raises:
            ConfigError: the file cannot be read.
        """
        first = self._file(struct) if self.path is not None else private_layer(self.environment, struct)
        later = environment_layer(self.environment, struct), flags_layer(self.flags, struct)
        return resolve(struct, [first, *later])

    def _file(self, struct: type[msgspec.Struct]) -> Layer:
        assert self.path is not None
        try:
            with self.path.open("rb") as file:
                content = file.read(SIZE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(
                f"cannot read {self.path}: {error.strerror}", hint="give --config an existing file"
            ) from error
        if len(content) > SIZE_BYTES_MAX:
            raise ConfigError(
                f"{self.path} has more than {SIZE_BYTES_MAX} bytes", hint="is it the right file?"
            )
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            said = Problem(
                place=f"{self.path}:{line}",
                key="",
                message=f"not UTF-8: {error.reason}",
                hint="save it as UTF-8",
            )
            return Layer(problems=[said])
        return file_layer(text, str(self.path), struct)
