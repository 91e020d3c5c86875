"""Build problem documents (RFC 9457): how the API reports what went wrong and what to do about it."""

import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import TypedDict

from django.conf import settings
from django.http import HttpResponse

MEDIA_TYPE = "application/problem+json"
PRIVATE = "private, no-store"
"""Cache-Control header of all responses except static files."""


MAX_DETAIL, MAX_ERROR = 20_000, 2_000
"""Maximum characters of quoted request text in a document, which may be, for example, a key of 500 kB."""


class FieldError(TypedDict):
    """An error of a field, named by its dotted path."""

    field: str
    message: str


class Problem(Exception):
    """Raise it anywhere below an API endpoint; it becomes the response."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        kind: str = "",
        errors: Iterable[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.kind = kind
        self.errors = list(errors)
        self.headers = dict(headers or {})

    def response(self) -> HttpResponse:
        body = {
            "type": f"urn:vigil:problem:{self.kind}" if self.kind else "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": _short(self.detail, MAX_DETAIL),
            "errors": [{name: _short(str(text), MAX_ERROR) for name, text in error.items()} for error in self.errors],
        }
        return HttpResponse(json.dumps(body), status=self.status, content_type=MEDIA_TYPE, headers=self.headers)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def unauthorized(reason: str) -> Problem:
    remedy = f"Sign in, or send `Authorization: Bearer …` with a token from {settings.VIGIL_PUBLIC_URL}/me/."
    return Problem(401, f"{reason} {remedy}", kind="unauthorized", headers={"WWW-Authenticate": 'Bearer realm="Vigil"'})


DETAILS = {
    400: "The request could not be read.",
    404: "No such address. /api/docs lists the API's addresses.",
    405: "This address does not support this method.",
    413: "The request is too large.",
    429: "Too many requests.",
    500: "Vigil failed to answer. The server's log says why.",
    503: "Vigil cannot answer just now. Try again in a moment.",
}


def plain(status: int, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Return the document of an error about which only its status is known."""
    return Problem(status, DETAILS.get(status, HTTPStatus(status).phrase + "."), headers=headers).response()
