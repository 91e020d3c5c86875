"""Receive what machines post continuously, bypassing Django, with the same responses.

In the web process `Intake` is an ASGI application in front of Django's middleware, which would cost as much as storing
a post and would open a database connection for each. Each endpoint interprets its own posts.
"""

from __future__ import annotations

import asyncio
import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from django.db import DatabaseError, connection
from django.http import HttpResponse

from portal.http import problems
from portal.http.limits import ANONYMOUS, Application, Receive, Scope, Send, declared_length, respond
from portal.http.problems import Problem
from vigil_core import bounded
from vigil_core.bounded import Bounds

logger = logging.getLogger(__name__)

Answer = Callable[[str, str, str, Iterable[bytes]], HttpResponse]
"""Answers (sender, Authorization header, Content-Encoding, body chunks) with a response. It may raise Problem."""

# What msgspec raises for text that it cannot read; for bytes that are not UTF-8 Python's UnicodeDecodeError.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
COMPRESSED_BYTES = 1024 * 1024
INFLATED_BYTES = 16 * 1024 * 1024
MAX_LARGE_POSTS = 64  # per attempt, each of whose nodes has a shipper, or per machine: 64 MB
WAITING = 256  # posts in progress at most; a sender that is turned away retries


class Malformed(Exception):
    """Raised for a malformed post, of which nothing was stored. Status 422; 413: too large, 400: not UTF-8."""

    def __init__(self, field: str, message: str, *, status: int = 422) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message, self.status = field, message, status

    def problem(self, kind: str) -> Problem:
        errors: list[problems.FieldError] = [{"field": self.field, "message": self.message}]
        return Problem(self.status, str(self), kind="too-large" if self.status == 413 else kind, errors=errors)


Admit = Callable[[str, str], None]
"""Raises Problem if the Authorization header is not the sender's."""


@dataclass(frozen=True)
class ReportEndpoint:
    """An address that machines post to; the only group of its pattern identifies the sender.

    `admit` is called before anything but a small body is read; `answer` checks again once it has the body.
    """

    path: re.Pattern[str]
    answer: Answer
    admit: Admit


class Intake:
    """An ASGI application that answers posts to its endpoints, and passes everything else on."""

    def __init__(
        self, application: Application, endpoints: Sequence[ReportEndpoint], *, threads: int | None = None
    ) -> None:
        self.application, self.endpoints = application, endpoints
        # SQLite has one writer; on PostgreSQL senders do not wait for each other.
        self.threads = threads or (1 if connection.vendor == "sqlite" else 4)
        self.pool: ThreadPoolExecutor | None = None
        self.waiting = 0
        self.large: Counter[tuple[str, str]] = Counter()  # large posts in progress, by sender

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, sender = self._endpoint_of(scope)
        if endpoint is None:
            await self.application(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        authorization, encoding = headers.get("authorization", ""), headers.get("content-encoding", "")
        with ExitStack() as places:
            if not _is_small(scope):
                refusal = await self._run_in_thread_slot(
                    _in_thread, _admission_refusal, endpoint.admit, sender, authorization
                )
                if refusal is None and not places.enter_context(self._take_slot(endpoint, sender)):
                    refusal = problems.plain(503, {"Retry-After": "1"})
                if refusal is not None:
                    await respond(send, refusal)
                    return
            chunks = await _read(receive)
            if chunks is not None:  # else the client disconnected
                answer = await self._run_in_thread_slot(
                    _in_thread, response_of, endpoint.answer, sender, authorization, encoding, chunks
                )
                await respond(send, answer)

    @contextmanager
    def _take_slot(self, endpoint: ReportEndpoint, sender: str) -> Iterator[bool]:
        """Reserve a slot for one large post; yield False if its sender has too many in progress."""
        key = (endpoint.path.pattern, sender)
        if self.large[key] >= MAX_LARGE_POSTS:
            yield False
            return
        self.large[key] += 1
        try:
            yield True
        finally:
            self.large[key] -= 1
            if not self.large[key]:
                del self.large[key]

    async def _run_in_thread_slot(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run the work in a thread and return its result; return 503 if too many are waiting for a thread."""
        if self.waiting >= WAITING:
            return problems.plain(503, {"Retry-After": "1"})
        self.pool = self.pool or ThreadPoolExecutor(self.threads, "intake")
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, work, *arguments)
        finally:
            self.waiting -= 1

    def _endpoint_of(self, scope: Scope) -> tuple[ReportEndpoint | None, str]:
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("query_string"):
            for endpoint in self.endpoints:
                if match := endpoint.path.fullmatch(scope["path"]):
                    return endpoint, match[1]
        return None, ""


def response_of(
    answer: Answer, sender: str, authorization: str, encoding: str, chunks: Iterable[bytes]
) -> HttpResponse:
    """Return the endpoint's response; a Problem becomes its document."""
    try:
        return answer(sender, authorization, encoding, chunks)
    except Problem as problem:
        return problem.response()


def inflate(chunks: Iterable[bytes], encoding: str) -> bytes:
    """Return the body of a post, gzipped or plain; stop reading as soon as it exceeds a limit."""
    if encoding not in {"", "identity", "gzip"}:
        raise Malformed("Content-Encoding", "send gzip, or nothing", status=415)
    body, received = bytearray(), 0
    gunzip = zlib.decompressobj(wbits=31)
    for chunk in chunks:
        received += len(chunk)
        if received > COMPRESSED_BYTES:
            raise _too_much(f"{COMPRESSED_BYTES} bytes")
        if encoding != "gzip":
            body += chunk
            continue
        try:
            body += gunzip.decompress(chunk, INFLATED_BYTES + 1 - len(body))
        except zlib.error:
            raise Malformed("body", "is not gzip") from None
        if len(body) > INFLATED_BYTES:
            raise _too_much(f"{INFLATED_BYTES} bytes inflated")
    if encoding == "gzip" and (not gunzip.eof or gunzip.unused_data):
        raise Malformed("body", "is not a complete gzip stream: truncated, or followed by other data")
    return bytes(body)


def check_text(body: bytes, bounds: Bounds) -> None:
    """Refuse a body that is not UTF-8, or exceeds a post's limits, before it is parsed. Raises Malformed."""
    try:
        if not body.isascii():
            body.decode()
        bounded.check_json(body, bounds)
    except UnicodeDecodeError as error:
        raise Malformed("body", f"is not UTF-8: byte {error.start} cannot be read", status=400) from None
    except bounded.TooComplex as error:
        raise Malformed("body", f"holds {error}; send less at once", status=413) from None


def _too_much(what: str) -> Malformed:
    return Malformed("body", f"more than {what}; send less at once", status=413)


def _is_small(scope: Scope) -> bool:
    """Return whether a body declares a length that is accepted from anybody; an unknown length counts as large."""
    return 0 < declared_length(scope) <= ANONYMOUS


def _admission_refusal(admit: Admit, sender: str, authorization: str) -> HttpResponse | None:
    """Return the refusal, if any."""
    try:
        admit(sender, authorization)
    except Problem as problem:
        return problem.response()
    return None


def _in_thread(
    work: Callable[..., HttpResponse | None], endpoint: Any, sender: str, *others: Any
) -> HttpResponse | None:
    """Run the work on a connection that lives as long as the thread; a broken one is replaced at the next post."""
    connection.close_if_unusable_or_obsolete()
    try:
        return work(endpoint, sender, *others)
    except DatabaseError:
        logger.exception("%s: a post was not accepted; its sender will retry", sender)
        connection.close()
        return problems.plain(503, {"Retry-After": "2"})
    except Exception:
        logger.exception("%s: a post was not accepted", sender)
        return problems.plain(500)


async def _read(receive: Receive) -> list[bytes] | None:
    """Read the body, stopping just above the limit; return None if the client disconnected."""
    chunks, size = [], 0
    while size <= COMPRESSED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        if not message.get("more_body"):
            break
    return chunks
