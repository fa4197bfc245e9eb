"""The JSON files beside a Hugging Face dataset on disk (`save_to_disk`): which Arrow files make it up.

`dataset_dict.json` in a folder of splits: {"splits": [names]}. `state.json` in the folder of a dataset:
{"_data_files": [{"filename": name}], "_fingerprint": text, …}. Other keys are ignored.
"""

from typing import Annotated

import msgspec

from ...core.errors import CorruptDataError, UsageError

STATE_FILE = "state.json"
SPLITS_FILE = "dataset_dict.json"
JSON_BYTES_MAX = 64 << 20


class _DataFile(msgspec.Struct):
    filename: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class _State(msgspec.Struct):
    data_files: list[_DataFile] = msgspec.field(name="_data_files")
    fingerprint: str | None = msgspec.field(default=None, name="_fingerprint")
    indices_files: list[_DataFile] | None = msgspec.field(default=None, name="_indices_data_files")
    indices_file: object = msgspec.field(default=None, name="_indices_files")


class _Splits(msgspec.Struct):
    splits: list[str]


_STATE = msgspec.json.Decoder(_State)
_SPLITS = msgspec.json.Decoder(_Splits)


def parse_state(data: bytes) -> tuple[list[str], str]:
    """Return (names of the Arrow files in order, fingerprint or "") of a state.json.

    Raises:
        CorruptDataError: it is no state.json, or names a file outside its folder.
        UsageError: the dataset is a selection of rows, as old versions of `datasets` saved it.
    """
    try:
        state = _STATE.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CorruptDataError(f"{STATE_FILE}: {exc}") from exc
    if state.indices_files or state.indices_file:
        raise UsageError(
            "the dataset on disk is a selection of rows by a list of indices",
            hint="call flatten_indices() and save it again",
        )
    names = [each.filename for each in state.data_files]
    for name in names:
        if "/" in name or "\0" in name or name in {".", ".."}:
            raise CorruptDataError(f"{STATE_FILE} names the file {name!r}, which is not in its folder")
    return names, state.fingerprint or ""


def parse_splits(data: bytes) -> list[str]:
    """Return the names of the splits of a dataset_dict.json; CorruptDataError otherwise."""
    try:
        splits = _SPLITS.decode(data).splits
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CorruptDataError(f"{SPLITS_FILE}: {exc}") from exc
    if any(not name or "/" in name or "\0" in name or name in {".", ".."} for name in splits):
        raise CorruptDataError(f"{SPLITS_FILE} names the splits {splits!r}")
    return splits
