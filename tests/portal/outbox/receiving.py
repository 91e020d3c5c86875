"""Real receivers of messages on this machine: a web server with scripted answers, and a mail server."""

from __future__ import annotations

import json
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]


def status(code: int, body: bytes = b"", **headers: str) -> Answer:
    """Return an answer with that status."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@dataclass
class Post:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Web:
    """The requests received, and the answers: the next of `answers`, or else 200."""

    port: int = 0
    got: list[Post] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?key=s3cret"


@contextmanager
def web(tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    """Run a web server on a free port."""
    state = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.got.append(Post(self.path, dict(self.headers.items()), body))
            (state.answers.pop(0) if state.answers else status(200, b"ok"))(self)

        def log_message(self, format: str, *words: Any) -> None:
            return

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            return  # who hangs up early is part of these tests

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Mail:
    port: int = 0
    got: list[Message] = field(default_factory=list)
    refuses: str = ""  # an answer to `refused`
    refused: bytes = b"RCPT"


@contextmanager
def mail() -> Iterator[Mail]:
    """Run a mail server with as much SMTP as one message needs."""
    state = Mail()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self._reply("220 here")
            while line := self.rfile.readline():
                word = line[:4].upper()
                if word == b"QUIT":
                    self._reply("221 bye")
                    return
                if word == state.refused and state.refuses:
                    self._reply(state.refuses)
                elif word == b"DATA":
                    self._reply("354 go on")
                    letter = b""
                    while (part := self.rfile.readline()) != b".\r\n":
                        letter += part
                    state.got.append(message_from_bytes(letter))
                    self._reply("250 taken")
                else:
                    self._reply("250 yes")

        def _reply(self, line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True

    server = Server(("127.0.0.1", 0), Handler)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
