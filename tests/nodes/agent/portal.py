"""A stand-in portal for agents: a small HTTP server that keeps a cursor per stream, as protocols.md §11 describes."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "vga_the-token-of-node01"
Reply = tuple[int, dict[str, Any]]


@dataclass
class Taken:
    """A batch that was accepted, and when."""

    number: int
    batch: dict[str, Any]
    boot_id: str
    at: float


@dataclass
class PortalStandIn:
    """A stand-in portal. `refuse` may answer a post instead of it; `hold` delays answers while it is set."""

    cursors: dict[str, int] = field(default_factory=dict)
    taken: list[Taken] = field(default_factory=list)
    given_up: list[tuple[int, int]] = field(default_factory=list)
    posts: list[dict[str, Any]] = field(default_factory=list)
    enrolled: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    token: str = TOKEN
    refuse: Callable[[dict[str, Any]], Reply | None] = lambda post: None
    enrol: Callable[[str], Reply] = lambda secret: (200, {"token": TOKEN})
    plant: dict[str, Any] | None = None
    """The fault that answers ask the agent to plant."""
    loses_answers: bool = False
    hold: threading.Event = field(default_factory=threading.Event)
    wrong_tokens: int = 0
    """How many posts came with another token."""
    port: int = 0
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, or start again on the same port."""
        portal = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 65_536  # head and body in one packet

            def do_POST(self) -> None:
                portal._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *_: object) -> None:  # agents that are killed leave half a request
                pass

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        with self._guard:
            reports = [event for item in self.taken for event in item.batch.get("events", ())]
        return [event for event in reports if not kinds or event["kind"] in kinds]

    def batches(self) -> list[dict[str, Any]]:
        """Return the batches with samples."""
        with self._guard:
            return [item.batch for item in self.taken if item.batch["n"]]

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        data = request.rfile.read(int(request.headers["Content-Length"]))
        while self.hold.is_set():
            time.sleep(0.01)
        if self._server is None:
            request.close_connection = True
            return
        with self._guard:
            status, text = self._judge(request, data)
        if self.loses_answers:
            request.close_connection = True
            return
        body = json.dumps(text).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _judge(self, request: BaseHTTPRequestHandler, data: bytes) -> Reply:
        _, _, _, _, node, what = request.path.split("/")
        bearer = request.headers["Authorization"].removeprefix("Bearer ")
        if what == "token":
            self.enrolled.append((node, bearer, json.loads(data)))
            return self.enrol(bearer)
        if bearer != self.token:
            self.wrong_tokens += 1
            return 401, {"detail": "not its token"}
        assert request.headers["Content-Encoding"] == "gzip"
        post = json.loads(gzip.decompress(data))
        self.posts.append(post)
        wanted = {} if self.plant is None else {"plant": self.plant}
        return self.refuse(post) or (200, {"next": self._take(post), **wanted})

    def _take(self, post: dict[str, Any]) -> int:
        stream, first, batches = post["stream"], post["first"], post["batches"]
        cursor = self.cursors.setdefault(stream, 0)
        assert post["version"] == 1
        assert len(batches) <= 60
        if batches and first - post["given_up"] <= cursor <= first:
            if cursor < first:
                self.given_up.append((cursor, first))
            now = time.time()
            self.taken += [Taken(first + place, item, post["boot_id"], now) for place, item in enumerate(batches)]
            self.cursors[stream] = first + len(batches)
        return self.cursors[stream]
