"""What a folder of torch.distributed.checkpoint holds, read without unpickling anything in this process (ADR 0023)."""

import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from ..core.errors import CorruptDataError, DeadlineError, NotFoundError

FILE_NAME = ".metadata"
CONTENT_BYTES_MAX = 256 * 1024 * 1024
ANSWER_BYTES_MAX = 1024 * 1024 * 1024
DEADLINE_S = 60.0

_CHILD = Path(__file__).with_name("dcp_metadata_child.py")


class StoredChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor, and the bytes of a file that hold it as `torch.save` wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in chunks."""

    name: str
    dtype: str
    size: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


class StoredObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that is no tensor, as `torch.save` wrote it."""

    name: str
    file: str
    offset: int
    length: int


class DcpMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a folder holds. Nothing of it has been compared with the files yet."""

    tensors: tuple[StoredTensor, ...] = ()
    objects: tuple[StoredObject, ...] = ()
    paths: dict[str, tuple[str | int, ...]] = msgspec.field(default_factory=dict[str, tuple[str | int, ...]])
    """Of a flattened name: the keys and list indices that it was made of."""
    refused: str = ""
    """Why the child read nothing; never seen by a caller of `read_metadata`."""


_METADATA = msgspec.json.Decoder(DcpMetadata)


def read_metadata(folder: Path) -> DcpMetadata:
    """Return what the folder's `.metadata` says; a process without privileges unpickles it into stand-ins.

    Raises:
        NotFoundError: there is none.
        CorruptDataError: it is larger than allowed, or anything but DCP's metadata; what it asked for is named.
        DeadlineError: reading it takes too long.
    """
    path = folder / FILE_NAME
    try:
        size_bytes = path.stat().st_size
        if size_bytes > CONTENT_BYTES_MAX:
            raise CorruptDataError(f"{path} has {size_bytes} bytes, more than {CONTENT_BYTES_MAX}")
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no {path}", hint="name a folder that DCP has saved to") from error
    answer = _ask_child(path, content)
    try:
        found = _METADATA.decode(answer)
    except msgspec.MsgspecError as error:
        raise CorruptDataError(
            f"{path} could not be read within the memory and time allowed", hint="was it made by DCP?"
        ) from error
    if found.refused:
        raise CorruptDataError(f"{path} was refused: {found.refused}", hint="was it made by DCP?")
    return found


def _ask_child(path: Path, content: bytes) -> bytes:
    """Return what the child printed; nothing where it was ended by a limit."""
    command = [sys.executable, "-I", "-S", str(_CHILD), str(len(content))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", env={}
    ) as child:
        timer = threading.Timer(DEADLINE_S, child.kill)
        timer.start()
        feeder = threading.Thread(target=_feed, args=(child, content), name="everstep-metadata")
        feeder.start()
        try:
            assert child.stdout is not None
            answer = child.stdout.read(ANSWER_BYTES_MAX)
        finally:
            late = not timer.is_alive()
            timer.cancel()
            child.kill()
            feeder.join()
            timer.join()
    if late:
        raise DeadlineError(f"{path} was not read within {DEADLINE_S:.0f} s", hint="was it made by DCP?")
    return answer


def _feed(child: "subprocess.Popen[bytes]", content: bytes) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(content)
        child.stdin.close()
    except OSError:  # it has ended: its answer, or that there is none, says why
        return
