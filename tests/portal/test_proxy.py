"""Test two web processes behind docker/nginx.conf: sign-in, sockets and reports work, and one process may die."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from portal.run.child import die_with
from tests import steady
from tests.stack import REPOSITORY, Stack
from tests.waiting import PATIENCE_S, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, preexec_fn=lambda: die_with(parent),
        )  # fmt: skip


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class Site:
    """`vigil up` with its web, a second web by the image's entrypoint, and the proxy before both."""

    def __init__(self, prepared: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.stack = Stack(prepared, VIGIL_PUBLIC_URL=self.url, VIGIL_BEHIND_PROXY="1", VIGIL_LOCAL_CPUS="2")
        self.stack.port = free_port()
        self.second_port = free_port()

    def start(self) -> None:
        # Readiness is reported with the public address, which answers once the proxy is there.
        self.stack.start()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        extra = {"VIGIL_HOST": "127.0.0.1", "VIGIL_PORT": str(self.second_port), "PATH": path}
        home = self.stack.home
        self.second = start(
            [str(REPOSITORY / "docker/entrypoint.sh"), "web"], home / "second.log", {**self.stack.environment, **extra}
        )
        text = (REPOSITORY / "docker/nginx.conf").read_text()
        for name, replacement in {
            "web1:8000": f"127.0.0.1:{self.first_port}",
            "web2:8000": f"127.0.0.1:{self.second_port}",
            "listen 8080": f"listen 127.0.0.1:{self.port}",
            "/tmp/": f"{home}/",
        }.items():
            assert name in text, name
            text = text.replace(name, replacement)
        (home / "nginx.conf").write_text(text)
        home.chmod(0o711)  # nginx drops root for its workers
        nginx = ["nginx", "-c", str(home / "nginx.conf"), "-g", "daemon off;"]
        self.nginx = start(nginx, home / "nginx.log", dict(os.environ))
        for port in (self.first_port, self.second_port, self.port):
            until(lambda port=port: answers(f"http://127.0.0.1:{port}"), f"port {port}; {self.logs()}")

    @property
    def first_port(self) -> int:
        return self.stack.listening_port

    def logs(self) -> str:
        return "".join(path.read_text() for path in self.stack.home.glob("*.log"))

    def close(self) -> None:
        for process in (getattr(self, name, None) for name in ("nginx", "second")):
            if process:
                process.terminate()
                process.wait(10)
        self.stack.close()


@pytest.fixture(scope="module")
def site(prepared_home: Path) -> Iterator[Site]:
    site = Site(prepared_home)
    try:
        site.start()
        yield site
    finally:
        site.close()


@pytest.fixture(scope="module")
def browser(site: Site) -> Iterator[httpx.Client]:
    """Return a browser that followed the first start's link, all through the proxy."""
    with httpx.Client(
        base_url=site.url, follow_redirects=True, trust_env=False, headers={"Referer": site.url}, timeout=PATIENCE_S
    ) as browser:
        site.stack.sign_in(browser)
        yield browser


def listen(site: Site, browser: httpx.Client) -> ClientConnection:
    cookies = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    url = f"{site.url.replace('http', 'ws', 1)}/ws/jobs?format=json"
    # Nobody reads it to its end, so it would not see the answer to its pings either.
    return connect(
        url,
        additional_headers={"Cookie": cookies},
        origin=site.url,
        proxy=None,
        ping_interval=None,  # type: ignore[arg-type]
    )


def test_everything_works_through_the_proxy(site: Site, browser: httpx.Client) -> None:
    with ExitStack() as closing:
        # The proxy gives a new socket to the web with fewer of them, so two sockets are one at each.
        both = [closing.enter_context(listen(site, browser)) for _ in range(2)]
        with httpx.Client(base_url=site.url, headers=site.stack.authorization, trust_env=False) as client:
            answer = client.post("/api/v1/jobs", **steady.upload(steady.spec(30)))
        assert answer.status_code == 201, answer.text
        job_id = answer.json()["id"]
        for item in both:
            assert job_id in next_job_ids(item), "a job's news reach the sockets of both processes"
        assert browser.get("/jobs").headers["Content-Encoding"] == "gzip"
        what = "the job, whose reports came through the proxy"
        until(lambda: state_of(browser, job_id) == "completed", what)


def next_job_ids(socket: ClientConnection) -> set[int]:
    """Return the ids of jobs in the next message that names any."""
    for _ in range(50):
        text = socket.recv(timeout=PATIENCE_S)
        ids = {int(found) for found in re.findall(r'"(?:id|job)":\s*(\d+)', str(text))}
        if ids:
            return ids
    return set()


def state_of(browser: httpx.Client, job_id: int) -> Any:
    return json.loads(browser.get(f"/api/v1/jobs/{job_id}").text).get("state")


def test_the_portal_survives_the_loss_of_a_web(site: Site) -> None:
    site.second.kill()
    site.second.wait(10)
    with httpx.Client(base_url=site.url, trust_env=False) as client:
        assert [client.get("/healthz").status_code for _ in range(40)] == [200] * 40
