"""POST /api/v1/attempts/<id>/reports: receive the reports of shippers.

`FAST_PATH` answers without Django; the API operation gives the same answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from django.http import HttpRequest, HttpResponse
from ninja import Router

from jobs.intake import reports
from portal import process_counters
from portal.http.openapi import described
from portal.http.posts import ReportEndpoint, response_of

router = Router(tags=["reports"])

_COLUMNS = {
    "type": "object",
    "required": ["runs", "step", "value"],
    "properties": {
        "runs": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
            "description": "[stream index, batch index, number of points]: how to split the columns.",
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
        "times": {"type": "array", "items": {"type": "number"}, "description": "Unix seconds, one per batch"},
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
_RECEIPT_SCHEMA = {
    "type": "object",
    "required": ["streams", "version"],
    "properties": {
        "streams": {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "The seq with which each stream continues.",
        },
        "version": {"type": "integer"},
    },
}


@router.post(
    "/attempts/{attempt_id}/reports",
    auth=None,
    throttle=[],
    summary="Send reports of an attempt's ranks",
    openapi_extra=described(
        {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _POST}}},
            "responses": {200: {"description": "Taken.", "content": {"application/json": {"schema": _RECEIPT_SCHEMA}}}},
            "security": [{"Bearer": []}],
        },
        errors={
            400: "The body is not UTF-8.",
            401: "The attempt has ended, or the token belongs to another one.",
            413: "The body is too large: send smaller posts.",
            415: "The body is compressed with something other than gzip.",
            422: "The report is invalid. `errors` names the fields.",
        },
    ),
)
def take_reports(request: HttpRequest, attempt_id: int) -> HttpResponse:
    """Receive a trainer's reports; the bearer token is the attempt's own.

    A stream whose `first` is not what Vigil expects next is skipped, while the others in the same post are stored.
    Continue with the returned numbers even if they are lower.
    """
    chunks = iter(lambda: request.read(65_536), b"")
    headers = request.headers
    authorization, encoding = headers.get("Authorization", ""), headers.get("Content-Encoding", "")
    return response_of(_answer, str(attempt_id), authorization, encoding, chunks)


def _answer(attempt_id: str, authorization: str, encoding: str, chunks: Iterable[bytes]) -> HttpResponse:
    with process_counters.count_post("reports"):
        answer = reports.receive(int(attempt_id), authorization, encoding, chunks)
    body = msgspec.json.encode({"streams": answer.streams, "version": answer.version})
    return HttpResponse(body, content_type="application/json")


def _admit(attempt_id: str, authorization: str) -> None:
    reports.authorize(int(attempt_id), authorization)


FAST_PATH = ReportEndpoint(re.compile(r"/api/v1/attempts/(\d{1,18})/reports"), _answer, _admit)
