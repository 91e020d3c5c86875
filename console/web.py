"""Run the web process: uvicorn, with the options that our sockets and proxies need.

  python -m console.web --host 0.0.0.0 --port 8000                one of several behind a proxy
  python -m console.web --fd 4 --prepare MARK --answer 7          under `vigil up`

`vigil up` lets it prepare the site before it serves: that takes 30 ms, and a separate process would load Django once
more, a quarter of the whole start.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import cast

gc.disable()  # until console.asgi has loaded everything: nothing of it is garbage

import uvicorn  # noqa: E402

from portal.run.heartbeat import FILE, touch  # noqa: E402
from portal.run.preflight import StartRefused  # noqa: E402
from vigil_core import environment  # noqa: E402

DEFAULT_PORT = 8000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("console.web", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--fd", type=int, help="listen on this inherited socket instead")
    parser.add_argument(
        "--trusted-proxies", default="127.0.0.1", help="proxies whose forwarded headers are trusted; * for all"
    )
    parser.add_argument("--prepare", metavar="MARK", help="bring the site up to date first")
    parser.add_argument("--answer", type=int, metavar="FD", help="socket on which the result is sent")
    options = parser.parse_args(arguments)
    if options.prepare is not None:
        _prepare(options.prepare, socket.socket(fileno=options.answer))
    from console.asgi import application
    from console.site import migrations
    from portal.http.connections import PatientProtocol

    if options.prepare is None:
        migrations.migrate_older_database()

    _forget_keys()
    _serve(
        uvicorn.Config(
            cast("uvicorn._types.ASGIApplication", application),
            host=options.host,
            port=options.port,
            fd=options.fd,
            http=PatientProtocol,
            ws="websockets-sansio",
            ws_per_message_deflate=False,  # deflating the sockets' frames would cost five times what sending them does
            ws_max_size=65_536,
            proxy_headers=environment.flag("VIGIL_BEHIND_PROXY"),
            forwarded_allow_ips=options.trusted_proxies,
            access_log=False,
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
    )


class _Server(uvicorn.Server):
    """Wait for a stop event; uvicorn polls for it ten times a second, which is most of what an idle server costs.

    It still wakes up once a second, for the Date header that every response carries.
    """

    _wake: Callable[[], object] | None = None

    async def main_loop(self) -> None:
        from console.health.watch import Watcher

        heartbeat = os.environ.get(FILE, "")
        watcher = Watcher()
        watcher.start()
        stopping = asyncio.Event()
        self._wake = partial(asyncio.get_running_loop().call_soon_threadsafe, stopping.set)
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), 1.0)
            watcher.beat()
            if heartbeat:
                touch(heartbeat)
        watcher.stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._wake:
            self._wake()


def _serve(config: uvicorn.Config) -> None:
    server = _Server(config)
    with suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        raise SystemExit(3)


def _forget_keys() -> None:
    """Drop the Slurm key settings: only the worker needs tokens, and web must not be able to say where their key is."""
    from django.conf import settings as read

    for name in ("VIGIL_SLURM_KEY_FILE", "VIGIL_SLURM_TOKEN_COMMAND"):
        os.environ.pop(name, None)
        setattr(read, name, "")


def _prepare(mark: str, answer: socket.socket) -> None:
    """Prepare the site and send `vigil up` one line of JSON: the notes to print, or why it is impossible."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")
    import django
    from django.db import connections

    django.setup()
    from console.site.prepare import prepare

    try:
        result: dict[str, object] = {"notes": prepare(mark)}
    except StartRefused as error:
        result = {"refused": str(error)}
    except Exception as error:
        result = {"refused": _why(error)}
    finally:
        connections.close_all()
    with answer:
        answer.sendall(json.dumps(result).encode() + b"\n")
        if "refused" in result:
            answer.recv(1)  # until we are stopped: exiting here would be reported as a crash
            raise SystemExit(1)


def _why(error: Exception) -> str:
    """Explain why the site cannot be prepared: a sentence for database errors, else the traceback."""
    from django.db import DatabaseError, OperationalError

    # SQLite raises a plain DatabaseError for a damaged file or one that is not a database.
    if type(error) in {DatabaseError, OperationalError}:
        return f"the database cannot be used: {' '.join(str(error).split())}. Check DATABASE_URL."
    return "the site cannot be prepared.\n" + "".join(traceback.format_exception(error, limit=-8))


if __name__ == "__main__":
    main()
