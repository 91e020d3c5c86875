"""A simulated slurmrestd: recorded or made-up answers behind httpx.MockTransport."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from nodes.schedulers.slurm.tokens import TokenSource

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = sorted(folder.name for folder in RECORDED.iterdir())
TOKEN = "eyJhbGciOi.a-secret-that-nobody-may-see.c2lnbmF0dXJl"
Handler = Callable[[httpx.Request], httpx.Response]


class FixedToken:
    """A token source that always returns the same token, and records rejections."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def token_for(self, user: str) -> str:
        return TOKEN

    def forget(self, user: str) -> None:
        self.forgotten.append(user)


def load(version: str, name: str) -> httpx.Response:
    """Load a recorded answer: "busy/slurm-jobs"."""
    payload = json.loads((RECORDED / version / f"{name}.json").read_text())
    if isinstance(payload["body"], str):
        return httpx.Response(payload["status"], text=payload["body"], headers={"Content-Type": payload["type"]})
    return httpx.Response(payload["status"], json=payload["body"])


def body(version: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = load(version, name).json()
    return found


def paths(version: str) -> httpx.Response:
    """Return the OpenAPI paths of a slurmrestd that serves only this version."""
    found = body(version, "openapi")["paths"]
    return httpx.Response(200, json={"paths": {path: found[path] for path in found if f"/{version}/" in path}})


class SimulatedRest:
    """Replay what was recorded of one version at one moment; `answers` take precedence, by the end of a path."""

    def __init__(self, version: str, moment: str = "busy", **options: Any) -> None:
        self.version, self.moment = version, moment
        self.answers: dict[str, httpx.Response | Handler] = {}
        self.requests: list[httpx.Request] = []
        self.tokens: TokenSource = options.pop("tokens", FixedToken())
        self.http = SlurmHttp(
            "http://slurm.test:6820", tokens=self.tokens, user="portal", transport=httpx.MockTransport(self), **options
        )
        self.rest = SlurmRest(self.http)
        self.slurm = Slurm(self.rest, tokens=self.tokens, user="portal")

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        path = request.url.path
        for end, answer in self.answers.items():
            if path.endswith(end):
                return answer if isinstance(answer, httpx.Response) else answer(request)
        if path.startswith("/openapi"):
            return paths(self.version)
        _, service, version, *rest = path.split("/")
        name = "-".join([service, *rest])
        if version != self.version or not (RECORDED / version / self.moment / f"{name}.json").exists():
            return httpx.Response(404, text="Unable find requested URL.", headers={"Content-Type": "text/plain"})
        return load(version, f"{self.moment}/{name}")

    def requests_to(self, end: str = "") -> list[httpx.Request]:
        return [request for request in self.requests if request.url.path.endswith(end)]
