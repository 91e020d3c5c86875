"""Where the ranks of one incarnation meet. Everything here is files in the run directory: no torch, no fixed port.

A trainer of ours is told VIGIL_STORE_FILE, a path that does not exist yet. Rank 0 makes its store on port 0 and says
where:

    if rank == 0:
        store = TCPStore(bind_host(), 0, world_size, is_master=True, wait_for_workers=False)
        publish_store(store.port)
    else:
        host, port = store_address()
        store = TCPStore(host, port, world_size, is_master=False)

so no port is ever chosen before it is bound, and every incarnation has a new store. Other people's scripts get
torchrun's MASTER_ADDR and MASTER_PORT instead, a port that was free a moment before; the launcher tries another if it
was not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from training.attempt.files import read_json, write_json


class RendezvousFailed(Exception):
    """The others did not appear in time."""


def bind_host(environment: Mapping[str, str] = os.environ) -> str:
    """The name under which the other ranks reach this one's node (loopback where all of them are on this machine)."""
    return environment.get("VIGIL_STORE_HOST") or "127.0.0.1"


def publish_store(port: int, environment: Mapping[str, str] = os.environ) -> None:
    """Rank 0 says where its store listens; by rename, so nobody reads half a file."""
    path = Path(environment["VIGIL_STORE_FILE"])
    write_json(path, {"host": bind_host(environment), "port": port})


def store_address(timeout: float = 300.0, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port of rank 0's store, waiting for it to appear.

    The wait is long because rank 0 may still be importing torch from a slow file system; a rank stuck *after* that is
    the launcher's watchdog's business.
    """
    path = Path(environment["VIGIL_STORE_FILE"])
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (found := read_json(path)) is not None:
            return str(found["host"]), int(str(found["port"]))
        time.sleep(0.01)
    raise RendezvousFailed(f"rank 0 published no store in {path} within {timeout:.0f} s")
