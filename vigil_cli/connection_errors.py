"""Why a portal does not answer, in a sentence with a remedy each. No Django here."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
E = TypeVar("E", bound=Exception)


def why(url: str, source: str, error: Exception) -> str:
    """What this error means for the portal at `url`, an address that `source` (a variable, a file) gives."""
    host = urlsplit(url).hostname or url
    causes = list(_causes(error))
    said = str(error) or type(error).__name__
    if isinstance(error, httpx.UnsupportedProtocol):
        return f'"{url}" is not an address. Write it with http:// or https:// in {source}: http://127.0.0.1:8000.'
    if found := _first(causes, ssl.SSLError):
        return _tls(url, source, found)
    if _first(causes, socket.gaierror):
        return (
            f"Nobody knows a machine called {host}. Look for a slip in {source}, and whether this machine is on the"
            " lab's network."
        )
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        return (
            f"{url} took the request, but has not answered in time. It may be busy: try again, and look at what the"
            " portal's own terminal or log says."
        )
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return (
            f"{url} does not take connections: nothing came back in time. Look whether this machine is on the lab's"
            f" network, whether a firewall is between, and at the address in {source}."
        )
    if isinstance(error, httpx.ConnectError):
        refused = "" if _first(causes, ConnectionRefusedError) else f" ({said})"
        return f"Nothing answers at {url}{refused}. {_start(host)} If it is elsewhere, say so in {source}."
    return (
        f"{url} broke off before it had answered ({said}). The portal may be restarting: try again. If it goes on, look"
        f" whether {source} names a portal."
    )


def _start(host: str) -> str:
    if host in _LOOPBACK:
        return "Start the portal with `vigil up`."
    return f"Start the portal on {host} with `vigil up`, or ask who runs it."


def _tls(url: str, source: str, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = getattr(error, "verify_message", error)
        return (
            f"The certificate of {url} is not trusted: {reason}. Where the lab signs its own, set"
            " SSL_CERT_FILE to the file of the authority's certificate."
        )
    if error.reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"}:
        return f"{url} speaks no TLS. If it is a portal without, write http:// in {source}."
    return f"No safe connection to {url} ({error.reason or error}). Look at its certificate, and at {source}."


def _first(causes: list[BaseException], kind: type[E]) -> E | None:
    return next((cause for cause in causes if isinstance(cause, kind)), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from; httpcore keeps the first of all only as its argument."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        inner = error.args[0] if error.args else None
        error = error.__cause__ or (inner if isinstance(inner, BaseException) else error.__context__)
