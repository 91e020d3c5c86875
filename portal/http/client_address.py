"""Remember the address that the current request comes from, for the audit log.

It is the connection's address. With VIGIL_BEHIND_PROXY the server replaces it by the client's if the proxy is trusted
(uvicorn's --forwarded-allow-ips, console.web); no header is read here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ipaddress import IPv6Address, ip_address
from typing import cast

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

_current: ContextVar[str | None] = ContextVar("client_address", default=None)


def current() -> str | None:
    """Return the client's address; None outside of a request, or for one through a Unix socket."""
    return _current.get()


@sync_and_async_middleware
def remember(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase] | Callable[[HttpRequest], Awaitable[HttpResponseBase]]:
    """Remember the address while the request is answered, also for the threads that answer parts of it."""
    if iscoroutinefunction(get_response):

        async def answer_async(request: HttpRequest) -> HttpResponseBase:
            with _remembered(request):
                return cast(HttpResponseBase, await get_response(request))

        return answer_async

    def answer(request: HttpRequest) -> HttpResponseBase:
        with _remembered(request):
            return get_response(request)

    return answer


@contextmanager
def _remembered(request: HttpRequest) -> Iterator[None]:
    token = _current.set(_address(request.META.get("REMOTE_ADDR", "")))
    try:
        yield
    finally:
        _current.reset(token)


def _address(text: str) -> str | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    is_mapped = isinstance(found, IPv6Address) and found.ipv4_mapped is not None
    return str(found.ipv4_mapped if is_mapped else found)  # type: ignore[union-attr]
