"""Asks a node's health service as nvidia-resiliency-ext's launcher does, and judges the answer by its rules.

The wire format is written out here, from what its 0.7.0 defines, and takes nothing from the product: so a change of a
number or a name in proto/nvhcd.proto fails a test.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc

METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """What came back, field by field."""

    success: bool
    exit_code: int
    output: str
    error: str

    @property
    def document(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.output))

    @property
    def takes_node(self) -> bool:
        """Tell whether the launcher would start workers here."""
        return self.success and self.document.get("fail_count") == 0


def ask(path: Path, args: Sequence[str] = ("--no-slurm",)) -> Answer:
    with grpc.insecure_channel(f"unix://{path}") as channel:
        call = channel.unary_unary(METHOD, request_serializer=_encode, response_deserializer=_decode)
        return call(list(args), timeout=TIMEOUT_S)


def _encode(args: list[str]) -> bytes:
    """Field 1, repeated string."""
    encoded = (text.encode() for text in args)
    return b"".join(b"\x0a" + bytes([len(each)]) + each for each in encoded if len(each) < 128)


def _decode(message: bytes) -> Answer:
    """1 success (varint), 2 exit_code (varint), 3 output (string), 4 error (string)."""
    found: dict[int, int | str] = {}
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        value, position = _varint(message, position)
        if key & 7 == 2:
            found[key >> 3] = message[position : position + value].decode()
            position += value
        else:
            assert key & 7 == 0, f"wire type {key & 7}"
            found[key >> 3] = value
    assert set(found) <= {1, 2, 3, 4}, found
    return Answer(
        success=bool(found.get(1, 0)),
        exit_code=int(found.get(2, 0)),
        output=str(found.get(3, "")),
        error=str(found.get(4, "")),
    )


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if not byte & 0x80:
            return value, position
