"""A job for tests of everything around jobs: it steps in lockstep, reports, saves and stops, but computes nothing.

Training itself is tested in tests/training, and would take CPU time from what is tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.spec import JobSpec, write_toml
from tests.archives import folder as packed

PROGRAM = """\
import os, pathlib, socket, sys, time, vigil_report
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, SECONDS, EVERY = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
MEET = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def meet():
    if RANK == 0:
        server = socket.create_server(MEET)
        return [server.accept()[0] for _ in range(WORLD - 1)]
    while True:
        try:
            return [socket.create_connection(MEET)]
        except ConnectionRefusedError:
            time.sleep(0.05)


def say(word):
    for peer in peers:
        peer.sendall(word)


def hear():
    words = [peer.recv(1) for peer in peers]
    assert all(words), "another rank has gone"
    return words


peers = meet()
resumed = vigil_report.resume_path()
state = pathlib.Path(os.environ["VIGIL_ATTEMPT_DIR"]) / f"state.{RANK}"
for step in range(int(resumed.read_text()) + 1 if resumed else 1, STEPS + 1):
    time.sleep(SECONDS)
    vigil_report.log(step, loss=1 / step, tokens_per_second=100.0)
    vigil_report.progress(step, STEPS)
    is_last = vigil_report.stopping() or step == STEPS
    if RANK == 0:
        say(b"e" if is_last else b"g")
        hear()
    else:
        is_last = hear() == [b"e"]
        say(b"g")
    if RANK == 0 and (is_last or step % EVERY == 0):
        state.write_text(str(step))
        vigil_report.checkpoint(state, step)
    if is_last:
        break
"""


def spec(steps: int, *, seconds: float = 0.01, every: int = 100, **more: Any) -> dict[str, Any]:
    """Return a spec: so many steps of so many seconds on two ranks, saving at intervals. `more`: further tables."""
    return {
        "name": "steady",
        "kind": "script",
        "script": {"directory": ".", "args": [str(steps), str(seconds), str(every)]},
        **more,
        "resources": {"ranks_per_node": 2, "time_limit": "00:30:00", **more.get("resources", {})},
    }


def upload(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what httpx posts to submit it, with its program if it is one of these."""
    if spec.get("kind") != "script":
        return {"json": {"spec": dict(spec)}}
    code = ("code.tar.gz", packed(train_py=PROGRAM), "application/gzip")
    return {"data": {"spec_toml": write_toml(JobSpec.parse(dict(spec)))}, "files": {"code": code}}
