"""A private PostgreSQL for tests and benchmarks: a cluster in a temporary folder, reached by a Unix socket only.

python -m tests.postgres      prints the DATABASE_URL of one that lives until Ctrl-C
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from portal.run.child import die_with


class NoPostgres(Exception):
    """There is no PostgreSQL server to start. The message explains how to get one."""


def find_binaries() -> Path:
    """Return the folder of the newest installed server."""
    versions = [p for p in Path("/usr/lib/postgresql").glob("*/bin") if (p / "initdb").exists()]
    if versions:
        return max(versions, key=lambda path: float(path.parent.name))
    if initdb := shutil.which("initdb"):
        return Path(initdb).resolve().parent
    raise NoPostgres("PostgreSQL is not installed: apt-get install postgresql")


@contextmanager
def postgres(*, durable: bool = False) -> Iterator[str]:
    """Provide the DATABASE_URL of a fresh cluster, removed afterwards. `durable` keeps fsync, as a benchmark must."""
    binaries = find_binaries()
    # The server refuses to run as root.
    user = _unprivileged_user() if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="vigil-pg-"))
    if user:
        os.chown(folder, user.pw_uid, user.pw_gid)
    try:
        _run(
            [binaries / "initdb", "-D", folder / "data", "-U", "vigil", "-A", "trust", "-E", "UTF8", "--no-sync"], user
        )
        server = _start(binaries, folder, user, durable=durable)
        try:
            url = f"postgresql://vigil@/vigil?host={folder}"
            _wait(server, folder, binaries)
            _run([binaries / "createdb", "-h", folder, "-U", "vigil", "vigil"], user)
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # a fast shutdown: open sessions are cut off
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.send_signal(signal.SIGQUIT)
                server.wait(10)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise NoPostgres("as root a user `postgres` is needed to run PostgreSQL: apt-get install postgresql")


def _run(command: list[str | Path], user: pwd.struct_passwd | None) -> None:
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, **_identity(user))
    if done.returncode:
        raise NoPostgres(f"{Path(command[0]).name} failed: {done.stderr.strip()}")


def _identity(user: pwd.struct_passwd | None) -> dict[str, Any]:
    return {"user": user.pw_uid, "group": user.pw_gid} if user else {}


def _start(binaries: Path, folder: Path, user: pwd.struct_passwd | None, *, durable: bool) -> subprocess.Popen[bytes]:
    settings = {"listen_addresses": "", "unix_socket_directories": str(folder), "max_connections": "200"}
    if not durable:
        settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    parent = os.getpid()
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [binaries / "postgres", "-D", folder / "data", *options],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A killed test run must not leave a server behind. After the change of user, which resets it.
            preexec_fn=lambda: die_with(parent, signal.SIGQUIT),
            **_identity(user),
        )


def _wait(server: subprocess.Popen[bytes], folder: Path, binaries: Path) -> None:
    deadline = time.monotonic() + 30
    ready: list[str | Path] = [binaries / "pg_isready", "-q", "-h", folder, "-U", "vigil", "-d", "postgres"]
    while subprocess.run(ready, check=False, capture_output=True).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            raise NoPostgres(f"PostgreSQL did not start: {(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.05)


def main() -> None:
    with postgres() as url:
        print(url, flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
