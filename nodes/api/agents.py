"""REST API of agents: their reports, tokens and state."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from ninja import Router, Schema, Status
from ninja.security import HttpBearer
from pydantic import Field

from nodes.models import Agent
from nodes.telemetry import enrolment, intake
from nodes.telemetry.fields import GPU_FIELDS
from portal import process_counters
from portal.http.api import ApiRequest, Bearer, Session
from portal.http.openapi import deprecated, described, with_former_names
from portal.http.posts import ReportEndpoint, response_of
from portal.sysadmins import only_sysadmins

router = Router(tags=["agents"])
machines = Router(tags=["agents"])

_BATCH = {
    "type": "object",
    "required": ["at"],
    "properties": {
        "at": {"type": "integer", "minimum": 0, "description": "Unix second of the first sample."},
        "period": {"type": "integer", "minimum": 1},
        "n": {"type": "integer", "minimum": 0, "description": "Number of samples in each column."},
        "gpus": {
            "type": "array",
            "items": {"type": "string"},
            "description": "UUIDs of the GPUs: one row of each column per GPU.",
        },
        "columns": {
            "type": "object",
            "description": f"{', '.join(GPU_FIELDS)}; null: not reported.",
            "additionalProperties": {
                "type": "array",
                "items": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
            },
        },
        "host": {
            "type": "object",
            "additionalProperties": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
        "processes": {
            "type": "array",
            "items": {"type": "object", "required": ["gpu", "pid"]},
        },
        "events": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["kind", "at"],
                "properties": {"kind": {"type": "string"}, "at": {"type": "number"}, "gpu": {"type": "string"}},
            },
        },
    },
}
_POST = {
    "type": "object",
    "required": ["version", "stream", "first", "boot_id", "sent_at", "batches"],
    "properties": {
        "version": {"const": 1},
        "stream": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
        "first": {"type": "integer", "minimum": 0, "description": "Number of the first batch."},
        "given_up": {"type": "integer", "minimum": 0, "description": "How many earlier batches were discarded."},
        "boot_id": {"type": "string"},
        "sent_at": {"type": "number"},
        "agent": {"type": "string", "description": "The agent's version."},
        "batches": {"type": "array", "items": _BATCH, "maxItems": 60},
    },
}
_ACCEPTED = {
    "type": "object",
    "required": ["next"],
    "properties": {
        "next": {"type": "integer", "description": "Number of the next batch to send."},
        "plant": {
            "type": "object",
            "description": "A fault that a game day wants injected; only for agents that allow it.",
            "required": ["id", "fault", "seconds"],
            "properties": {
                "id": {"type": "integer"},
                "fault": {"type": "string"},
                "seconds": {"type": "number"},
            },
        },
    },
}


class MachineToken(Schema):
    """A token with which one node's agent reports. It is shown only once."""

    node: str
    token: str


class SecretShape(Schema):
    """A secret with which agents enrol themselves, each name once. It is shown only once."""

    secret: str
    expires_at: datetime


class AgentShape(Schema):
    """The state of a node's agent."""

    node: str
    version: str
    enrolled_at: datetime | None
    enrolled_by: str
    last_report_at: datetime | None = Field(description="Null: it has never reported.")
    heard_at: datetime | None = deprecated("last_report_at")
    is_silent: bool
    sampled_at: int | None = Field(description="Unix second of its newest sample.")
    clock_offset_s: float | None = Field(description="The agent's clock minus the portal's.")
    gpus: int
    discarded_batches: int = Field(description="Batches of samples that the agent discarded for lack of space.")
    given_up: int = deprecated("discarded_batches")
    is_made_up: bool


class Agents(Schema):
    items: list[AgentShape]
    next: str | None = None


class BySecret(HttpBearer):
    """An enrolment secret in the Authorization header."""

    def authenticate(self, request: HttpRequest, token: str) -> str | None:
        return token if token.startswith(enrolment.SECRET) else None


@machines.post(
    "/{str:name}/telemetry",
    auth=None,
    throttle=[],
    summary="Send an agent's reports",
    openapi_extra=described(
        {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _POST}}},
            "responses": {200: {"description": "Accepted.", "content": {"application/json": {"schema": _ACCEPTED}}}},
            "security": [{"Bearer": []}],
        },
        errors={
            400: "The body is not UTF-8.",
            401: "The token does not belong to this node.",
            413: "The body is too large: send smaller posts.",
            415: "The body is compressed with something other than gzip.",
            422: "The report is invalid. `errors` names the fields.",
        },
    ),
)
def receive_telemetry(request: HttpRequest, name: str) -> HttpResponse:
    """Store an agent's batches, each once.

    The bearer token is valid for this node only. A post that does not continue where its stream ended changes nothing;
    continue with the returned number, even if it is lower.
    """
    chunks = iter(lambda: request.read(65_536), b"")
    headers = request.headers
    return response_of(_answer, name, headers.get("Authorization", ""), headers.get("Content-Encoding", ""), chunks)


def _answer(node: str, authorization: str, encoding: str, chunks: Iterable[bytes]) -> HttpResponse:
    with process_counters.count_post("telemetry"):
        answer = intake.receive(node, authorization, encoding, chunks)
    return HttpResponse(msgspec.json.encode(answer), content_type="application/json")


def _admit(node: str, authorization: str) -> None:
    intake.admit(node, authorization)


FAST_PATH = ReportEndpoint(re.compile(r"/api/v1/nodes/([A-Za-z0-9._-]{1,255})/telemetry"), _answer, _admit)


@machines.post(
    "/{str:name}/token",
    auth=[BySecret(), Bearer(), Session()],
    throttle=[],
    response=MachineToken,
    summary="Create a node's token (sysadmins, or with an enrolment secret)",
    openapi_extra=described(
        errors={
            403: "Only for sysadmins, with a token of scope admin.",
            409: "With a secret: this name is already enrolled.",
            422: "Not a valid node name.",
        }
    ),
)
def make_token(request: HttpRequest, name: str) -> dict[str, str]:
    """Issue a token for a node's agent, replacing the previous one. An enrolment secret enrols each name only once."""
    auth: Any = request.auth  # type: ignore[attr-defined]
    if isinstance(auth, str):
        return {"node": name, "token": enrolment.enroll_by_secret(name, auth)}
    only_sysadmins(request, "enrol nodes")  # type: ignore[arg-type]
    return {"node": name, "token": enrolment.enroll(name, by=auth)}


@router.post(
    "/secret",
    response={201: SecretShape},
    summary="Create a secret with which many nodes enrol, each name once (sysadmins)",
    openapi_extra=described(errors={403: "Only for sysadmins, with a token of scope admin."}),
)
def make_secret(request: ApiRequest) -> Status[dict[str, Any]]:
    """Create an enrolment secret for the nodes' image, with which agents get their tokens. It is valid for 30 days."""
    only_sysadmins(request, "enrol nodes")
    row, secret = enrolment.make_secret(request.auth)
    return Status(201, {"secret": secret, "expires_at": row.expires_at})


@router.get("", response=Agents, summary="All agents: version, last report, gaps, clock")
def agents(request: ApiRequest) -> dict[str, Any]:
    """List every node that has or had an agent, sorted by name."""
    return {"items": [agent_shape(agent) for agent in Agent.objects.described()]}


def agent_shape(agent: Agent) -> dict[str, Any]:
    copied = ("node", "version", "enrolled_at", "enrolled_by", "sampled_at", "clock_offset_s", "is_made_up")
    counted: Any = agent
    shown = {name: getattr(agent, name) for name in copied} | {
        "last_report_at": agent.heard_at,
        "is_silent": agent.is_silent(timezone.now()),
        "gpus": counted.gpu_count,
        "discarded_batches": counted.lost_batches,
    }
    return with_former_names(shown, heard_at="last_report_at", given_up="discarded_batches")
