"""What the trainer reaches on a GPU, beside plain torch: MFU, FP8, checkpoints, telemetry, determinism; one table.

    python -m bench gpu                   # every row, each in a process of its own
    python -m bench gpu --row mfu         # one; a few minutes on an H200
    python -m bench gpu --tiny            # every row's code on a CPU with a model of a second: figures mean nothing

Bars (one H200): MFU ≥ 45 % for 350 M to 1 B parameters in bf16, compiled, 2,048 tokens a sample, and ≥ 0.97× of a bare
loop of the same model; FP8 ≥ 1.10× of bf16; a checkpoint of 12 GB stalls training ≤ 1 s and ≤ 10 % of `dcp.save`;
telemetry costs ≤ 1 %. Determinism and parts (products, attention, loss, optimizer, each by itself) have no bar. Where
there is no GPU, rows say so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NAMES = ("mfu", "fp8", "stall", "telemetry", "determinism", "parts")
PAIRS = 5


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--row", choices=NAMES, action="append", help="only this one; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="run the code on a CPU; measures nothing")
    parser.add_argument("--compile", action="store_true", help="with --tiny: compile, too")
    parser.add_argument("--folder", type=Path, help="for data and checkpoints, 40 GB; default: a temporary one")
    options = parser.parse_args(arguments)
    names = options.row or list(NAMES)
    if len(names) == 1 or options.tiny:
        return _measure(names, options)
    return _all(names, ["--folder", str(options.folder)] if options.folder else [])


def _all(names: Sequence[str], more: list[str]) -> int:
    """Each in a process of its own, so that no row inherits memory or compiled code; then the table of all."""
    rows: list[dict[str, Any]] = []
    failed = []
    for name in names:
        print(f"\n-- {name}", flush=True)
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu", "--row", name, *more], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout
        last = ""
        for line in child.stdout:
            print(line, end="", flush=True)
            last = line
        if child.wait() > 1:
            failed.append(name)
            continue
        rows += json.loads(last)["rows"]
    print()
    _table(rows)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed or any(row["met"] is False for row in rows) else 0


def _measure(names: Sequence[str], options: argparse.Namespace) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as python -m training sets it
    import torch

    print(environment(), flush=True)
    if options.tiny:
        print("TINY, on a CPU: shows that the code runs. None of these figures is a GPU's.")
    elif not torch.cuda.is_available():
        return _tell([{"name": name, "figure": "not measured: no GPU here", "bar": "", "met": None} for name in names])
    from bench import gpu_rows
    from training import distributed

    folder = Path(tempfile.mkdtemp(prefix="vigil-gpu-", dir=options.folder))
    rows = []
    try:
        world = distributed.join(on_cpu=options.tiny)
        pairs = 1 if options.tiny else PAIRS
        setting = gpu_rows.Setting(world, folder, pairs=pairs, tiny=options.tiny, compiles=options.compile)
        for name in names:
            rows += [vars(row) for row in gpu_rows.ROWS[name](setting)]
        distributed.leave()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.tiny:
        rows = [{**row, "met": None} for row in rows]
    return _tell(rows)


def _tell(rows: list[dict[str, Any]]) -> int:
    _table(rows)
    print(json.dumps({"bench": "gpu", "environment": environment(), "rows": rows}, ensure_ascii=False))
    return 1 if any(row["met"] is False for row in rows) else 0


def _table(rows: Sequence[dict[str, Any]]) -> None:
    said = {True: "met", False: "MISSED", None: ""}
    lines = [(row["name"], row["figure"], row["bar"], said[row["met"]]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)] if lines else []
    for line in lines:
        cells = zip(line, widths, strict=True)
        print(("  " + "   ".join(cell.ljust(width) for cell, width in cells)).rstrip(), flush=True)


def environment() -> str:
    """GPU, driver, clocks where they can be read, torch; when."""
    import torch

    told = [datetime.now(UTC).strftime("%Y-%m-%d")]
    told.append(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
    asked = "driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu,utilization.gpu"
    program = shutil.which("nvidia-smi")
    if torch.cuda.is_available() and program:
        command = [program, f"--query-gpu={asked}", "--format=csv,noheader", "--id=0"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
        names = ("driver", "clock", "of at most", "power limit", "°C", "busy before")
        told += [f"{name} {value.strip()}" for name, value in zip(names, found.split(","), strict=False)]
    told += [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"]
    return ", ".join(told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
