"""Send requests to slurmrestd: connections, API versions, tokens, errors, and retries where they are safe.

Responses are JSON as Slurm sent it; only `rest` sees it and turns it into dataclasses.
"""

from __future__ import annotations

import json
import logging
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import msgspec

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm.deadline import Deadline, DeadlineTransport
from nodes.schedulers.slurm.served import Json, ServedApi, Service, UntestedVersion, choose_api
from nodes.schedulers.slurm.tokens import TokenSource
from nodes.schedulers.slurm.values import integer, mapping, objects, text
from nodes.schedulers.slurm.versions import Version
from vigil_core import retry_after

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
TRIES = 3
COMPLETE_WITHIN = 2  # timeouts for a whole response: 15 MB of jobs take a while
MAX_RESPONSE_BYTES = 256 * 1024**2  # 30,000 jobs
BUSY_S = 1.0  # to wait after a 429 without Retry-After
MAX_WAIT_S = 300.0  # cap on Retry-After: a wrong value must not leave pages stale for a day
REDISCOVERY_S = 60.0  # between rediscoveries: the OpenAPI document is 2 MB with Slurm 26.05
NOTHING_FOUND = 9003  # v0.0.38 calls an empty list an error
UNKNOWN_JOB = frozenset({2017, 9002, NOTHING_FOUND})
AUTHENTICATION_ERRORS = frozenset({1007, 401, 403, 511})
# Slurm's refusals have numbers from 2000; these are temporary ones.
TEMPORARY = frozenset({2016, 2019, 2020, 2021, 2022, 2027, 2028})

Decode = Callable[[bytes], object]  # raises ValueError for invalid JSON


class SlurmError(SchedulerError):
    """slurmrestd answered with a Slurm error; `number` and message are Slurm's."""


class TokenRejected(SlurmError):
    """Slurm rejects the token."""


class UnexpectedResponse(SchedulerError):
    """The response is not Slurm's JSON, as for a path that slurmrestd does not know."""


class SlurmUnreachable(SchedulerError):
    """slurmrestd could not be reached, or did not respond in time.

    `sent`: the request may have been carried out.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True)
class HttpResponse:
    status: int
    content_type: str
    content: bytes
    retry_after_s: float | None = None

    @property
    def wants_delay(self) -> bool:
        return self.status in {429, 503} and (self.retry_after_s is not None or self.status == 429)

    @property
    def is_json(self) -> bool:
        return "json" in self.content_type


class SlurmHttp:
    """HTTP client of a slurmrestd at http(s)://host:port or unix:/path/to/socket."""

    def __init__(
        self,
        url: str,
        *,
        tokens: TokenSource,
        user: str,
        ca_file: str = "",
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url, self.tokens, self.user, self.timeout_s = url, tokens, user, timeout_s
        self.calls = 0  # requests sent: slurmrestd is slow, and shared with everybody
        self._deadline = Deadline()
        base, made = _transport(url, ca_file, self._deadline)
        self._client = httpx.Client(
            base_url=base,
            transport=transport or made,
            timeout=httpx.Timeout(timeout_s, connect=min(3.0, timeout_s)),
            trust_env=False,  # a proxy from the environment must not see tokens
            follow_redirects=False,
        )
        self._api: ServedApi | None = None
        self._wait_until: dict[str, float] = {}  # by the first part of a path: when it may be queried again
        self._confirmed_at = float("-inf")  # when a rediscovery last found no change

    @property
    def api(self) -> ServedApi:
        """Return the API that it serves: discovered once, and again after an upgrade."""
        if self._api is None:
            self._api = choose_api(self._discover())
            logger.info("slurmrestd speaks %s", self._api.version_of("slurm"))
            if self._api.is_untested:
                logger.warning("%s", UntestedVersion(self._api.slurm, "Vigil reads from it but submits nothing"))
        return self._api

    def get(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        user: str = "",
        service: Service = "slurm",
        decode: Decode | None = None,
    ) -> Json | None:
        """GET a path; return its JSON, or None if nothing has changed since the `update_time` of the query."""
        return self._request("GET", path, user=user, service=service, query=query, decode=decode, may_repeat=True)

    def post(self, path: str, body: Callable[[Version], object], *, user: str = "", service: Service = "slurm") -> Json:
        """POST once, without retries: the request might be carried out twice.

        `body` builds the request for the API version that is served now.
        """
        return self._request("POST", path, user=user, service=service, body=body, may_repeat=False) or {}

    def delete(self, path: str, query: Mapping[str, str] | None = None, *, user: str = "") -> Json:
        return self._request("DELETE", path, user=user, service="slurm", query=query, may_repeat=True) or {}

    def close(self) -> None:
        self._client.close()

    def _request(
        self,
        method: str,
        path: str,
        *,
        user: str,
        service: Service,
        may_repeat: bool,
        query: Mapping[str, str] | None = None,
        body: Callable[[Version], object] | None = None,
        decode: Decode | None = None,
    ) -> Json | None:
        response = None
        user_name = user or self.user
        if method != "GET" and self.api.is_untested:
            raise UntestedVersion(self.api.slurm, "Vigil submits, cancels and changes nothing")
        for _ in range(2):
            url = f"/{service}/{self.api.version_of(service)}/{path}"
            content = None if body is None else body(self.api.slurm)
            response = self._send(method, url, user_name, query or {}, content, may_repeat=may_repeat)
            if response.status != 404 or response.is_json or not self._rediscover(url):
                break
        assert response is not None
        if response.status == 304:
            return None
        return self._read(response, user_name, decode)

    def _read(self, answer: HttpResponse, user: str, decode: Decode | None = None) -> Json:
        try:
            return _read(answer, self.url, user, decode or decoded)
        except SlurmError as error:
            if isinstance(error, TokenRejected) or not error.number or error.number < 0:  # v0.0.38 gives no reason
                self.tokens.forget(user)
            raise

    def _rediscover(self, url: str) -> bool:
        """Discover the API again after a response that suggests an upgrade; return whether it changed.

        If it has not, the path is at fault, and for REDISCOVERY_S others like it cost no further discovery.
        """
        now = time.monotonic()
        if now - self._confirmed_at < REDISCOVERY_S:
            return False
        logger.info("slurmrestd does not serve %s: rediscovering its API", url)
        before, self._api = self._api, None
        if self.api != before:
            return True
        self._confirmed_at = now
        return False

    def _discover(self) -> Json:
        problem: SchedulerError | None = None
        for path in ("/openapi/v3", "/openapi.json", "/openapi"):
            answer = self._send("GET", path, self.user, {}, None, may_repeat=True)
            try:
                document = self._read(answer, self.user)
            except SchedulerError as error:
                problem = problem or error
                if isinstance(error, TokenRejected):
                    break
                continue
            if mapping(document.get("paths")):
                return document
            problem = problem or SchedulerError(f"{self.url}{path} lists no paths. Is slurmrestd listening there?")
        raise problem or SchedulerError(f"{self.url} does not describe its API.")

    def _send(
        self, method: str, url: str, user: str, query: Mapping[str, str], body: object, *, may_repeat: bool
    ) -> HttpResponse:
        deadline = time.monotonic() + self.timeout_s
        service = url.split("/")[1]
        self._check_wait(service)
        for tries_left in reversed(range(TRIES if may_repeat else 1)):
            token = self.tokens.token_for(user)  # fetched again for each try: it may be about to expire
            headers = {"X-SLURM-USER-NAME": user, "X-SLURM-USER-TOKEN": token, "Accept": "application/json"}
            self.calls += 1
            try:
                response = self._receive(method, url, dict(query), body, headers)
            except httpx.HTTPError as error:
                problem = _unreachable(self.url, error)
            else:
                if response.wants_delay:
                    wait_s = self._note_wait(service, response)
                    if tries_left and time.monotonic() + wait_s < deadline:
                        time.sleep(wait_s)
                        continue
                    self._check_wait(service)
                if (
                    response.status not in {502, 503, 504} or response.is_json
                ):  # JSON is from slurmrestd itself: slurmdbd is down
                    return response
                problem = SlurmUnreachable(
                    f"{self.url} answers {response.status}: no slurmrestd behind the proxy.", sent=False
                )
            if not tries_left or time.monotonic() > deadline:
                raise problem
            time.sleep(random.uniform(0.05, 0.2) * (TRIES - tries_left))
        raise AssertionError("unreachable")

    def _note_wait(self, service: str, answer: HttpResponse) -> float:
        """Remember until when the service must not be queried; return the seconds."""
        wait_s = BUSY_S if answer.retry_after_s is None else min(answer.retry_after_s, MAX_WAIT_S)
        self._wait_until[service] = time.monotonic() + wait_s
        return wait_s

    def _check_wait(self, service: str) -> None:
        """Raise SlurmUnreachable, without a request, while slurmrestd has asked for a delay (Retry-After)."""
        left_s = self._wait_until.get(service, 0.0) - time.monotonic()
        if left_s > 0:
            raise SlurmUnreachable(
                f"slurmrestd at {self.url} is busy: no requests for another {left_s:.0f} s (Retry-After).", sent=False
            )

    def _receive(
        self, method: str, url: str, query: dict[str, str], body: object, headers: dict[str, str]
    ) -> HttpResponse:
        """Return one complete response, bounded in time and size."""
        self._deadline.until = until = time.monotonic() + COMPLETE_WITHIN * self.timeout_s
        content = None if body is None else json.dumps(body).encode()
        if content is not None:
            headers = {**headers, "Content-Type": "application/json"}
        pieces, size = [], 0
        with self._client.stream(method, url, params=query, content=content, headers=headers) as answer:
            for piece in answer.iter_bytes():
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RESPONSE_BYTES:
                    message = (
                        f"{self.url} answered with more than {MAX_RESPONSE_BYTES // 1024**2} MiB. Lower MaxJobCount."
                    )
                    raise SchedulerError(message)
                if time.monotonic() > until:
                    raise httpx.ReadTimeout("not complete in time")
            kind, wait = (answer.headers.get(name, "") for name in ("content-type", "retry-after"))
            return HttpResponse(answer.status_code, kind, b"".join(pieces), retry_after.seconds_of(wait))


def _transport(url: str, ca_file: str, deadline: Deadline) -> tuple[str, httpx.BaseTransport]:
    """Return the base URL and the transport. Certificates are verified by the system's or the given authorities."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, half an IPv6 address
        raise _invalid_url("") from None
    if parts.scheme == "unix" and parts.path.startswith("/"):
        return "http://localhost", DeadlineTransport(deadline, uds=parts.path)
    if "@" in parts.netloc:  # a password would appear in every error message
        raise _invalid_url(" without a name or password")
    if not is_address or parts.query or parts.fragment:
        raise _invalid_url("")
    if parts.scheme == "http":
        return url.rstrip("/"), DeadlineTransport(deadline)
    try:
        return url.rstrip("/"), DeadlineTransport(deadline, verify=ssl.create_default_context(cafile=ca_file or None))
    except OSError as error:  # an SSLError as well
        raise SchedulerError(
            f"VIGIL_SLURM_CA_FILE={ca_file} cannot be read as certificates (PEM): {error.strerror or error}.",
            permanent=True,
        ) from None


def _invalid_url(more: str) -> SchedulerError:
    message = f"VIGIL_SLURM_URL is not a valid address. Write http(s)://host:port or unix:/path{more}."
    return SchedulerError(message, permanent=True)


def _unreachable(url: str, error: httpx.HTTPError) -> SlurmUnreachable:
    """Describe a connection error, with what to check."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        why = str(error) or "no connection"
        return SlurmUnreachable(
            f"slurmrestd cannot be reached at {url} ({why}). Is it running? Check VIGIL_SLURM_URL.", sent=False
        )
    if isinstance(error, httpx.TimeoutException):
        return SlurmUnreachable(f"slurmrestd at {url} did not respond in time.", sent=True)
    detail = f"{type(error).__name__} {error}".strip().rstrip(".")
    remedy = "Check VIGIL_SLURM_URL and slurmrestd's log."
    return SlurmUnreachable(f"The connection to slurmrestd at {url} broke: {detail}. {remedy}", sent=True)


def _read(answer: HttpResponse, url: str, user: str, decode: Decode) -> Json:
    """Return the JSON object of a response, or raise Slurm's error with its number and message."""
    try:
        found = decode(answer.content)
    except (ValueError, RecursionError):
        if answer.status in {401, 403}:
            raise _rejected(user, f"HTTP {answer.status}") from None
        kind = answer.content_type.split(";")[0] or "content"
        raise UnexpectedResponse(
            f"{url} answered HTTP {answer.status} with {kind} that is not Slurm's JSON."
            " Is another program listening there, or a proxy in between?"
        ) from None
    if not isinstance(found, Mapping):
        raise SchedulerError(f"{url} answered HTTP {answer.status} with JSON that is not Slurm's.")
    if answer.status >= 300:  # redirects are not followed
        raise error_of(found, status=answer.status, user=user)
    return found


def decoded(content: bytes) -> object:
    """Decode JSON, with the fast decoder first: thousands of jobs are tens of megabytes."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.MsgspecError, ValueError):  # NaN, or a job name in Latin-1
        return json.loads(content.decode(errors="replace"))


def error_of(document: Json, *, status: int, user: str) -> SchedulerError:
    """Return the exception for the errors in a response."""
    errors = objects(document.get("errors"))
    first = next((error for error in errors if _number(error)), errors[0] if errors else {})
    number = _number(first)
    if number in AUTHENTICATION_ERRORS or (status in AUTHENTICATION_ERRORS and not is_permanent(number)):
        return _rejected(user, _message(first) or f"HTTP {status}", number)
    message = "; ".join(dict.fromkeys(filter(None, (_message(error) for error in errors)))) or f"HTTP {status}"
    where = f"Slurm error {number}: " if number and number > 0 else "Slurm: "
    hint = "" if number and number > 0 else f" (slurmctld may be down, or reject the token of {user})"
    return SlurmError(f"{where}{message}{hint}", permanent=is_permanent(number), number=number)


def is_permanent(number: int | None) -> bool:
    """Return whether the same request would fail again later.

    Slurm numbers its refusals from 2000 and 9000, and its own temporary failures otherwise.
    """
    return number is not None and (2000 <= number < 3000 or 9000 <= number < 10_000) and number not in TEMPORARY


def _number(error: Json) -> int | None:
    for name in ("error_number", "error_code"):
        if name in error:
            return integer(error[name], default=-1)
    return None


def _message(error: Json) -> str:
    short, long = text(error.get("error")), text(error.get("description"))
    return f"{short} ({long})" if short and long and long != short else short or long


def _rejected(user: str, detail: str, number: int | None = None) -> TokenRejected:
    return TokenRejected(
        f"Slurm rejects the token of {user} ({detail}). Check that VIGIL_SLURM_KEY_FILE is slurmctld's key, that"
        " this user exists there, and that the clocks agree.",
        number=number or 1007,
    )
