"""Explain why a portal does not answer: one sentence per error, with a remedy. No Django here."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
E = TypeVar("E", bound=Exception)


def explain(url: str, source: str, error: Exception) -> str:
    """Explain this error for the portal at `url`, an address configured in `source` (a variable or a file)."""
    host = urlsplit(url).hostname or url
    causes = list(_causes(error))
    message = str(error) or type(error).__name__
    if isinstance(error, httpx.UnsupportedProtocol):
        return f'"{url}" is not an address. Write it with http:// or https:// in {source}: http://127.0.0.1:8000.'
    if found := _first(causes, ssl.SSLError):
        return _tls(url, source, found)
    if _first(causes, socket.gaierror):
        return f"Unknown host {host}. Check the address in {source}, and that this machine is on the lab's network."
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        return (
            f"{url} accepted the request but did not answer in time. It may be busy: try again, and check the portal's"
            " log."
        )
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return (
            f"Connecting to {url} timed out. Check that this machine is on the lab's network, that no firewall is in"
            f" between, and the address in {source}."
        )
    if isinstance(error, httpx.ConnectError):
        refused = "" if _first(causes, ConnectionRefusedError) else f" ({message})"
        return f"Nothing answers at {url}{refused}. {_start(host)} If it runs elsewhere, set its address in {source}."
    return (
        f"{url} closed the connection before it answered ({message}). The portal may be restarting: try again. If it"
        f" keeps happening, check that {source} names a portal."
    )


def _start(host: str) -> str:
    if host in _LOOPBACK:
        return "Start the portal with `vigil up`."
    return f"Start the portal on {host} with `vigil up`, or ask whoever runs it."


def _tls(url: str, source: str, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = getattr(error, "verify_message", error)
        return (
            f"The certificate of {url} is not trusted: {reason}. If the lab has its own certificate"
            " authority, set SSL_CERT_FILE to the authority's certificate."
        )
    if error.reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"}:
        return f"{url} does not use TLS. If the portal runs without it, write http:// in {source}."
    return (
        f"No secure connection to {url} ({error.reason or error}). Check its certificate and the address in {source}."
    )


def _first(causes: list[BaseException], kind: type[E]) -> E | None:
    return next((cause for cause in causes if isinstance(cause, kind)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes; httpcore keeps the original error only as its argument."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        yield error
        visited.add(id(error))
        inner = error.args[0] if error.args else None
        error = error.__cause__ or (inner if isinstance(inner, BaseException) else error.__context__)
