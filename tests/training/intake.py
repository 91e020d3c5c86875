"""A tiny real HTTP server that takes report posts by the rules of protocols.md §3, and can be made to misbehave."""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "secret-of-the-attempt"

Identity = tuple[str, int, int, str, int]  # stream, incarnation, rank, series, step


@dataclass
class Intake:
    """The accepted reports. `statuses`: returned instead, one per post; `forget`: accept, but hang up unanswered."""

    cursors: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    points: list[tuple[Identity, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    posts: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    forget: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, post: dict[str, Any]) -> dict[str, int]:
        self.posts.append(post)
        accepted = {}
        for index, stream in enumerate(post["streams"]):
            cursor = self.cursors.setdefault(stream["id"], 0)
            if stream["first"] == cursor:
                accepted[index] = stream
                self.cursors[stream["id"]] += len(stream["times"])
                if stream["end"]:
                    self.ended.add(stream["id"])
        for name, column in post["series"].items():
            at = 0
            assert len(column["step"]) == len(column["value"]) == sum(run[2] for run in column["runs"])
            for stream, batch, count in column["runs"]:
                assert 0 <= batch < len(post["streams"][stream]["times"])
                if stream in accepted:
                    about = accepted[stream]
                    for step, value in zip(
                        column["step"][at : at + count], column["value"][at : at + count], strict=True
                    ):
                        identity = (about["id"], about["incarnation"], about["rank"], name, step)
                        self.points.append((identity, value))
                at += count
        self.events += [event for event in post["events"] if event["stream"] in accepted]
        return {stream["id"]: self.cursors[stream["id"]] for stream in post["streams"]}

    def identities(self) -> list[Identity]:
        return [identity for identity, _ in self.points]


class Server:
    """The intake on a separate port, which can go away and come back."""

    def __init__(self) -> None:
        self.intake = Intake()
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self.intake))
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def leave_token(
        self,
        run_dir: Path,
        *,
        scheduler_id: str = "1",
        restart_count: int = 0,
        token: str = TOKEN,
        reports: str = "post",
    ) -> None:
        payload: dict[str, Any] = {
            "attempt": 7,
            "number": 1,
            "scheduler_id": scheduler_id,
            "restart_count": restart_count,
        }
        payload["reports"] = reports
        (run_dir / "portal").mkdir(exist_ok=True)
        path = run_dir / "portal" / ".token"
        path.write_text(json.dumps({**payload, "url": self.url, "token": token, "reports": reports}))
        path.rename(run_dir / "portal" / "token")


def _handler(intake: Intake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with intake.lock:
                status, answer = self._answer(body)
            if status == 0:
                self.close_connection = True
                return
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _answer(self, body: bytes) -> tuple[int, Any]:
            if intake.statuses:
                return intake.statuses.pop(0), {"title": "No."}
            if self.headers["Authorization"] != f"Bearer {TOKEN}" or self.path != "/api/v1/attempts/7/reports":
                return 401, {"title": "No."}
            assert len(body) <= 1024 * 1024
            post = json.loads(gzip.decompress(body))
            assert sum(len(column["step"]) for column in post["series"].values()) <= 50_000
            streams = intake.take(post)
            if intake.forget:
                intake.forget -= 1
                return 0, None
            return 200, {"streams": streams, "version": len(intake.posts)}

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler
