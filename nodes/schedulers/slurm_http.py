"""Speaking with slurmrestd: connections, which versions it serves, tokens, errors, and repeats where they do no harm.

What comes back is JSON as Slurm sent it; `slurm_rest` turns it into dataclasses, and nothing else sees it.
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm_tokens import Tokens
from nodes.schedulers.slurm_words import integer, mapping, objects, text

logger = logging.getLogger(__name__)

OLDEST = (0, 0, 38)  # Slurm 22.05
TIMEOUT_S = 10.0
TRIES = 3
NEEDED = frozenset({"job/submit", "job/{job_id}", "jobs", "nodes", "partitions"})
NOTHING_FOUND = 9003  # v0.0.38 calls an empty list an error
UNKNOWN_JOB = frozenset({2017, 9002, NOTHING_FOUND})
NOT_TAKEN = frozenset({1007, 401, 511})  # authentication
# Of Slurm's numbers for what it refuses (2000 …) those that tomorrow may be otherwise.
PASSING = frozenset({2016, 2019, 2020, 2021, 2022, 2027, 2028})
_PATH = re.compile(r"/(slurm|slurmdb)/v(\d+)\.(\d+)\.(\d+)/(.+?)/?\Z")
_NODE_OR_USER = re.compile(r"\{[^}]*\}")

Service = Literal["slurm", "slurmdb"]
Version = tuple[int, int, int]
Json = Mapping[str, Any]


class SlurmError(SchedulerError):
    """slurmrestd answered with an error of Slurm's: its `number` and words are kept."""


class NoAnswer(SchedulerError):
    """It could not be reached, or did not answer in time. `sent`: the request may have been carried out."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True)
class Served:
    """What one slurmrestd serves, in the version that we speak."""

    slurm: Version
    slurmdb: Version | None
    paths: frozenset[tuple[str, str]]  # (service/path without version, method)

    def has(self, path: str, method: str = "get", *, service: Service = "slurm") -> bool:
        return (f"{service}/{path}", method) in self.paths

    def version_of(self, service: Service) -> str:
        version = self.slurm if service == "slurm" else self.slurmdb
        if version is None:
            raise SchedulerError("This slurmrestd serves no accounts (slurmdb). Start it with openapi/slurmdbd.")
        return "v" + ".".join(map(str, version))


class SlurmHttp:
    """One slurmrestd, at http(s)://host:port or unix:/path/to/socket."""

    def __init__(
        self,
        url: str,
        *,
        tokens: Tokens,
        user: str,
        ca_file: str = "",
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url, self.tokens, self.user = url, tokens, user
        self.calls = 0  # how often slurmrestd was asked: it is slow, and shared with everybody
        base, own = _transport(url, ca_file)
        self._client = httpx.Client(
            base_url=base,
            transport=transport or own,
            timeout=httpx.Timeout(timeout_s, connect=min(3.0, timeout_s)),
            trust_env=False,  # a proxy from the environment must not see tokens
            follow_redirects=False,
        )
        self._served: Served | None = None

    @property
    def served(self) -> Served:
        """What it serves: asked once, and again after an upgrade."""
        if self._served is None:
            self._served = served_by(self._discover())
            logger.info("slurmrestd speaks %s", self._served.version_of("slurm"))
        return self._served

    def get(
        self, path: str, query: Mapping[str, str] | None = None, *, user: str = "", service: Service = "slurm"
    ) -> Json | None:
        """The answer; None where nothing has changed since the `update_time` of the query."""
        return self._ask("GET", path, user=user, service=service, query=query, may_repeat=True)

    def post(self, path: str, body: object, *, user: str = "", service: Service = "slurm") -> Json:
        """Sent once: what it asks for might be done twice."""
        return self._ask("POST", path, user=user, service=service, body=body, may_repeat=False) or {}

    def delete(self, path: str, query: Mapping[str, str] | None = None, *, user: str = "") -> Json:
        return self._ask("DELETE", path, user=user, service="slurm", query=query, may_repeat=True) or {}

    def close(self) -> None:
        self._client.close()

    def _ask(
        self,
        method: str,
        path: str,
        *,
        user: str,
        service: Service,
        may_repeat: bool,
        query: Mapping[str, str] | None = None,
        body: object = None,
    ) -> Json | None:
        answer = None
        for _ in range(2):
            url = f"/{service}/{self.served.version_of(service)}/{path}"
            answer = self._send(method, url, user or self.user, query or {}, body, may_repeat=may_repeat)
            if answer.status_code != 404 or _is_json(answer):
                break
            logger.info("slurmrestd does not serve %s any more: asked again what it serves", url)
            self._served = None
        assert answer is not None
        if answer.status_code == 304:
            return None
        return _read(answer, self.url, user or self.user)

    def _discover(self) -> Json:
        problem: SchedulerError | None = None
        for path in ("/openapi/v3", "/openapi.json", "/openapi"):
            answer = self._send("GET", path, self.user, {}, None, may_repeat=True)
            try:
                document = _read(answer, self.url, self.user)
            except SchedulerError as error:
                problem = problem or error
                if answer.status_code in {401, 403, 511}:
                    break
                continue
            if mapping(document.get("paths")):
                return document
            problem = problem or SchedulerError(f"{self.url}{path} names no paths. Is slurmrestd there?")
        raise problem or SchedulerError(f"{self.url} does not say what it serves.")

    def _send(
        self, method: str, url: str, user: str, query: Mapping[str, str], body: object, *, may_repeat: bool
    ) -> httpx.Response:
        until = time.monotonic() + float(self._client.timeout.read or TIMEOUT_S)
        for left in reversed(range(TRIES if may_repeat else 1)):
            token = self.tokens.of(user)  # read anew each time: it may have been about to end
            headers = {"X-SLURM-USER-NAME": user, "X-SLURM-USER-TOKEN": token, "Accept": "application/json"}
            self.calls += 1
            try:
                answer = self._client.request(method, url, params=dict(query), json=body, headers=headers)
            except httpx.HTTPError as error:
                problem = _no_answer(self.url, error)
            else:
                if answer.status_code not in {502, 503, 504}:
                    return answer
                problem = NoAnswer(f"{self.url} answers {answer.status_code}: no slurmrestd behind it.", sent=False)
            if not left or time.monotonic() > until:
                raise problem
            time.sleep(random.uniform(0.05, 0.2) * (TRIES - left))
        raise AssertionError("unreachable")


def served_by(document: Json) -> Served:
    """The newest version that has every path we need, whatever its number; SchedulerError if all are too old."""
    found: dict[tuple[str, Version], set[tuple[str, str]]] = {}
    for path, methods in mapping(document.get("paths")).items():
        if match := _PATH.match(str(path)):
            service, *digits, rest = match.groups()
            version: Version = (int(digits[0]), int(digits[1]), int(digits[2]))
            known = found.setdefault((service, version), set())
            known.update((f"{service}/{rest}", method.lower()) for method in mapping(methods))
    versions = sorted({version for service, version in found if service == "slurm"}, reverse=True)
    fitting = [v for v in versions if v >= OLDEST and {path[6:] for path, _ in found["slurm", v]} >= NEEDED]
    if not fitting:
        there = ", ".join("v" + ".".join(map(str, v)) for v in reversed(versions)) or "nothing of Slurm's"
        raise SchedulerError(
            f"This slurmrestd serves {there}. Vigil needs v0.0.38 or later: Slurm 22.05. Upgrade Slurm.", permanent=True
        )
    slurm = fitting[0]
    accounts = sorted((v for service, v in found if service == "slurmdb" and v >= OLDEST), reverse=True)
    slurmdb = slurm if slurm in accounts else (accounts[0] if accounts else None)
    paths = frozenset(found["slurm", slurm] | (found["slurmdb", slurmdb] if slurmdb else set()))
    return Served(slurm, slurmdb, paths)


def _transport(url: str, ca_file: str) -> tuple[str, httpx.BaseTransport]:
    """The base of URLs, and what carries them. Certificates are verified, by the system's or the given authorities."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return "http://localhost", httpx.HTTPTransport(uds=parts.path)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise SchedulerError(f"VIGIL_SLURM_URL={url} is no address. Write http(s)://host:port or unix:/path.")
    verify: Any = httpx.create_ssl_context(verify=ca_file) if ca_file else True
    return url.rstrip("/"), httpx.HTTPTransport(verify=verify)


def _no_answer(url: str, error: httpx.HTTPError) -> NoAnswer:
    """What went wrong on the way, with what to look at."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        why = str(error) or "no connection"
        return NoAnswer(f"slurmrestd cannot be reached at {url} ({why}). Is it running? VIGIL_SLURM_URL.", sent=False)
    if isinstance(error, httpx.TimeoutException):
        return NoAnswer(f"slurmrestd at {url} did not answer in time.", sent=True)
    return NoAnswer(f"The connection to slurmrestd at {url} broke: {type(error).__name__} {error}".strip(), sent=True)


def _is_json(answer: httpx.Response) -> bool:
    return "json" in answer.headers.get("content-type", "")


def _read(answer: httpx.Response, url: str, user: str) -> Json:
    """The JSON object of an answer, or an error with Slurm's own number and words."""
    if answer.status_code in {401, 403}:
        raise _refused(user, f"HTTP {answer.status_code}")
    try:
        found = json.loads(answer.content)
    except (ValueError, RecursionError):
        kind = answer.headers.get("content-type", "something") or "something"
        raise SchedulerError(
            f"{url} answered HTTP {answer.status_code} with {kind.split(';')[0]} that is not Slurm's JSON."
            " Is another program listening there, or a proxy in between?"
        ) from None
    if not isinstance(found, Mapping):
        raise SchedulerError(f"{url} answered HTTP {answer.status_code} with JSON that is not Slurm's.")
    if answer.status_code >= 400:
        raise error_of(found, status=answer.status_code, user=user)
    return found


def error_of(document: Json, *, status: int, user: str) -> SchedulerError:
    """The error that an answer tells, with Slurm's number."""
    told = objects(document.get("errors"))
    first = next((error for error in told if _number(error)), told[0] if told else {})
    number = _number(first)
    if number in NOT_TAKEN or status in NOT_TAKEN:
        return _refused(user, _words(first) or f"HTTP {status}", number)
    said = "; ".join(dict.fromkeys(filter(None, (_words(error) for error in told)))) or f"HTTP {status}"
    where = f"Slurm error {number}: " if number and number > 0 else "Slurm: "
    hint = "" if number and number > 0 else f" (slurmctld may be away, or not take the token of {user})"
    return SlurmError(f"{where}{said}{hint}", permanent=is_permanent(number), number=number)


def is_permanent(number: int | None) -> bool:
    """Whether the same request would be refused tomorrow: Slurm counts refusals from 2000, its own troubles apart."""
    return number is not None and (2000 <= number < 3000 or 9000 <= number < 10_000) and number not in PASSING


def _number(error: Json) -> int | None:
    for name in ("error_number", "error_code"):
        if name in error:
            return integer(error[name], default=-1)
    return None


def _words(error: Json) -> str:
    short, long = text(error.get("error")), text(error.get("description"))
    return f"{short} ({long})" if short and long and long != short else short or long


def _refused(user: str, said: str, number: int | None = None) -> SlurmError:
    return SlurmError(
        f"Slurm does not take the token of {user} ({said}). Is VIGIL_SLURM_KEY_FILE the key that slurmctld has, does"
        " this user exist there, and do the clocks agree?",
        number=number or 1007,
    )
