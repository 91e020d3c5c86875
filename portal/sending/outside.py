"""POST to an address that a user entered: public addresses, and only those internal ones that the site allows.

The name is resolved once, each of its addresses is checked, and the connection goes to one of those: a different answer
of DNS a moment later changes nothing. TLS still verifies the name. Redirects and the environment's proxies are ignored,
and time and response size are limited.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from threading import Thread
from urllib.parse import urlsplit

import httpx
from django.conf import settings

from vigil_core import retry_after

TOTAL_S, STEP_S = 8.0, 5.0
MAX_RESPONSE_BYTES = 16 * 1024  # that are read
MAX_ADDRESSES = 3  # tried per name
Address = IPv4Address | IPv6Address
_NAT64 = IPv6Network("64:ff9b::/96")


class AddressRefused(Exception):
    """Raised for an address to which nothing will be sent. The message says what to do."""


@dataclass(frozen=True, slots=True)
class ExternalResponse:
    status: int
    text: str
    retry_after_s: float | None


async def post(url: str, body: bytes, headers: Mapping[str, str]) -> ExternalResponse:
    """POST and return the response.

    Raises AddressRefused, and httpx.HTTPError, TimeoutError or OSError if there is no response.
    """
    host, port, is_https = checked(url)
    async with asyncio.timeout(TOTAL_S):
        if proxy := settings.VIGIL_WEBHOOK_PROXY:
            return await _send(url, body, headers, proxy=proxy)
        failure: Exception | None = None
        for address in (await resolve(host, port, is_https))[:MAX_ADDRESSES]:
            there = httpx.URL(url).copy_with(host=str(address))
            named = {**headers, "Host": httpx.URL(url).netloc.decode("ascii")}
            try:
                return await _send(str(there), body, named, name="" if _literal(host) else host)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure or AddressRefused(f"{host} has no address.")


async def _send(
    url: str, body: bytes, headers: Mapping[str, str], *, name: str = "", proxy: str | None = None
) -> ExternalResponse:
    limits = httpx.Timeout(STEP_S)
    extensions = {"sni_hostname": name} if name else {}
    async with (
        httpx.AsyncClient(verify=_authorities(), trust_env=False, proxy=proxy, timeout=limits) as client,
        client.stream("POST", url, content=body, headers=dict(headers), extensions=extensions) as response,
    ):
        received = bytearray()
        async for chunk in response.aiter_raw():
            received += chunk
            if len(received) >= MAX_RESPONSE_BYTES:
                break
        return ExternalResponse(
            response.status_code,
            received[:MAX_RESPONSE_BYTES].decode(errors="replace"),
            retry_after.seconds_of(response.headers.get("Retry-After", "")),
        )


def checked(url: str) -> tuple[str, int, bool]:
    """Validate an address before DNS is queried; return (host, port, whether it is https)."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        raise AddressRefused("This is not a web address: it must begin with https:// and name a host.") from None
    if parts.scheme not in {"https", "http"} or not host or not url.isprintable() or " " in url:
        raise AddressRefused("This is not a web address: it must begin with https:// and name a host.")
    if parts.username is not None or parts.password is not None:
        raise AddressRefused("Remove user name and password from the address: they would appear in logs along the way.")
    is_https = parts.scheme == "https"
    literal = _literal(host)
    if not is_https and not _is_named(host) and not (literal and _is_allowed(literal)):
        raise AddressRefused("Use an https:// address; http:// is only for hosts in VIGIL_WEBHOOK_ALLOW.")
    if literal:
        _check_address(literal, host)
    return host, port or (443 if is_https else 80), is_https


async def resolve(host: str, port: int, is_https: bool) -> list[Address]:
    """Return every address that the name has now; raise AddressRefused if one is internal."""
    if literal := _literal(host):
        return [literal]
    name = _in_ascii(host)
    found = await asyncio.wrap_future(_resolve_in_thread(name, port))
    addresses = list(dict.fromkeys(ip_address(address.partition("%")[0]) for address in found))
    if not _is_named(host):
        for address in addresses:
            _check_address(address, host)
    return addresses


def _resolve_in_thread(name: str, port: int) -> Future[list[str]]:
    """Resolve a name in a separate thread that nobody joins: getaddrinfo has no time limit.

    Asyncio's own threads are few and are joined at exit, so they are left to e-mail.
    """
    answer: Future[list[str]] = Future()
    answer.set_running_or_notify_cancel()

    def resolve_name() -> None:
        try:
            answer.set_result([str(entry[4][0]) for entry in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)])
        except Exception as error:
            answer.set_exception(error)

    Thread(target=resolve_name, name="resolver", daemon=True).start()
    return answer


def _check_address(address: Address, host: str) -> None:
    if not is_outside(address) and not _is_allowed(address) and not _is_named(host):
        raise AddressRefused(f"{host} is an internal address. A sysadmin can allow it in VIGIL_WEBHOOK_ALLOW.")


def is_outside(address: Address) -> bool:
    """Return whether the address is public: not this machine, a private network, or multicast."""
    if isinstance(address, IPv6Address):
        within = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if within is None and address in _NAT64:
            within = IPv4Address(int(address) & 0xFFFF_FFFF)
        if within is not None:
            return is_outside(within)
        if address.is_site_local or int(address) < 2**32:  # ::a.b.c.d, which is not routed
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


@cache
def _allowed(setting: str) -> tuple[frozenset[str], tuple[object, ...]]:
    """Return the names and networks of VIGIL_WEBHOOK_ALLOW, which portal.settings has validated."""
    names, networks = set(), []
    for word in filter(None, (part.strip().lower() for part in setting.split(","))):
        try:
            networks.append(ip_network(word, strict=False))
        except ValueError:
            names.add(word)
    return frozenset(names), tuple(networks)


def _is_named(host: str) -> bool:
    return host.lower().rstrip(".") in _allowed(settings.VIGIL_WEBHOOK_ALLOW)[0]


def _is_allowed(address: Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return any((mapped or address) in network for network in _allowed(settings.VIGIL_WEBHOOK_ALLOW)[1])  # type: ignore[operator]


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _in_ascii(host: str) -> str:
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        raise AddressRefused(f"{host} is not a host name.") from None


@cache
def _authorities() -> ssl.SSLContext:
    """Return a TLS context with the public certificate authorities and those installed on this machine."""
    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()
    return context
