"""Test allowed webhook targets: nothing inside the site unless it is allowed, by any spelling, name or redirect."""

from __future__ import annotations

import asyncio
import runpy
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest

from portal.sending import outside
from portal.sending.outside import AddressRefused, checked, is_outside
from tests.portal.outbox import receiving
from tests.portal.outbox.receiving import status
from tests.waiting import PATIENCE_S, until

INSIDE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254",
    "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1", "fc00::1",
    "fd12::1", "fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1",
    "2002:7f00:1::",
    "2002:a00:1::", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::a00:1",
]  # fmt: skip
OUTSIDE = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]


def post(url: str) -> outside.ExternalResponse:
    return asyncio.run(outside.post(url, b"{}", {"Content-Type": "application/json"}))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let names resolve to these addresses, one list after the other; return which names were looked up."""
    real = socket.getaddrinfo

    def give(*several: list[str]) -> list[str]:
        requests: list[str] = []

        def getaddrinfo(host: Any, port: Any, *args: Any, **named: Any) -> Any:
            if not str(host).endswith(".example"):
                return real(host, port, *args, **named)
            found = several[min(len(requests), len(several) - 1)]
            requests.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return requests

    return give


@pytest.mark.parametrize("address", INSIDE)
def test_inside(address: str) -> None:
    assert not is_outside(ip_address(address))
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(AddressRefused, match="internal address"):
        checked(f"https://{host}/hook")


@pytest.mark.parametrize("address", OUTSIDE)
def test_outside(address: str) -> None:
    assert is_outside(ip_address(address))


@pytest.mark.parametrize(
    "url",
    [
        "", "hooks.slack.com", "ftp://hooks.example/", "file:///etc/passwd", "https://", "https:///x", "https://a b/",
        "https://hooks.example/a\nb", "https://hooks.example:99999/", "https://[::1", "javascript:alert(1)",
        "//x.example",
    ],
)  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(AddressRefused, match="not a web address"):
        checked(url)


def test_plain_http_and_passwords_are_refused() -> None:
    with pytest.raises(AddressRefused, match="https://"):
        checked("http://hooks.example/x")
    with pytest.raises(AddressRefused, match="user name and password"):
        checked("https://mira:s3cret@hooks.example/x")


@pytest.mark.parametrize(
    "spelling",
    ["http://2130706433/", "https://2130706433/", "https://0x7f.1/", "https://017700000001/", "https://127.1/"],
)
def test_other_spellings_of_this_machine_are_refused_when_they_are_resolved(spelling: str) -> None:
    with pytest.raises((AddressRefused, OSError)):
        post(spelling)


@pytest.mark.parametrize("found", [["127.0.0.1"], ["1.1.1.1", "10.0.0.7"], ["169.254.169.254"], ["::1"]])
def test_a_name_that_leads_inside_is_refused(names: Callable[..., list[str]], found: list[str]) -> None:
    names(found)
    with pytest.raises(AddressRefused, match=r"hooks\.example is an internal address"):
        post("https://hooks.example/x")


def test_a_name_is_resolved_once_so_its_address_cannot_change_before_the_connection(
    names: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """Rebinding: the check gets a public address, the connection this machine's."""
    request, connected = names(["192.0.2.7"], ["127.0.0.1"]), []
    settings.VIGIL_WEBHOOK_ALLOW = "192.0.2.0/24"

    async def send(url: str, *args: Any, **named: Any) -> outside.ExternalResponse:
        connected.append((url, named["name"], args[1]["Host"]))
        return outside.ExternalResponse(200, "", None)

    monkeypatch.setattr(outside, "_send", send)
    post("https://hooks.example:8443/x?key=1")
    assert request == ["hooks.example"]
    assert connected == [("https://192.0.2.7:8443/x?key=1", "hooks.example", "hooks.example:8443")]


def test_rebinding_in_a_real_connection(names: Callable[..., list[str]], web: receiving.Web, settings: Any) -> None:
    """The first answer is where it connects to, whatever is answered later; the name is in Host."""
    settings.VIGIL_WEBHOOK_ALLOW = "127.0.0.1/32,hooks.example"
    request = names(["127.0.0.1"], ["127.0.0.2"])
    assert post(f"http://hooks.example:{web.port}/x").status == 200
    assert len(request) == 1
    assert web.got[0].headers["Host"] == f"hooks.example:{web.port}"


def test_what_the_site_allows(web: receiving.Web, settings: Any) -> None:
    assert post(web.url).status == 200
    settings.VIGIL_WEBHOOK_ALLOW = "10.0.0.0/8, 127.0.0.1/32 ,intern.example"
    assert post(web.url).status == 200
    settings.VIGIL_WEBHOOK_ALLOW = "10.0.0.0/8"
    with pytest.raises(AddressRefused):
        post(web.url)


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("10.0.0.0/8, fd00::/8,127.0.0.1 ,intern.example,192.168.1.7/24", ""),
        ("10.0.0.0/99", "10.0.0.0/99"),
        ("intern.example,10.0.0.300", "10.0.0.300"),
        ("fd00::/130", "fd00::/130"),
        ("intern.example/8", "intern.example/8"),
        ("https://intern.example", "https://intern.example"),
    ],
)
def test_what_cannot_be_allowed_stops_the_start(
    setting: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VIGIL_WEBHOOK_ALLOW", setting)
    monkeypatch.setenv("VIGIL_HOME", str(tmp_path))
    file = str(Path(__file__).parents[3] / "portal/settings.py")
    if not wrong:
        assert runpy.run_path(file)["VIGIL_WEBHOOK_ALLOW"] == setting
        return
    with pytest.raises(SystemExit, match=f"VIGIL_WEBHOOK_ALLOW: {wrong} is neither a network"):
        runpy.run_path(file)


def test_the_environment_s_proxy_is_not_used(web: receiving.Web, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert post(web.url).status == 200


def test_a_redirect_is_returned_and_not_followed(web: receiving.Web) -> None:
    web.answers = [status(302, Location="http://169.254.169.254/latest/meta-data/")]
    assert post(web.url).status == 302
    assert len(web.got) == 1


def test_a_long_answer_is_read_no_further(web: receiving.Web) -> None:
    web.answers = [status(200, b"x" * 10_000_000)]
    answer = post(web.url)
    assert (answer.status, len(answer.text)) == (200, outside.MAX_RESPONSE_BYTES)


def test_who_answers_drop_by_drop_is_left(web: receiving.Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "TOTAL_S", 0.4)
    began = time.monotonic()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        while time.monotonic() < began + PATIENCE_S:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: b\r\n" if time.monotonic() < began else b"x")
            time.sleep(0.05)

    web.answers = [drip]
    with pytest.raises((TimeoutError, httpx.HTTPError)):
        post(web.url)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_who_resolves_for_ever_is_left_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than asyncio has threads of its own, and not waited for at the end."""
    monkeypatch.setattr(outside, "TOTAL_S", 0.3)
    over, ended = threading.Event(), []

    def getaddrinfo(*args: Any, **named: Any) -> Any:
        over.wait(5)
        ended.append(args)
        raise socket.gaierror("nobody knows")

    async def post_to_many() -> list[Any]:
        posts = (outside.post(f"https://{n}.example/x", b"{}", {}) for n in range(40))
        return await asyncio.gather(*posts, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    found = asyncio.run(post_to_many())
    assert {type(item) for item in found} == {TimeoutError}
    assert not ended
    over.set()
    until(lambda: len(ended) == 40)


def test_nobody_there(web: receiving.Web) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(httpx.ConnectError):
            post(f"http://127.0.0.1:{free.getsockname()[1]}/")
