"""Dtype names of leaves and how each is written in a safetensors header."""

from ..core.errors import StateTypeError

# name -> (item size in bytes, safetensors dtype or None where the format has none: then stored as U8)
_DTYPES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2fnuz": (1, None),
    "float8_e4m3fnuz": (1, None),
    "float8_e8m0fnu": (1, None),
    "float4_e2m1fn_x2": (1, None),
    "int16": (2, "I16"),
    "uint16": (2, "U16"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "int32": (4, "I32"),
    "uint32": (4, "U32"),
    "float32": (4, "F32"),
    "complex32": (4, None),
    "int64": (8, "I64"),
    "uint64": (8, "U64"),
    "float64": (8, "F64"),
    "complex64": (8, None),
    "complex128": (16, None),
}


def itemsize_bytes(dtype: str) -> int:
    """Return the bytes of one element; StateTypeError for a dtype that the format does not know."""
    return _entry(dtype)[0]


def safetensors_dtype(dtype: str) -> str | None:
    """Return the safetensors name of a dtype, or None where it must be stored as U8."""
    return _entry(dtype)[1]


def _entry(dtype: str) -> tuple[int, str | None]:
    try:
        return _DTYPES[dtype]
    except KeyError:
        raise StateTypeError(
            f"dtype {dtype!r} is not known to format v1",
            hint=f"convert the tensor; known are {', '.join(_DTYPES)}",
        ) from None
