"""Stream responses as Parquet, written by pyarrow if it is installed (docs/decisions/0025)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from portal.http.openapi import described
from portal.http.problems import Problem

MEDIA_TYPE = "application/vnd.apache.parquet"
NOT_INSTALLED = "pyarrow is not installed where the portal runs."
ROWS = 1_000_000  # per row group, the unit that readers read at once
Kind = Literal["text", "whole", "number"]
Column = NDArray[Any] | str | int | None  # a scalar applies to all rows of the piece; None: unknown


def openapi(columns: Mapping[str, Kind], errors: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return the `openapi_extra` of an operation that can respond with Parquet."""
    content = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
    operation = {"responses": {200: {"description": f"Columns {', '.join(columns)}.", "content": content}}}
    return described(operation, errors={**(errors or {}), 501: NOT_INSTALLED})


def pieces(columns: Mapping[str, Kind], rows: Iterator[Mapping[str, Column]]) -> Iterator[bytes]:
    """Yield the file in pieces, from rows given as columns. Raises Problem immediately if pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        remedy = "A sysadmin adds it with `pip install 'vigil[parquet]'` there; series.csv has the same data."
        raise Problem(501, f"{NOT_INSTALLED} {remedy}", kind="no-parquet") from None
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    types = {"text": text, "whole": pyarrow.int64(), "number": pyarrow.float64()}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in columns.items()])
    return _pieces(pyarrow, schema, rows)


def _pieces(pyarrow: Any, schema: Any, rows: Iterator[Mapping[str, Column]]) -> Iterator[bytes]:
    sink = _Sink()
    with pyarrow.parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
        waiting: list[Any] = []
        for piece in rows:
            waiting.append(_table(pyarrow, schema, piece))
            if sum(len(table) for table in waiting) >= ROWS:
                _write(pyarrow, writer, waiting)
                yield sink.taken()
        if waiting:
            _write(pyarrow, writer, waiting)
    yield sink.taken()


def _write(pyarrow: Any, writer: Any, waiting: list[Any]) -> None:
    writer.write_table(pyarrow.concat_tables(waiting).unify_dictionaries(), row_group_size=ROWS)
    waiting.clear()


def _table(pyarrow: Any, schema: Any, piece: Mapping[str, Column]) -> Any:
    length = max((len(column) for column in piece.values() if isinstance(column, np.ndarray)), default=0)
    columns = [_column(pyarrow, piece[field.name], field.type, length) for field in schema]
    return pyarrow.table(columns, schema=schema)


def _column(pyarrow: Any, column: Column, kind: Any, length: int) -> Any:
    if isinstance(column, np.ndarray):
        return pyarrow.array(column, type=kind)
    if isinstance(column, str):
        indices = pyarrow.array(np.zeros(length, np.int32))
        return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([column]))
    return pyarrow.array([column] * length, type=kind)


class _Sink:
    """A file object for pyarrow that buffers written data until it is taken."""

    closed = False

    def __init__(self) -> None:
        self._written = bytearray()

    def write(self, data: Any) -> int:
        self._written += data
        return len(data)

    def flush(self) -> None: ...

    def taken(self) -> bytes:
        taken, self._written = bytes(self._written), bytearray()
        return taken
