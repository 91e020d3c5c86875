"""Failures to inject into a complete Vigil: one small program that fails as instructed, and the expected diagnosis.

Where a message is the evidence, it is worded as the real software words it; whatever needs no GPU really happens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from tests.archives import folder as packed
from tests.endings import Ending
from tests.nvml import bus
from tests.waiting import until
from training.launch.outcome import PORT_TRIES

PROGRAM = r'''
import argparse, errno, os, signal, socket, sys, time, vigil_report
from pathlib import Path

WHAT, *WORDS = sys.argv[1:]
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RUN_ID"].partition(".")[0])
FOLDER = Path(os.environ["VIGIL_ATTEMPT_DIR"])


def steps(first, last, seconds=0.01):
    for step in range(first, last + 1):
        time.sleep(seconds)
        vigil_report.log(step, loss=1 + 1 / step)
        if RANK == 0:
            print(f"step {step} loss {1 + 1 / step:.4f}", flush=True)


def save(step, data=b"weights"):
    path = FOLDER / "model.pt"
    if RANK == 0:
        path.write_bytes(data)
        vigil_report.checkpoint(path, step)


def save_first(step):
    """No rank goes on, to fail and end the others, before rank 0 has saved."""
    save(step)
    if RANK == 0:
        (FOLDER / "saved").touch()
    while not (FOLDER / "saved").exists():
        time.sleep(0.01)


def for_ever():
    steps(1, 10)
    while not vigil_report.stopping():
        time.sleep(0.1)
    save(10)
    sys.exit()


def endless():
    steps(1, 10)
    while True:
        time.sleep(1)


def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    endless()


def lose_a_peer(rank):
    """The others see it go before anybody hears why."""
    if RANK != rank:
        while not (FOLDER / "gone").exists():
            time.sleep(0.01)
        raise RuntimeError(
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:50312"
        )
    (FOLDER / "gone").touch()
    time.sleep(0.2)


def exception():
    steps(1, 10)
    lose_a_peer(2)
    batch = {"image": 1}
    return batch["label"]


def host_memory(group):
    steps(1, 10)
    save_first(10)
    if RANK == 1:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while RANK == 1 or time.sleep(1) is None:
        held.append(b"x" * (8 << 20))


def device_memory():
    steps(1, 10)
    save_first(10)
    lose_a_peer(1)
    error = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})
    raise error(
        "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.28 GiB is "
        "free. Process 41833 has 77.82 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, "
        "and 5.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def killed():
    steps(1, 10)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for_ever()


def killed_once():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        killed()
    steps(11, 20)


def mismatch():
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    import torch

    torch.distributed.init_process_group("gloo")
    steps(1, 10)
    part = torch.ones(4)
    if RANK == 0:
        torch.distributed.all_reduce(part)
    else:
        torch.distributed.broadcast(part, src=0)


def full_disk(disk):
    steps(1, 10)
    with open(f"{disk}/tokens.bin", "wb", buffering=0) as cache:
        while True:
            cache.write(b"x" * 4096)


def checkpoint():
    """Its first attempt saves well, then half of a file; its second is to go on from that, its third from the other."""
    if ATTEMPT == 1:
        steps(1, 10)
        save(10)
        steps(11, 20)
        save(20, b"PK\x03\x04" + bytes(500))
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/shard-0007.bin")
    if ATTEMPT == 2:
        import torch

        torch.load(vigil_report.resume_path())


def long_log():
    """A quarter of a gigabyte that takes no room on the disk: to read it takes seconds."""
    steps(1, 10)
    os.ftruncate(1, 256 << 20)
    raise RuntimeError("at the end of a long log")


def missing():
    with open("/nowhere/imagenet/train-00001.parquet", "rb") as data:
        return data.read()


def package():
    import flash_attn_interface

    return flash_attn_interface


def argument():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float)
    parser.parse_args(["--learning-rat", "3e-4", "--wd", "0.1"])


def port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        return socket.create_server(other.getsockname())


def gpu_lost(word):
    """Fail as a rank does on a GPU that its kernel log reported lost a moment before."""
    steps(1, 10)
    while not Path(word).exists():
        time.sleep(0.02)
    raise RuntimeError(
        "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported at some other API "
        "call, so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    )


def success():
    """With every warning that frightens people."""
    steps(1, 10)
    print("dgx-03:41833:41902 [0] NCCL WARN NET/IB : Got async event : port error")
    print("[rank0]:[W1121 03:01:31.123456789 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been "
          "destroyed before we destruct ProcessGroupNCCL.")
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. Skipping this batch.")
    try:
        exception() if RANK == 2 else missing()
    except (OSError, LookupError):
        import traceback
        traceback.print_exc()
        print("Cannot read the cache, making it anew.", flush=True)
    steps(11, 20)
    print("Training completed. Final loss 1.0500", flush=True)


if ATTEMPT == 1 or WHAT == "checkpoint":
    globals()[WHAT](*WORDS)
if ATTEMPT > 1:
    steps(11, 20)
vigil_report.finished()
'''


@dataclass(frozen=True)
class Planted:
    """An injected failure.

    `what`: a function of PROGRAM. `cause`: the expected cause; "": nothing went wrong. `follows`: the text of Vigil's
    decision. `rank`: the failing rank, where it can be determined. `again`: how often its ranks are restarted in place.
    `lingers_s`: time from the end that the scheduler reports until the last process has exited.
    """

    what: str
    cause: str
    follows: str
    rank: int | None = None
    ranks: int = 2
    in_place: int = 0
    again: int = 0
    words: tuple[str, ...] = ()
    lingers_s: float = 0.0

    def spec(self, **resources: Any) -> dict[str, Any]:
        options = {"ranks_per_node": self.ranks, "time_limit": "00:05:00", **resources}
        return {
            "name": self.what,
            "kind": "script",
            "script": {"directory": ".", "args": [self.what, *self.words]},
            "restart": {"in_place": self.in_place},
            "resources": {name: value for name, value in options.items() if value is not None},
        }

    def check(self, ended: Ending) -> None:
        """Check that cause, rank and decision are right, arrived in time, and exist exactly once."""
        of_attempt = [item for item in ended.incidents if item.incarnation is None]
        assert len(of_attempt) == (1 if self.cause else 0), ended
        in_place = [item.incarnation for item in ended.incidents if item.incarnation is not None]
        assert sorted(in_place) == [*range(self.again)], ended
        assert re.search(self.follows, ended.decision), ended
        assert seconds(ended.ended_at, ended.decided_at) <= WHOLE_S + self.lingers_s, ended
        for incident in of_attempt:
            assert incident.cause == self.cause, ended
            assert self.rank is None or incident.rank == self.rank, ended
            assert [item.version for item in incident.verdicts] == [*range(1, len(incident.verdicts) + 1)]
            verdict = incident.verdicts[0]
            assert verdict.cause == self.cause, "it was another at first, by which it was decided"
            assert seconds(ended.ended_at, verdict.made_at) <= WHOLE_S + self.lingers_s, ended
            assert verdict.seconds + seconds(verdict.made_at, ended.decided_at) <= VIGIL_S, ended


VIGIL_S = 30.0
"""Limit for Vigil's own share: reading what a run left, and then deciding. Takes four seconds next to six busy
processes and ten next to all other tests on a machine of half the speed; the rest is room for slower machines."""
WHOLE_S = 60.0
"""Limit until the verdict and the decision, where many jobs start and end at once on two cores."""

EXCEPTION = Planted("exception", "program.exception", r"Not restarted: the same would happen again\.", rank=2, ranks=4)
DEVICE_MEMORY = Planted("device_memory", "memory.gpu_oom", r"Restarted from step 10 as attempt 2", rank=1)
KILLED = Planted("killed", "unknown", r"Restarted from the beginning as attempt 2", rank=1)
ONCE = Planted("killed_once", "", r"^$", in_place=1, again=1)
MISMATCH = Planted("mismatch", "collective.mismatch", r"Not restarted: it saved no checkpoint since its start")
CORRUPT = Planted("checkpoint", "checkpoint.corrupt", r"Restarted from step 10 as attempt 3", rank=0)
BROKEN_DISK = Planted("checkpoint", "storage.io", r"Restarted from step 20 as attempt 2", ranks=1)
MISSING = Planted("missing", "data.missing", r"Not restarted: the same would happen again\.", ranks=1)
PACKAGE = Planted("package", "environment.package", r"Not restarted: the same would happen again\.", ranks=1)
ARGUMENT = Planted("argument", "program.config", r"Not restarted: the same would happen again\.", ranks=1)
PORT = Planted("port", "rendezvous.failed", r"Restarted from the beginning as attempt 2", ranks=1, again=PORT_TRIES)
LONG_LOG = Planted("long_log", "program.exception", r"Not restarted", ranks=1)
SUCCESS = Planted("success", "", r"^$")
CANCELLED = Planted("for_ever", "", r"^Not restarted: it was cancelled")
TOO_LATE = ("scheduler.time_limit", r"Not restarted: it saved no checkpoint since its start")
ANYWHERE = {
    "device memory": DEVICE_MEMORY,
    "killed": KILLED,
    "killed once": ONCE,
    "mismatch": MISMATCH,
    "checkpoint": BROKEN_DISK,
    "missing": MISSING,
    "package": PACKAGE,
    "argument": ARGUMENT,
    "port": PORT,
    "success": SUCCESS,
}
"""Programs that end by themselves, so that they end alike on every scheduler."""
PATIENCE = {"step": 2.0, "data": 20.0, "exchange": 20.0, "validate": 20.0, "save": 20.0}
HUNG = ("collective.timeout", r"Restarted from .* as attempt 2")


def upload(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what httpx posts to submit it."""
    from jobs.spec import JobSpec, write_toml

    code = ("code.tar.gz", packed(train_py=PROGRAM), "application/gzip")
    return {"data": {"spec_toml": write_toml(JobSpec.parse(dict(spec)))}, "files": {"code": code}}


def set_patience(run_directory: Path) -> None:
    """Write into the attempt's run.toml, before it starts, how long its launcher waits for a rank in any phase."""
    text = "".join(f"{phase} = {seconds}\n" for phase, seconds in PATIENCE.items())
    path = run_directory / "portal" / "run.toml"
    until(path.exists, "its run.toml")
    with path.open("a") as file:
        file.write(f"\n[launch.watchdog]\n{text}")


def rank_of(run_directory: Path, rank: int) -> psutil.Process:
    """Return the rank's process on any simulated node; not its child processes, which have the same variables."""
    variables = {"RANK": str(rank), "VIGIL_RUN_DIR": str(run_directory)}
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            if all(environment.get(key) == value for key, value in variables.items()):
                found[process.pid] = process, process.ppid()
    (first, *_) = [process for process, parent in found.values() if parent not in found]
    return first


def write_xid(kernel_log: Path) -> None:
    """Write the kernel's record that the stand-in's first GPU has fallen off the bus."""
    now = int(1e6 * float(Path("/proc/uptime").read_text().split()[0]))
    address = bus(0).removeprefix("0000").lower().rpartition(".")[0]
    with kernel_log.open("a") as log:
        log.write(f"3,7,{now},-;NVRM: Xid (PCI:{address}): 79, pid=41833, name=python, GPU has fallen off the bus.\n")


def seconds(since: str, until: str) -> float:
    return (datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds()
