"""Send a response as a file to save."""

from __future__ import annotations

from typing import TypeVar

from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header

Response = TypeVar("Response", bound=HttpResponseBase)


def as_download(response: Response, name: str) -> Response:
    """Make browsers save the response as a file of this name, whatever characters a run gave it."""
    response.headers["Content-Disposition"] = content_disposition_header(True, name) or "attachment"
    return response
