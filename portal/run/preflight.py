"""Check what `vigil up` needs before it starts anything: a free port, an unused VIGIL_HOME, valid settings."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import psutil

from vigil_core import installation

# The time that a web process whose supervisor was killed may take to exit on a busy machine.
DYING_S = 5.0
# Modules by which the web process and its supervisor are started; before version 0.2 both were in `portal`.
WEB = {"console.web", "portal.web"}
SUPERVISORS = {"console.up", "portal.up"}


class StartRefused(Exception):
    """Raised if Vigil cannot start here. The message is one sentence with its remedy."""


def listen(host: str, port: int) -> socket.socket:
    """Return the web's listening socket, owned by the supervisor: while a new web process loads, connections wait."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    give_up_at = time.monotonic() + DYING_S
    while not _bind(listener, host, port):
        holder = _listener_on(port)
        if _may_be_dying(holder) and time.monotonic() < give_up_at:
            time.sleep(0.05)
            continue
        listener.close()
        raise StartRefused(
            f"port {port} is taken by {_name_of(holder)}: stop it, or choose another port with "
            f"VIGIL_PORT={_free_port(host, port + 1)}."
        )
    listener.listen(2048)
    return listener


def _bind(listener: socket.socket, host: str, port: int) -> bool:
    """Bind the port and return whether that worked. Raises StartRefused if retrying would not help."""
    try:
        listener.bind((host, port))
    except PermissionError:
        raise StartRefused(
            f"port {port} is reserved for root: choose one above 1023, such as VIGIL_PORT=8000."
        ) from None
    except (OSError, UnicodeError) as error:  # the host name may be invalid
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return False
        listener.close()
        raise StartRefused(
            f"this machine does not have the address {host}: set VIGIL_HOST to one that it has."
        ) from None
    return True


def _listener_on(port: int) -> psutil.Process | None:
    """Return the process that listens there, if this user may see it."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            here = getattr(connection.laddr, "port", None) == port
            if here and connection.status == psutil.CONN_LISTEN and connection.pid:
                return psutil.Process(connection.pid)
    return None


def _name_of(holder: psutil.Process | None) -> str:
    with suppress(psutil.Error):  # it may end between two calls
        if holder is not None:
            return f"process {holder.pid} ({holder.name()})"
    return "another program"


def _may_be_dying(holder: psutil.Process | None) -> bool:
    """Return whether the port may belong to a web process that outlived its supervisor: killed, but not yet gone."""
    if holder is None:  # it has exited, or has already released what would identify it
        return True
    try:
        words, parent = holder.cmdline(), holder.parent()
        is_web, has_supervisor = WEB & {*words}, parent and SUPERVISORS & {*parent.cmdline()}
        return not words or bool(is_web and not has_supervisor)
    except psutil.Error:  # it has ended meanwhile
        return True


def _free_port(host: str, start: int) -> int:
    for port in range(start, start + 100):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    return start


@contextmanager
def lock_home(
    home: Path, remedy: str = "stop it there, or use another VIGIL_HOME and VIGIL_PORT here."
) -> Iterator[None]:
    """Take the home's lock, which the kernel releases however this process ends."""
    try:
        lock = os.open(home / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartRefused(
            f"{error.filename} is not writable: set VIGIL_HOME to a folder that you can write."
        ) from None
    with open(lock, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = file.read().strip() or "just starting"
            raise StartRefused(f"Vigil is already running from {home} ({owner}): {remedy}") from None
        file.truncate(0)
        yield


def note_owner(home: Path, url: str) -> None:
    (home / "up.lock").write_text(f"process {os.getpid()}, {url}\n")


def load_settings(port: int) -> ModuleType:
    """Load portal.settings, which reads only the environment, so that supervisor and site use the same settings."""
    os.environ["VIGIL_PORT"] = str(port)
    try:
        from portal import settings
    except PermissionError as error:
        raise StartRefused(
            f"{error.filename} is not writable: set VIGIL_HOME to a folder that you can write."
        ) from None
    except (ValueError, OSError) as error:
        raise StartRefused(f"invalid setting: {error}.") from None
    return settings


def fingerprint(settings: ModuleType) -> str:
    """Return a fingerprint of the inputs of database and static files; if unchanged, there is nothing to prepare."""
    parts = [str(settings.DATABASES["default"]["NAME"]), str(settings.STATIC_ROOT)]
    code, static = installation.ROOT, installation.site_files("static")
    for folder, pattern in ((code, "*/migrations/*.py"), (static, "**/*"), (code, "requirements.lock")):
        for path in sorted(folder.glob(pattern)):
            stat = path.stat()
            parts.append(f"{path.relative_to(folder)} {stat.st_size} {stat.st_mtime_ns}")
    return sha256("\n".join(parts).encode()).hexdigest()


def is_prepared(settings: ModuleType, mark: str) -> bool:
    database = settings.DATABASES["default"]
    if database["ENGINE"].endswith("sqlite3") and not Path(database["NAME"]).exists():
        return False
    try:
        return bool((settings.VIGIL_HOME / "prepared").read_text() == mark) and settings.STATIC_ROOT.is_dir()
    except OSError:
        return False
