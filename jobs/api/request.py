"""Parse requests about jobs: a spec in any of three forms, the idempotency key, and the job in the path."""

import difflib
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest, HttpResponse
from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr, ValidationError

from jobs.disk import upload
from jobs.errors import Conflict, IdempotencyConflict, LogError, ProfileError, Refused, SpecError
from jobs.models import Job, Sweep
from jobs.spec import JobSpec, SweepSpec, has_sweep, plain_toml, read_toml, write_toml
from portal.access import Action, can
from portal.http.api import Api, ApiRequest, bad_field, plain_message, too_large
from portal.http.openapi import described
from portal.http.problems import FieldError, Problem
from vigil_core import bounded
from vigil_core.bounded import Bounds
from vigil_core.untrusted import whole

NOT_YOURS = "The job belongs to somebody else and you do not lead its project, or the token is read-only."
SUBMIT_FORBIDDEN = "You may not do this in this project or on this scheduler, or the token is read-only."
TYPES = "Send application/json, application/toml or multipart/form-data."
# A specification, wrapped in an object.
_BODY = Bounds(depth=bounded.SPECIFICATION.depth + 1, items=bounded.SPECIFICATION.items + 10)
TOML_TYPES = frozenset({"application/toml", "text/toml", "application/x-toml", "text/x-toml"})


class SpecBody(BaseModel):
    """A spec as JSON or as TOML text; exactly one of the two."""

    model_config = ConfigDict(extra="forbid")
    spec: dict[str, Any] | None = None
    spec_toml: StrictStr | None = None
    parent: StrictInt | None = None


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A request to submit a job."""

    spec: JobSpec
    spec_toml: str
    parent: int | None = None
    code: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """A request to submit a sweep."""

    spec: SweepSpec
    spec_toml: str
    code: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class _RawRequest:
    """The unvalidated content of a request. `text` is the spec as it was written, if it was TOML."""

    data: dict[str, Any]
    text: str | None = None
    parent: int | None = None
    code: bytes | None = None


_SPEC = {"type": "object", "description": "See /api/v1/spec/schema.", "additionalProperties": True}
_EXAMPLE = {"name": "first-run", "kind": "distributed", "run": {"recipe": "language", "steps": 200}}
_EXAMPLE_TOML = 'name = "first-run"\nkind = "distributed"\n\n[run]\nrecipe = "language"\nsteps = 200\n'
_PROPERTIES = {"spec_toml": {"type": "string"}, "parent": {"type": "integer", "description": "The job this clones."}}
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"spec": _SPEC, **_PROPERTIES},
                    "oneOf": [{"required": ["spec"]}, {"required": ["spec_toml"]}],
                    "additionalProperties": False,
                },
                "example": {"spec": _EXAMPLE},
            },
            "application/toml": {"schema": {"type": "string"}, "example": _EXAMPLE_TOML},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        **_PROPERTIES,
                        "code": {
                            "type": "string",
                            "format": "binary",
                            "description": "The directory of [script] or [client] as tar.gz.",
                        },
                    },
                    "required": ["spec_toml"],
                }
            },
        },
    }
}
KEY_HEADER: dict[str, Any] = {
    "parameters": [
        {
            "in": "header",
            "name": "Idempotency-Key",
            "required": False,
            "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
            "description": "A repeat with the same key and body within 24 hours only returns the same response.",
        }
    ]
}
SUBMISSION = described(BODY, KEY_HEADER, errors={403: SUBMIT_FORBIDDEN, 415: TYPES})
"""API documentation of a request that submits a job or a sweep."""


def job_request(request: HttpRequest) -> JobRequest:
    """Return the validated job in the request. Raises SpecError or Problem."""
    found = job_or_sweep_request(request)
    if isinstance(found, SweepRequest):
        raise Problem(422, "This specification has [sweep]: send it to /api/v1/sweeps.", kind="sweep")
    return found


def sweep_request(request: HttpRequest) -> SweepRequest:
    """Return the validated sweep in the request. Raises SpecError or Problem."""
    found = job_or_sweep_request(request)
    if isinstance(found, JobRequest):
        raise Problem(422, "This specification has no [sweep]: send it to /api/v1/jobs.", kind="no-sweep")
    return found


def job_or_sweep_request(request: HttpRequest) -> JobRequest | SweepRequest:
    """Return a job, or a sweep if the spec has [sweep]."""
    sent = _raw_request(request)
    if not has_sweep(sent.data):
        spec = JobSpec.parse(sent.data)
        text = sent.text if sent.text is not None else write_toml(spec)
        return JobRequest(spec=spec, spec_toml=text, parent=sent.parent, code=sent.code)
    if sent.parent is not None:
        raise bad_field("parent", "A sweep cannot be cloned from a job. Omit this field.")
    text = sent.text if sent.text is not None else plain_toml(sent.data)
    return SweepRequest(spec=SweepSpec.parse(sent.data, text), spec_toml=text, code=sent.code)


def key_of(request: HttpRequest) -> str | None:
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not 1 <= len(key) <= 255 or not all("!" <= letter <= "~" for letter in key):
        raise bad_field("Idempotency-Key", "At most 255 visible ASCII characters, such as a random UUID.")
    return key


def job_of(request: ApiRequest, job_id: int, action: Action = "see", *, doing: str = "") -> Job:
    """Return the job if the person may do this to it. Raises a 404 Problem for jobs that they cannot see."""
    jobs = Job.objects.visible_to(request.auth).with_latest_attempt()
    job = jobs.filter(pk=job_id).first()
    if job is None:
        raise Problem(404, f"There is no job {job_id} that you can see.")
    if action != "see" and not can(request.auth, action, job):
        remedy = f"#{job_id} is {job.owner}'s: ask them or a lead of {job.project}."
        raise Problem(403, f"Not {doing or 'changed'}. {remedy}", kind="refused")
    return job


def sweep_of(request: ApiRequest, sweep_id: int, action: Action = "see", *, doing: str = "") -> Sweep:
    """Return the sweep if the person may do this to it. Raises a 404 Problem for sweeps that they cannot see."""
    sweeps = Sweep.objects.visible_to(request.auth).select_related("project", "owner")
    sweep = sweeps.filter(pk=sweep_id).first()
    if sweep is None:
        raise Problem(404, f"There is no sweep {sweep_id} that you can see.")
    if action != "see" and not can(request.auth, action, sweep):
        remedy = f"Sweep {sweep_id} is {sweep.owner}'s: ask them or a lead of {sweep.project}."
        raise Problem(403, f"Not {doing or 'changed'}. {remedy}", kind="refused")
    return sweep


def install(api: Api) -> None:
    """Register the responses to errors about jobs."""
    api.add_exception_handler(SpecError, _spec_problem)
    api.add_exception_handler(Refused, lambda request, error: Problem(403, str(error), kind="refused").response())
    api.add_exception_handler(Conflict, lambda request, error: Problem(409, str(error), kind="conflict").response())
    for missing in (LogError, ProfileError):
        api.add_exception_handler(missing, lambda request, error: Problem(404, str(error)).response())
    api.add_exception_handler(
        IdempotencyConflict,
        lambda request, error: Problem(
            422, str(error), kind="idempotency", errors=[{"field": "Idempotency-Key", "message": str(error)}]
        ).response(),
    )


def _spec_problem(request: HttpRequest, error: SpecError | type[SpecError]) -> HttpResponse:
    assert isinstance(error, SpecError)
    errors = [FieldError(field=problem.field, message=problem.message) for problem in error.problems]
    return Problem(422, str(error), kind="invalid-spec", errors=errors).response()


def _json(body: bytes) -> dict[str, Any]:
    try:
        return bounded.json_object(_text(body), _BODY)
    except bounded.TooComplex as error:
        raise bad_field("spec", f"The body has {error}. Move data into separate files.") from error
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"The body is not JSON: {error}.", kind="malformed") from error


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Problem(400, "The body is not UTF-8.", kind="malformed") from error


def _raw_request(request: HttpRequest) -> _RawRequest:
    kind = request.content_type or ""
    if kind == "application/json":
        return _from_body(_json(request.body))
    if kind in TOML_TYPES:
        return _from_toml(_text(request.body))
    if kind == "multipart/form-data":
        return _from_form(request)
    raise Problem(415, TYPES, kind="media-type")


def _from_body(data: dict[str, Any], code: bytes | None = None) -> _RawRequest:
    try:
        body = SpecBody.model_validate(data)
    except ValidationError as error:
        errors = [
            FieldError(field=".".join(map(str, e["loc"])), message=_body_message(dict(e))) for e in error.errors()
        ]
        raise Problem(422, "The body is invalid.", kind="invalid", errors=errors) from error
    if (body.spec is None) == (body.spec_toml is None):
        raise bad_field("spec", "Send either spec (an object) or spec_toml (the text), and not both.")
    if body.spec_toml is not None:
        return _from_toml(body.spec_toml, parent=body.parent, code=code)
    assert body.spec is not None
    return _RawRequest(data=body.spec, parent=body.parent, code=code)


def _body_message(error: dict[str, Any]) -> str:
    """Return what is wrong with a field of the body. A spec's own field suggests that the spec was not wrapped."""
    message, field = plain_message(error), str(error["loc"][-1])
    if error["type"] != "extra_forbidden":
        return message
    if field in JobSpec.model_fields:
        return f'{message} Did you mean to wrap the specification in "spec"?'
    close = difflib.get_close_matches(field[:80], list(SpecBody.model_fields), n=1, cutoff=0.6)
    return f'{message} Did you mean "{close[0]}"?' if close else message


def _from_toml(text: str, *, parent: int | None = None, code: bytes | None = None) -> _RawRequest:
    return _RawRequest(data=read_toml(text), text=text, parent=parent, code=code)


def _from_form(request: HttpRequest) -> _RawRequest:
    data: dict[str, Any] = dict(request.POST.items())
    if (parent := whole(data.get("parent"))) is not None:
        data["parent"] = parent
    if unknown_files := set(request.FILES) - {"code", "spec_toml"}:
        text = "Unknown file name. Send the program's directory as one file named code, and its TOML as spec_toml."
        raise bad_field(sorted(unknown_files)[0], text)
    if isinstance(file := request.FILES.get("spec_toml"), UploadedFile):  # curl's -F spec_toml=@job.toml
        if (file.size or 0) > settings.DATA_UPLOAD_MAX_MEMORY_SIZE:  # as of a field
            raise too_large()
        data["spec_toml"] = _text(bytes(file.read()))
    return _from_body(data, _code(request.FILES.get("code")))


def _code(file: Any) -> bytes | None:
    if not isinstance(file, UploadedFile):
        return None
    if (file.size or 0) > upload.MAX_BYTES:
        raise too_large()
    return bytes(file.read())
