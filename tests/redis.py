"""A private Redis for tests and benchmarks, on a Unix socket."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from portal.run import redis as redis_server
from portal.run.child import die_with


class Server:
    """A redis-server that can be killed and started again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"unix://{redis_server.socket_path(directory)}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        parent = os.getpid()
        self.process = subprocess.Popen(
            redis_server.command(redis_server.find_server(), self.directory),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: die_with(parent),
        )
        deadline = time.monotonic() + 20
        while not redis_server.answers(redis_server.socket_path(self.directory)):
            assert time.monotonic() < deadline, "Redis does not start"
            time.sleep(0.01)

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def publish(self, topic: str, *messages: bytes) -> None:
        with redis.Redis.from_url(self.url) as client:
            for message in messages:
                client.publish(topic, message)


@contextmanager
def redis_up(directory: Path) -> Iterator[Server]:
    server = Server(directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()
