"""Describe and send a table as a CSV file for spreadsheets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from django.http import HttpRequest, StreamingHttpResponse

from portal.http.api import stream
from portal.http.download import as_download
from vigil_core import csv_text


def description(header: Sequence[str], *, most: int | None = None) -> dict[str, Any]:
    """Return the part of `described` that documents the CSV response; `most`: its limit of rows, if it has one."""
    text = ",".join(header) + (f": {most:,} rows at most." if most is not None else "")
    return {"responses": {200: {"description": text, "content": {"text/csv": {"schema": {"type": "string"}}}}}}


def csv_response(
    request: HttpRequest, name: str, header: Sequence[str], rows: Callable[[], Iterable[Sequence[object]]]
) -> StreamingHttpResponse:
    """Return the CSV file; `rows` is called in a thread where the database may be queried."""

    def text() -> Iterator[str]:
        yield csv_text.write(rows())

    return csv_stream(request, name, header, text())


def csv_stream(request: HttpRequest, name: str, header: Sequence[str], pieces: Iterable[str]) -> StreamingHttpResponse:
    """Return a long CSV file, whose lines come in pieces; each piece is made in a thread."""

    def text() -> Iterator[str]:
        yield csv_text.write([header])
        yield from pieces

    return as_download(stream(request, text(), "text/csv; charset=utf-8"), name)
