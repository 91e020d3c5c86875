"""Speaking with slurmrestd: connections, which versions it serves, tokens, errors, and repeats where they do no harm.

What comes back is JSON as Slurm sent it; `rest` turns it into dataclasses, and nothing else sees it.
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
from nodes.schedulers.slurm.deadline import Deadline, Transport
from nodes.schedulers.slurm.retry_after import seconds_of
from nodes.schedulers.slurm.served import Json, Served, Service, UnknownVersion, served_by
from nodes.schedulers.slurm.tokens import Tokens
from nodes.schedulers.slurm.values import integer, mapping, objects, text
from nodes.schedulers.slurm.versions import Version

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
TRIES = 3
WHOLE = 2  # time-outs until the last byte of an answer must be there: 15 MB of jobs take their time
LONGEST_ANSWER = 256 * 1024**2  # bytes; 30,000 jobs
BUSY_S = 1.0  # to wait after a 429 that does not say for how long
LONGEST_WAIT_S = 300.0  # whatever Retry-After says: a wrong one must not leave pages stale for a day
CONFIRMED_S = 60.0  # the document of paths is 2 MB with Slurm 26.05
NOTHING_FOUND = 9003  # v0.0.38 calls an empty list an error
UNKNOWN_JOB = frozenset({2017, 9002, NOTHING_FOUND})
NOT_TAKEN = frozenset({1007, 401, 403, 511})  # authentication
# Of Slurm's numbers for what it refuses (2000 …) those that tomorrow may be otherwise.
PASSING = frozenset({2016, 2019, 2020, 2021, 2022, 2027, 2028})

Decode = Callable[[bytes], object]  # raises ValueError where it is no JSON


class SlurmError(SchedulerError):
    """slurmrestd answered with an error of Slurm's: its `number` and words are kept."""


class NotTaken(SlurmError):
    """Slurm does not take the token."""


class NotSlurms(SchedulerError):
    """It answered with something else than Slurm's JSON, as for a path that it does not know."""


class NoAnswer(SchedulerError):
    """It could not be reached, or did not answer in time. `sent`: the request may have been carried out."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(frozen=True)
class Answer:
    status: int
    kind: str  # its content type
    content: bytes
    retry_after_s: float | None = None

    @property
    def asks_to_wait(self) -> bool:
        return self.status in {429, 503} and (self.retry_after_s is not None or self.status == 429)

    @property
    def is_json(self) -> bool:
        return "json" in self.kind


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
        self.url, self.tokens, self.user, self.timeout_s = url, tokens, user, timeout_s
        self.calls = 0  # how often slurmrestd was asked: it is slow, and shared with everybody
        self._deadline = Deadline()
        base, own = _transport(url, ca_file, self._deadline)
        self._client = httpx.Client(
            base_url=base,
            transport=transport or own,
            timeout=httpx.Timeout(timeout_s, connect=min(3.0, timeout_s)),
            trust_env=False,  # a proxy from the environment must not see tokens
            follow_redirects=False,
        )
        self._served: Served | None = None
        self._wait_until: dict[str, float] = {}  # by the first part of a path: when it may be asked again
        self._confirmed_at = float("-inf")  # when a rediscovery last found what was known already

    @property
    def served(self) -> Served:
        """What it serves: asked once, and again after an upgrade."""
        if self._served is None:
            self._served = served_by(self._discover())
            logger.info("slurmrestd speaks %s", self._served.version_of("slurm"))
            if self._served.is_unknown:
                logger.warning("%s", UnknownVersion(self._served.slurm, "it is read, and nothing is submitted"))
        return self._served

    def get(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        user: str = "",
        service: Service = "slurm",
        decode: Decode | None = None,
    ) -> Json | None:
        """The answer; None where nothing has changed since the `update_time` of the query."""
        return self._ask("GET", path, user=user, service=service, query=query, decode=decode, may_repeat=True)

    def post(self, path: str, body: Callable[[Version], object], *, user: str = "", service: Service = "slurm") -> Json:
        """Sent once: what it asks for might be done twice. The body is made for the version that is served now."""
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
        body: Callable[[Version], object] | None = None,
        decode: Decode | None = None,
    ) -> Json | None:
        answer = None
        who = user or self.user
        if method != "GET" and self.served.is_unknown:
            raise UnknownVersion(self.served.slurm, "nothing is submitted, cancelled or changed")
        for _ in range(2):
            url = f"/{service}/{self.served.version_of(service)}/{path}"
            told = None if body is None else body(self.served.slurm)
            answer = self._send(method, url, who, query or {}, told, may_repeat=may_repeat)
            if answer.status != 404 or answer.is_json or not self._rediscover(url):
                break
        assert answer is not None
        if answer.status == 304:
            return None
        return self._read(answer, who, decode)

    def _read(self, answer: Answer, user: str, decode: Decode | None = None) -> Json:
        try:
            return _read(answer, self.url, user, decode or decoded)
        except SlurmError as error:
            if isinstance(error, NotTaken) or not error.number or error.number < 0:  # v0.0.38 does not say why
                self.tokens.forget(user)
            raise

    def _rediscover(self, url: str) -> bool:
        """Ask anew what is served, after an answer as if Slurm had been upgraded; return whether that has changed.

        Where it has not, the path is at fault, and for CONFIRMED_S others like it cost no further discovery.
        """
        now = time.monotonic()
        if now - self._confirmed_at < CONFIRMED_S:
            return False
        logger.info("slurmrestd does not serve %s: asking again what it serves", url)
        before, self._served = self._served, None
        if self.served != before:
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
                if isinstance(error, NotTaken):
                    break
                continue
            if mapping(document.get("paths")):
                return document
            problem = problem or SchedulerError(f"{self.url}{path} names no paths. Is slurmrestd there?")
        raise problem or SchedulerError(f"{self.url} does not say what it serves.")

    def _send(
        self, method: str, url: str, user: str, query: Mapping[str, str], body: object, *, may_repeat: bool
    ) -> Answer:
        until = time.monotonic() + self.timeout_s
        service = url.split("/")[1]
        self._check_wait(service)
        for left in reversed(range(TRIES if may_repeat else 1)):
            token = self.tokens.of(user)  # read anew each time: it may have been about to end
            headers = {"X-SLURM-USER-NAME": user, "X-SLURM-USER-TOKEN": token, "Accept": "application/json"}
            self.calls += 1
            try:
                answer = self._receive(method, url, dict(query), body, headers)
            except httpx.HTTPError as error:
                problem = _no_answer(self.url, error)
            else:
                if answer.asks_to_wait:
                    wait_s = self._note_wait(service, answer)
                    if left and time.monotonic() + wait_s < until:
                        time.sleep(wait_s)
                        continue
                    self._check_wait(service)
                if answer.status not in {502, 503, 504} or answer.is_json:  # slurmrestd itself: slurmdbd is away
                    return answer
                problem = NoAnswer(f"{self.url} answers {answer.status}: no slurmrestd behind it.", sent=False)
            if not left or time.monotonic() > until:
                raise problem
            time.sleep(random.uniform(0.05, 0.2) * (TRIES - left))
        raise AssertionError("unreachable")

    def _note_wait(self, service: str, answer: Answer) -> float:
        """Remember for how long nobody is to ask; return the seconds."""
        wait_s = BUSY_S if answer.retry_after_s is None else min(answer.retry_after_s, LONGEST_WAIT_S)
        self._wait_until[service] = time.monotonic() + wait_s
        return wait_s

    def _check_wait(self, service: str) -> None:
        """Raise NoAnswer while slurmrestd has asked to be left alone (Retry-After), without asking it."""
        left_s = self._wait_until.get(service, 0.0) - time.monotonic()
        if left_s > 0:
            raise NoAnswer(f"slurmrestd at {self.url} is busy and asks to wait {left_s:.0f} s more.", sent=False)

    def _receive(self, method: str, url: str, query: dict[str, str], body: object, headers: dict[str, str]) -> Answer:
        """One answer, whole: neither without end nor without size."""
        self._deadline.until = until = time.monotonic() + WHOLE * self.timeout_s
        content = None if body is None else json.dumps(body).encode()
        if content is not None:
            headers = {**headers, "Content-Type": "application/json"}
        pieces, size = [], 0
        with self._client.stream(method, url, params=query, content=content, headers=headers) as answer:
            for piece in answer.iter_bytes():
                pieces.append(piece)
                size += len(piece)
                if size > LONGEST_ANSWER:
                    message = f"{self.url} answered with more than {LONGEST_ANSWER // 1024**2} MiB. Lower MaxJobCount."
                    raise SchedulerError(message)
                if time.monotonic() > until:
                    raise httpx.ReadTimeout("not whole in time")
            kind, retry_after = (answer.headers.get(name, "") for name in ("content-type", "retry-after"))
            return Answer(answer.status_code, kind, b"".join(pieces), seconds_of(retry_after))


def _transport(url: str, ca_file: str, deadline: Deadline) -> tuple[str, httpx.BaseTransport]:
    """The base of URLs, and what carries them. Certificates are verified, by the system's or the given authorities."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, half an IPv6 address
        raise _no_address("") from None
    if parts.scheme == "unix" and parts.path.startswith("/"):
        return "http://localhost", Transport(deadline, uds=parts.path)
    if "@" in parts.netloc:  # a password would stand in every error
        raise _no_address(" without a name or password")
    if not is_address or parts.query or parts.fragment:
        raise _no_address("")
    if parts.scheme == "http":
        return url.rstrip("/"), Transport(deadline)
    try:
        return url.rstrip("/"), Transport(deadline, verify=ssl.create_default_context(cafile=ca_file or None))
    except OSError as error:  # an SSLError as well
        raise SchedulerError(
            f"VIGIL_SLURM_CA_FILE={ca_file} cannot be read as certificates (PEM): {error.strerror or error}.",
            permanent=True,
        ) from None


def _no_address(more: str) -> SchedulerError:
    message = f"VIGIL_SLURM_URL is no address. Write http(s)://host:port or unix:/path{more}."
    return SchedulerError(message, permanent=True)


def _no_answer(url: str, error: httpx.HTTPError) -> NoAnswer:
    """What went wrong on the way, with what to look at."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        why = str(error) or "no connection"
        return NoAnswer(f"slurmrestd cannot be reached at {url} ({why}). Is it running? VIGIL_SLURM_URL.", sent=False)
    if isinstance(error, httpx.TimeoutException):
        return NoAnswer(f"slurmrestd at {url} did not answer in time.", sent=True)
    said = f"{type(error).__name__} {error}".strip().rstrip(".")
    remedy = "Is it slurmrestd that listens there? VIGIL_SLURM_URL, and its log."
    return NoAnswer(f"The connection to slurmrestd at {url} broke: {said}. {remedy}", sent=True)


def _read(answer: Answer, url: str, user: str, decode: Decode) -> Json:
    """The JSON object of an answer, or an error with Slurm's own number and words."""
    try:
        found = decode(answer.content)
    except (ValueError, RecursionError):
        if answer.status in {401, 403}:
            raise _refused(user, f"HTTP {answer.status}") from None
        kind = answer.kind.split(";")[0] or "something"
        raise NotSlurms(
            f"{url} answered HTTP {answer.status} with {kind} that is not Slurm's JSON."
            " Is another program listening there, or a proxy in between?"
        ) from None
    if not isinstance(found, Mapping):
        raise SchedulerError(f"{url} answered HTTP {answer.status} with JSON that is not Slurm's.")
    if answer.status >= 300:  # nobody is followed who sends us elsewhere
        raise error_of(found, status=answer.status, user=user)
    return found


def decoded(content: bytes) -> object:
    """JSON, quickly: of thousands of jobs there are tens of megabytes. What is odd about it takes the slower way."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.MsgspecError, ValueError):  # NaN, or somebody's job that is named in Latin-1
        return json.loads(content.decode(errors="replace"))


def error_of(document: Json, *, status: int, user: str) -> SchedulerError:
    """The error that an answer tells, with Slurm's number."""
    told = objects(document.get("errors"))
    first = next((error for error in told if _number(error)), told[0] if told else {})
    number = _number(first)
    if number in NOT_TAKEN or (status in NOT_TAKEN and not is_permanent(number)):
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


def _refused(user: str, said: str, number: int | None = None) -> NotTaken:
    return NotTaken(
        f"Slurm does not take the token of {user} ({said}). Is VIGIL_SLURM_KEY_FILE the key that slurmctld has, does"
        " this user exist there, and do the clocks agree?",
        number=number or 1007,
    )
