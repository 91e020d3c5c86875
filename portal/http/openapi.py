"""Describe the API's errors in its OpenAPI document: each operation's errors by status, each a problem document.

Most follow from what an operation is: whether it needs a user, has a body or a name in its address. Errors that are
specific to an operation are declared by `described(errors=…)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from portal.http import problems

SAFE = frozenset({"get", "head", "options"})
DEFAULT_TEXTS = {
    400: "The body is not JSON, or not an object.",
    401: "Not signed in, or the token is unknown, revoked or expired.",
    403: "The token is read-only, or a session's CSRF token is missing.",
    404: "Not found, or not visible to you.",
    413: "The body is too large for this address.",
    415: "This address does not accept bodies of this type.",
    422: "A parameter or field is unknown or invalid. `errors` names each, with what is valid.",
    429: "More requests per minute than one person may send.",
    500: "Vigil failed to answer. Its log says why.",
    503: "Vigil cannot answer just now: its database is busy.",
}
_HEADERS = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    429: {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
    503: {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
}


def deprecated(replacement: str) -> Any:
    """Return the schema field for a value that another field replaces; clients of earlier releases still read it."""
    return Field(description=f"Deprecated: use `{replacement}`.", json_schema_extra={"deprecated": True})


def with_former_names(values: Mapping[str, Any], **former: str) -> dict[str, Any]:
    """Return the values, each named by `former` (former name = present name) also under its former name."""
    return {**values, **{old: values[new] for old, new in former.items()}}


def described(*parts: Mapping[str, Any], errors: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return an operation's `openapi_extra`: the parts merged, and what these errors mean for this operation."""
    operation: dict[str, Any] = {}
    responses: dict[int, Any] = {}
    for part in parts:
        operation |= part
        responses |= part.get("responses", {})
    responses |= {status: error(status, meaning) for status, meaning in (errors or {}).items()}
    return {**operation, "responses": responses}


def error(status: int, meaning: str) -> dict[str, Any]:
    """Return the response object of that status."""
    answer: dict[str, Any] = {
        "description": meaning,
        "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}},
    }
    return answer | ({"headers": _HEADERS[status]} if status in _HEADERS else {})


def complete(method: str, operation: dict[str, Any]) -> None:
    """Add the errors that follow from the operation's properties."""
    responses = operation["responses"]
    for status in sorted(_usual(method, operation) - set(responses)):
        responses[status] = error(status, DEFAULT_TEXTS[status])
    operation["responses"] = dict(sorted(responses.items()))


def _usual(method: str, operation: dict[str, Any]) -> set[int]:
    found = {422, 500, 503}  # 422: an unknown query parameter
    if {"Session": []} not in operation["security"]:  # not for users: it documents its own refusals
        return found
    found |= {401, 429} | (set() if method in SAFE else {403})
    places = {parameter["in"] for parameter in operation.get("parameters", ())}
    if "path" in places:
        found.add(404)
    if "requestBody" in operation:
        found |= {400, 413}
    return found
