"""POST /api/v1/attempts/<id>/reports: the shippers' door. `DOOR` is the short way; the operation answers the same."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from django.http import HttpRequest, HttpResponse
from ninja import Router

from jobs.intake import reports
from portal import counted
from portal.http.openapi import described
from portal.http.posts import Door, answered

router = Router(tags=["reports"])

_COLUMNS = {
    "type": "object",
    "required": ["runs", "step", "value"],
    "properties": {
        "runs": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
            "description": "[stream index, batch index, number of points], cutting the columns.",
        },
        "step": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "value": {
            "type": "array",
            "items": {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
        },
    },
}
_STREAM = {
    "type": "object",
    "required": ["id", "incarnation", "rank", "first", "times"],
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
        "incarnation": {"type": "integer", "minimum": 0},
        "rank": {"type": "integer"},
        "node": {"type": "string"},
        "boot_id": {"type": "string"},
        "restart_count": {"type": "integer", "minimum": 0},
        "first": {"type": "integer", "minimum": 0, "description": "seq of the first batch"},
        "times": {"type": "array", "items": {"type": "number"}, "description": "Unix seconds, one a batch"},
        "end": {"type": "boolean"},
    },
}
_POST = {
    "type": "object",
    "required": ["version", "streams"],
    "properties": {
        "version": {"const": 1},
        "streams": {"type": "array", "items": _STREAM},
        "series": {"type": "object", "additionalProperties": _COLUMNS},
        "events": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["stream", "batch", "kind", "time"],
                "properties": {
                    "stream": {"type": "integer"},
                    "batch": {"type": "integer"},
                    "kind": {"type": "string"},
                    "time": {"type": "number"},
                },
            },
        },
    },
}
_TAKEN = {
    "type": "object",
    "required": ["streams", "version"],
    "properties": {
        "streams": {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "The seq that each stream goes on with.",
        },
        "version": {"type": "integer"},
    },
}


@router.post(
    "/attempts/{attempt_id}/reports",
    auth=None,
    throttle=[],
    summary="Take what an attempt's ranks report",
    openapi_extra=described(
        {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _POST}}},
            "responses": {200: {"description": "Taken.", "content": {"application/json": {"schema": _TAKEN}}}},
            "security": [{"Bearer": []}],
        },
        errors={
            400: "It is not UTF-8.",
            401: "The attempt has ended, or the token is another's.",
            413: "It is larger than one post may be: send less at once.",
            415: "It is packed otherwise than with gzip.",
            422: "It is no report, or holds what one may not. `errors` names where.",
        },
    ),
)
def take_reports(request: HttpRequest, attempt_id: int) -> HttpResponse:
    """Takes what trainers report: the bearer is the attempt's own token. A stream whose `first` is not what Vigil
    expects next is left alone, the others of the same post are taken; obey the answered numbers even when they are
    lower.
    """
    chunks = iter(lambda: request.read(65_536), b"")
    headers = request.headers
    authorization, encoding = headers.get("Authorization", ""), headers.get("Content-Encoding", "")
    return answered(_answer, str(attempt_id), authorization, encoding, chunks)


def _answer(whose: str, authorization: str, encoding: str, chunks: Iterable[bytes]) -> HttpResponse:
    with counted.posting("reports"):
        answer = reports.receive(int(whose), authorization, encoding, chunks)
    body = msgspec.json.encode({"streams": answer.streams, "version": answer.version})
    return HttpResponse(body, content_type="application/json")


def _admit(whose: str, authorization: str) -> None:
    reports.admit(int(whose), authorization)


DOOR = Door(re.compile(r"/api/v1/attempts/(\d{1,18})/reports"), _answer, _admit)
