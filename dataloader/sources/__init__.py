"""Where samples come from: stored formats as one small protocol, read at random by number.

Names are imported when they are first used: numpy, torch, pyarrow and fsspec only by what needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arrow_rows import read_row
    from .arrow_source import ArrowSource
    from .dataset import SourceDataset
    from .image_folder import ImageFolderSource
    from .jsonl_source import JsonlSource
    from .map_source import MapSource
    from .megatron_source import MegatronSource, TokenWindows
    from .object_source import ObjectSource
    from .parquet_source import ParquetSource
    from .parts_format import read_parts
    from .protocol import ReadsBlocks, ReadsFiles, Source
    from .tar_source import TarSource

__all__ = [
    "ArrowSource",
    "ImageFolderSource",
    "JsonlSource",
    "MapSource",
    "MegatronSource",
    "ObjectSource",
    "ParquetSource",
    "ReadsBlocks",
    "ReadsFiles",
    "Source",
    "SourceDataset",
    "TarSource",
    "TokenWindows",
    "read_parts",
    "read_row",
]

_LAZY = {
    "ArrowSource": ".arrow_source",
    "ImageFolderSource": ".image_folder",
    "JsonlSource": ".jsonl_source",
    "MapSource": ".map_source",
    "MegatronSource": ".megatron_source",
    "ObjectSource": ".object_source",
    "ParquetSource": ".parquet_source",
    "ReadsBlocks": ".protocol",
    "ReadsFiles": ".protocol",
    "Source": ".protocol",
    "SourceDataset": ".dataset",
    "TarSource": ".tar_source",
    "TokenWindows": ".megatron_source",
    "read_parts": ".parts_format",
    "read_row": ".arrow_rows",
}


def __getattr__(name: str) -> object:
    """Return a public name, importing its module at the first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
