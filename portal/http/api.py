"""Define the API's base: authentication, error responses, and what all lists share. Endpoints live in the apps."""

import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar, cast

import msgspec
from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.cache import cache
from django.core.exceptions import BadRequest, RequestDataTooBig
from django.core.handlers.asgi import ASGIRequest
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.multipartparser import MultiPartParserError
from django.shortcuts import render
from django.utils import timezone
from ninja import NinjaAPI, Schema
from ninja.errors import AuthenticationError, HttpError, Throttled, ValidationError
from ninja.openapi.docs import Swagger
from ninja.openapi.schema import OpenAPISchema
from ninja.operation import Operation
from ninja.parser import Parser
from ninja.renderers import BaseRenderer
from ninja.security import APIKeyCookie, HttpBearer
from ninja.throttling import BaseThrottle
from ninja.utils import check_csrf
from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from portal import database
from portal.http import openapi, problems, queries
from portal.http.paging import BadCursor, Row, SortOrder, page
from portal.http.problems import FieldError, Problem
from portal.models import Token, User, digest
from vigil_core import bounded

log = logging.getLogger(__name__)
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_ERRORS = 100  # listed for one request: a body of 60,000 unknown fields was answered by 4 MB

# Text that people may write into a field or a filter: PostgreSQL stores no NUL characters.
Piece = TypeVar("Piece", str, bytes)
Text = Annotated[str, StringConstraints(max_length=200, pattern=r"^[^\x00]*$")]
Words = TypeVar("Words", str, list[str])


def _with_zone(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError("Include the time zone, as in 2026-01-31T12:00:00Z.")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("That is outside the range of dates. Leave it out.") from None


Moment = Annotated[datetime, AfterValidator(_with_zone)]
Cursor = Annotated[str | None, Field(None, max_length=500, description="`next` of the previous page.")]
Limit = Annotated[int, Field(50, ge=1, le=200, description="Items a page.")]


class PageQuery(Schema):
    """The page of a list to return: its length, and the cursor to start after."""

    limit: Limit
    cursor: Cursor


class ApiRequest(HttpRequest):
    """An authenticated request, as every endpoint receives it."""

    auth: User
    token_scope: str | None  # None: a session, which may do all that its user may


_EXAMPLE: dict[str, Any] = {
    "type": "urn:vigil:problem:invalid-spec",
    "title": "Unprocessable Entity",
    "status": 422,
    "detail": "run.global_batch: 500 does not divide over 16 ranks × micro batch 4. Nearest that do: 448 or 512.",
    "errors": [
        {
            "field": "run.global_batch",
            "message": "500 does not divide over 16 ranks × micro batch 4. Nearest that do: 448 or 512.",
        }
    ],
}


class ProblemField(Schema):
    field: str
    message: str


class ProblemDocument(Schema):
    """An RFC 9457 problem document; `errors` names fields by their dotted path."""

    model_config = {"json_schema_extra": {"example": _EXAMPLE}}
    type: str = Field(description="urn:vigil:problem:KIND, for programs to tell kinds apart; else about:blank.")
    title: str
    status: int
    detail: str = Field(description="What is wrong and what to do, for people.")
    errors: list[ProblemField]


class Bearer(HttpBearer):
    """Authenticate by a person's token in the Authorization header."""

    def authenticate(self, request: HttpRequest, token: str) -> User:
        found = Token.objects.alive().select_related("user").filter(digest=digest(token)).first()
        if found is None:
            raise problems.unauthorized("This token is unknown, revoked or expired.")
        if request.method not in SAFE and found.scope == Token.Scope.READ:
            raise Problem(403, f"The token {found.name!r} is read-only. Create one with scope write.", kind="scope")
        _note_use(found)
        request.user = found.user
        cast(ApiRequest, request).token_scope = found.scope
        return found.user


class Session(APIKeyCookie):
    """Authenticate by the browser's session; requests other than reads need its CSRF token."""

    param_name = settings.SESSION_COOKIE_NAME

    def __call__(self, request: HttpRequest) -> User | None:
        if request.headers.get("Authorization") or not isinstance(request.user, User) or not request.user.is_active:
            return None
        if request.method not in SAFE and check_csrf(request):
            raise Problem(403, "The CSRF token is missing or wrong: send it as X-CSRFToken.", kind="csrf")
        cast(ApiRequest, request).token_scope = None
        return request.user

    def authenticate(self, request: HttpRequest, key: str | None) -> None:
        """Not reached: `__call__` authenticates by the session itself."""


class PerPerson(BaseThrottle):
    """Limit the requests a minute of each person, counted per web process."""

    def allow_request(self, request: HttpRequest) -> bool:
        key = f"rate:{cast(ApiRequest, request).auth.pk}:{int(time.time() // 60)}"
        cache.add(key, 0, timeout=120)
        try:
            return cache.incr(key) <= settings.VIGIL_API_RATE
        except ValueError:  # evicted in between
            return True

    def wait(self) -> float:
        return 60 - time.time() % 60


class _Reader(Parser):
    """Parse strict JSON: no NaN, no lone surrogates, bounded in depth and length."""

    def parse_body(self, request: HttpRequest) -> dict[str, Any]:
        bounded.check_json(request.body)
        body = msgspec.json.decode(request.body)
        if not isinstance(body, dict):
            raise ValueError("The body is not an object.")
        return body


class _Writer(BaseRenderer):
    """Write JSON in which NaN and infinities are null."""

    media_type = "application/json"

    def render(self, request: HttpRequest, data: Any, *, response_status: int) -> bytes:
        return msgspec.json.encode(data, enc_hook=_encode)


class Api(NinjaAPI):
    """A NinjaAPI that answers errors with problem documents, and describes them in its schema."""

    _schema: OpenAPISchema | None = None

    def get_openapi_schema(self, **kwargs: Any) -> OpenAPISchema:
        """Return the schema, computed once: it takes most of a second, and anybody may request it."""
        if self._schema is None:
            self._schema = self._described(**kwargs)
        return self._schema

    def get_openapi_operation_id(self, operation: Operation) -> str:
        """Return the module's and the function's name without packages below `api`.

        Generated clients name their functions by it, so it stays the same if a module moves.
        """
        module = re.sub(r"\.api\.(?:\w+\.)+", ".api.", operation.view_func.__module__)
        return f"{module}.{operation.view_func.__name__}".replace(".", "_")

    def _described(self, **kwargs: Any) -> OpenAPISchema:
        schema = super().get_openapi_schema(**kwargs)
        schema["components"]["schemas"].update(_definitions(ProblemDocument))
        for path in schema["paths"].values():
            for method, operation in path.items():
                openapi.complete(method, operation)
        return schema

    def set_default_exception_handlers(self) -> None:
        for kind, handler in {
            Problem: lambda request, error: error.response(),
            BadCursor: lambda request, error: bad_field("cursor", str(error)).response(),
            AuthenticationError: lambda request, error: problems.unauthorized("You are not signed in.").response(),
            Throttled: lambda request, error: problems.plain(429),  # ninja adds Retry-After
            HttpError: _http_error,
            ValidationError: _validation_error,
            Http404: lambda request, error: Problem(404, "Not found, or not visible to you.").response(),
            RequestDataTooBig: lambda request, error: too_large().response(),
            MultiPartParserError: lambda request, error: Problem(400, f"The upload is malformed: {error}").response(),
            BadRequest: lambda request, error: problems.plain(400),
            Exception: _unexpected,
        }.items():
            self.add_exception_handler(kind, handler)


class _Docs(Swagger):
    """Serve Swagger's page from our own server and under our own policy: no inline script, nothing from outside."""

    def render_page(self, request: HttpRequest, api: NinjaAPI, **kwargs: Any) -> HttpResponse:
        page = {**self.settings, "url": self.get_openapi_url(api, kwargs)}
        return render(request, "api/docs.html", {"swagger_settings": json.dumps(page, indent=1)})


def make_api() -> Api:
    """Return the API without endpoints; console.urls adds those of the apps."""
    api = Api(
        title="Vigil",
        version="1",
        description="A lab's portal for model training. Send `Authorization: Bearer <token>`; create tokens at /me/.",
        docs=_Docs(),
        urls_namespace="api",
        auth=[Bearer(), Session()],
        throttle=PerPerson(),
        parser=_Reader(),
        renderer=_Writer(),
    )
    api.add_decorator(queries.strict, mode="view")
    return api


def json_response(data: object) -> HttpResponse:
    """Return the data as JSON, bypassing pydantic, which takes half the time of a list of 200.

    Tests validate such responses against the schema.
    """
    return HttpResponse(msgspec.json.encode(data, enc_hook=_encode), content_type="application/json; charset=utf-8")


def shaped_page(
    rows: QuerySet[Row], order: SortOrder, query: PageQuery, shape: Callable[[Row], object]
) -> dict[str, Any]:
    """Return the requested page of a list as the answer of an endpoint: each row as `shape` makes it."""
    found = page(rows, order, cursor=query.cursor, limit=query.limit)
    return {"items": [shape(row) for row in found.items], "next": found.next}


def stream(request: HttpRequest, pieces: Iterator[Piece], content_type: str) -> StreamingHttpResponse:
    """Stream a long response; each piece is made in a thread, so that sockets and other requests are not blocked."""
    if not isinstance(request, ASGIRequest):
        return StreamingHttpResponse(pieces, content_type=content_type)

    async def each() -> AsyncIterator[Piece]:
        following = sync_to_async(lambda: next(pieces, None))
        while (piece := await following()) is not None:
            yield piece

    return StreamingHttpResponse(each(), content_type=content_type)


def too_large() -> Problem:
    return Problem(413, "The request is too large for this address.", kind="too-large")


def bad_field(field: str, message: str) -> Problem:
    return Problem(422, message, kind="invalid", errors=[{"field": field, "message": message}])


def one_of(choices: Collection[str], what: str) -> AfterValidator:
    """Return a validator that accepts one of these words, or a list of them; its error names all of them."""

    def check(given: Words) -> Words:
        for word in [given] if isinstance(given, str) else given:
            if word not in choices:
                raise ValueError(f"{word[:40]!r} is not {what}. Use one of {', '.join(choices)}.")
        return given

    return AfterValidator(check)


def plain_message(error: dict[str, Any]) -> str:
    """Return pydantic's message as a sentence; an error raised by a validator is one already."""
    if error["type"] == "extra_forbidden":
        return f'Unknown field "{str(error["loc"][-1])[:80]}".'
    message = str(error["msg"]).removeprefix("Value error, ")
    return message if message.endswith(".") else f"{message}."


def _note_use(token: Token) -> None:
    now = timezone.now()
    if token.last_used_at is None or (now - token.last_used_at).total_seconds() > 60:
        Token.objects.filter(pk=token.pk).update(last_used_at=now)


def _http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    if isinstance(error.__cause__, RequestDataTooBig):  # ninja hides errors raised while the body is read
        return too_large().response()
    if error.status_code == 400:
        cause = f" {error.__cause__}" if error.__cause__ else ""
        return Problem(400, f"The body is not the JSON that this address expects.{cause}", kind="malformed").response()
    return Problem(error.status_code, str(error)).response()


def _validation_error(request: HttpRequest, error: ValidationError) -> HttpResponse:
    errors = [FieldError(field=_field(e["loc"]), message=plain_message(e)) for e in error.errors[:MAX_ERRORS]]
    detail = "; ".join(f"{e['field']}: {e['message']}" for e in errors[:3])
    return Problem(422, detail, kind="invalid", errors=errors).response()


def _field(place: tuple[Any, ...]) -> str:
    """Return a field's dotted path: ("body", "job", "tags", 0) → "tags.0".

    The location and the name of our argument mean nothing to the sender.
    """
    parts = place[1:]
    if place[0] == "body" or (place[0] == "query" and len(parts) > 1 and isinstance(parts[1], str)):
        parts = parts[1:]
    return ".".join(map(str, parts)) or str(place[0])


def _unexpected(request: HttpRequest, error: Exception) -> HttpResponse:
    if database.is_busy(error):
        log.error("%s %s: the database did not answer: %s", request.method, request.path, error)
        return problems.plain(503, {"Retry-After": str(database.RETRY_AFTER_S)})
    raise error  # Django logs it; the middleware answers it


def _encode(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    return str(value)


def _definitions(model: type[Schema]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs", {}), model.__name__: schema}
