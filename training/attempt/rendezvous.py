"""Let the ranks of one incarnation find each other by files in the run directory: no torch, no fixed port.

Our trainer gets VIGIL_STORE_FILE, a path that does not exist yet. Rank 0 opens its store on port 0 and publishes the
address:

    if rank == 0:
        store = TCPStore(bind_host(), 0, world_size, is_master=True, wait_for_workers=False)
        publish_store(store.port)
    else:
        host, port = store_address()
        store = TCPStore(host, port, world_size, is_master=False)

so no port is chosen before it is bound, and every incarnation has a new store. Scripts get torchrun's MASTER_ADDR and
MASTER_PORT instead, a port that was free a moment before; if it no longer is, the launcher tries another.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from training.attempt.files import read_json, write_json


class RendezvousFailed(Exception):
    """The other ranks did not appear in time."""


def bind_host(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name under which the other ranks reach this node (loopback where all ranks run on this machine)."""
    return environment.get("VIGIL_STORE_HOST") or "127.0.0.1"


def publish_store(port: int, environment: Mapping[str, str] = os.environ) -> None:
    """Publish where rank 0's store listens, atomically."""
    path = Path(environment["VIGIL_STORE_FILE"])
    write_json(path, {"host": bind_host(environment), "port": port})


def store_address(timeout: float = 300.0, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Wait for rank 0's store and return its host and port. Raises RendezvousFailed after `timeout` seconds.

    The timeout is long because rank 0 may still be importing torch from a slow file system; a rank that is stuck
    *after* that is handled by the launcher's watchdog.
    """
    path = Path(environment["VIGIL_STORE_FILE"])
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (found := read_json(path)) is not None:
            return str(found["host"]), int(str(found["port"]))
        time.sleep(0.01)
    raise RendezvousFailed(f"rank 0 published no store in {path} within {timeout:.0f} s")
