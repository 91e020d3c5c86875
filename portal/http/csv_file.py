"""A table as a CSV file that people open in a spreadsheet: how an operation describes it, and how it is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from django.http import HttpRequest, StreamingHttpResponse

from portal.http.api import stream
from vigil_core import csv_text


def description(header: Sequence[str], *, most: int) -> dict[str, Any]:
    """A part of `described`."""
    text = f"{','.join(header)}: {most:,} rows at most."
    return {"responses": {200: {"description": text, "content": {"text/csv": {"schema": {"type": "string"}}}}}}


def answer(
    request: HttpRequest, name: str, header: Sequence[str], rows: Callable[[], Iterable[Sequence[object]]]
) -> StreamingHttpResponse:
    """The file; `rows` is called where the database may be asked."""

    def text() -> Iterator[str]:
        yield csv_text.write([header, *rows()])

    found = stream(request, text(), "text/csv; charset=utf-8")
    found.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return found
