"""One row of an Arrow table as bytes: a binary or text cell as it is, or the row as an Arrow IPC stream."""

from collections.abc import Sequence
from typing import Any, cast

from ...core.errors import CorruptDataError, UsageError
from .extras import import_extra


def read_row(data: bytes | bytearray | memoryview) -> dict[str, object]:
    """Return column -> value of a row that get_bytes returned as an IPC stream; CorruptDataError for other bytes."""
    pa = import_extra("pyarrow", "arrow", "read_row")
    try:
        table = import_extra("pyarrow.ipc", "arrow", "read_row").open_stream(pa.py_buffer(data)).read_all()
        table.validate(full=True)
        if table.num_rows != 1:
            raise CorruptDataError(f"the bytes hold {table.num_rows} rows, expected one")
        (row,) = cast("list[dict[str, object]]", table.to_pylist())
    except arrow_errors() as exc:
        raise CorruptDataError(f"the bytes are no row: {exc}") from exc
    return row


def arrow_errors() -> tuple[type[Exception], ...]:
    """Return what pyarrow raises on damaged bytes: times out of Python's range and unknown zones among it."""
    pa = import_extra("pyarrow", "arrow", "Arrow data")
    return pa.ArrowException, OSError, EOFError, ValueError, LookupError, OverflowError, TypeError


def check_names(schema: Any, wanted: Sequence[str] | None, where: str) -> None:
    """Return if each of the columns, all without `wanted`, is there once; UsageError otherwise."""
    names: list[str] = list(schema.names)
    if wanted is not None and not wanted:
        raise UsageError(
            "columns= is empty", hint="name the columns of a row, or leave it away for all of them"
        )
    for name in wanted if wanted is not None else names:
        if name not in names:
            raise UsageError(
                f"{where} has no column {name!r}, only {', '.join(names[:20])}", hint="look at its schema"
            )
        if names.count(name) > 1:
            raise UsageError(
                f"{where} has the column {name!r} twice", hint="rename one: a row is a mapping of names"
            )


def check_column(schema: Any, column: str, where: str) -> None:
    """Return if a column, or `struct.field`, holds bytes or text; UsageError names what there is otherwise."""
    pa = import_extra("pyarrow", "arrow", "a column")
    if list(schema.names).count(column) > 1:
        raise UsageError(f"{where} has the column {column!r} twice", hint="rename one of them")
    try:
        kind = schema.field(column).type if column in schema.names else _nested_type(schema, column)
    except KeyError:
        raise UsageError(
            f"{where} has no column {column!r}, only {', '.join(schema.names[:20])}",
            hint="fields of a struct are named by a dot: image.bytes",
        ) from None
    is_bytes = pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary
    is_text = pa.types.is_string, pa.types.is_large_string
    if not any(check(kind) for check in (*is_bytes, *is_text)):
        raise UsageError(
            f"column {column!r} of {where} is {kind}, not bytes or text",
            hint="leave column= away: each sample is then a whole row, for read_row",
        )


def top_column(schema: Any, column: str) -> str:
    """Return the name of the top-level column that holds `column`."""
    return column if column in schema.names else column.partition(".")[0]


def cell_bytes(table: Any, row: int, column: str, index: int) -> bytes:
    """Return a cell's bytes, copied, so that they do not keep a whole row group; UsageError where it is null."""
    name, _, field = (column, "", "") if column in table.schema.names else column.partition(".")
    scalar = table.column(name)[row]
    if field and scalar.is_valid:
        scalar = scalar[field]
    if not scalar.is_valid:
        raise UsageError(
            f"column {column!r} is null in row {index}",
            hint="remove such rows, or leave column= away and use read_row",
        )
    data: bytes = scalar.as_buffer().to_pybytes()
    return data


def row_bytes(table: Any, row: int) -> bytes:
    """Return a row as an Arrow IPC stream with its schema, without the metadata that writers add."""
    pa = import_extra("pyarrow", "arrow", "a row")
    ipc = import_extra("pyarrow.ipc", "arrow", "a row")
    one = table.slice(row, 1).replace_schema_metadata(None)
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, one.schema) as writer:
        writer.write(one)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _nested_type(schema: Any, column: str) -> Any:
    name, _, field = column.partition(".")
    kind = schema.field(name).type  # KeyError where there is none
    pa = import_extra("pyarrow", "arrow", "a column")
    if not field or not pa.types.is_struct(kind) or kind.get_field_index(field) < 0:
        raise KeyError(column)
    return kind.field(field).type
