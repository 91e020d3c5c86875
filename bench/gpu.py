"""Measure the trainer on a GPU against plain torch: MFU, FP8, checkpoints, telemetry, determinism; one table.

    python -m bench gpu                   # every row, each in a process of its own
    python -m bench gpu --row mfu         # one; a few minutes on an H200
    python -m bench gpu --tiny            # every row's code on a CPU with a model of a second: figures mean nothing

Bars (one H200): MFU ≥ 45 % for 350 M to 1 B parameters in bf16, compiled, 2,048 tokens a sample, and ≥ 0.97× of a bare
loop of the same model; FP8 ≥ 1.10× of bf16; a checkpoint of 12 GB stalls training ≤ 1 s and ≤ 10 % of `dcp.save`;
telemetry costs ≤ 1 %. Determinism and parts (products, attention, loss, optimizer, each by itself) have no bar. A row
that fails or takes more than ten minutes costs no other row its figures. Where there is no GPU, rows say so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import NOT_MEASURED

NAMES = ("mfu", "fp8", "stall", "telemetry", "determinism", "parts")
PAIRS = 5
ROW_SECONDS = 600.0
"""After so many a row is ended."""
ENOUGH_SECONDS = 480.0
"""After so many it begins no further pair."""
HELP = """\
No GPU here. Run this on a machine that has one: srun --gpus 1 --cpus-per-task 16 python -m bench gpu, for example.
Where there is one, torch may be built without CUDA (nvidia-smi sees it then, torch.cuda.is_available() says no).
--tiny tries the code here."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--row", choices=NAMES, action="append", help="only this one; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="run the code on a CPU; measures nothing")
    parser.add_argument("--compile", action="store_true", help="with --tiny: compile, too")
    parser.add_argument("--folder", type=Path, help="for data and checkpoints, 40 GB; default: a temporary one")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # where rows are told, each once it is known
    options = parser.parse_args(arguments)
    names = options.row or list(NAMES)
    import torch

    if not options.tiny and not torch.cuda.is_available():
        print(f"{environment()}\n{HELP}", flush=True)
        _print_result([_row(name, "not measured: no GPU here") for name in names])
        return NOT_MEASURED
    if len(names) == 1 or options.tiny:
        return _measure(names, options)
    return _all(names, ["--folder", str(options.folder)] if options.folder else [])


def _all(names: Sequence[str], more: list[str]) -> int:
    """Measure each row in its own process, so that none inherits memory or compiled code, then print the table."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="vigil-gpu-rows-") as folder:
        for name in names:
            print(f"\n-- {name}", flush=True)
            results_file = Path(folder) / name
            ended = run_row([sys.executable, "-m", "bench.gpu", "--row", name, "--rows", str(results_file), *more])
            found = (
                [json.loads(line) for line in results_file.read_text().splitlines()] if results_file.exists() else []
            )
            rows += [*found, *([_row(name, ended, met=False)] if ended else [])]
    print()
    return _print_result(rows)


def run_row(command: Sequence[str], seconds: float = ROW_SECONDS) -> str:
    """Run the command and pass its output on. Return "" if it succeeded, else how it ended."""
    child = subprocess.Popen(command, start_new_session=True)  # what it starts to compile with ends with it
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else ""


def _measure(names: Sequence[str], options: argparse.Namespace) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as python -m training sets it
    from bench import gpu_rows
    from training.runtime import distributed

    print(environment(), flush=True)
    if options.tiny:
        print("TINY, on a CPU: shows that the code runs. None of these figures is a GPU's.")
    folder = Path(tempfile.mkdtemp(prefix="vigil-gpu-", dir=options.folder))
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append({**row, "met": None} if options.tiny else row)
        if options.rows:
            with open(options.rows, "a") as file:
                print(json.dumps(rows[-1]), file=file)

    try:
        world = distributed.join(on_cpu=options.tiny)
        pairs = 1 if options.tiny else PAIRS
        for name in names:
            until = time.monotonic() + ENOUGH_SECONDS
            setting = gpu_rows.Setting(
                world, folder, pairs=pairs, tiny=options.tiny, compiles=options.compile, until=until
            )
            measure(name, lambda: gpu_rows.ROWS[name](setting), keep)  # noqa: B023
        distributed.leave()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    code = _print_result(rows)
    return 0 if options.rows else code


def measure(name: str, rows: Callable[[], Iterable[Any]], keep: Callable[[dict[str, Any]], None]) -> None:
    """Store each row as soon as it is measured, and after an error a row that reports it."""
    try:
        for row in rows():
            keep(vars(row))
    except Exception as error:
        traceback.print_exc()
        message = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        keep(_row(name, message[:100], met=False))


def _row(name: str, figure: str, *, met: bool | None = None) -> dict[str, Any]:
    return {"name": name, "figure": figure, "bar": "", "met": met}


def _print_result(rows: list[dict[str, Any]]) -> int:
    _table(rows)
    if measured := [row["met"] for row in rows if row["bar"] and row["met"] is not None]:
        print(f"{measured.count(True)} of {len(measured)} bars met", flush=True)
    print(json.dumps({"bench": "gpu", "environment": environment(), "rows": rows}, ensure_ascii=False))
    return 1 if any(row["met"] is False for row in rows) else 0


def _table(rows: Sequence[dict[str, Any]]) -> None:
    words = {True: "met", False: "MISSED", None: ""}
    lines = [(row["name"], row["figure"], row["bar"], words[row["met"]]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)] if lines else []
    for line in lines:
        cells = zip(line, widths, strict=True)
        print(("  " + "   ".join(cell.ljust(width) for cell, width in cells)).rstrip(), flush=True)


def environment() -> str:
    """Describe the GPU, its driver, clocks where they can be read, torch, and the date."""
    import torch

    description = [datetime.now(UTC).strftime("%Y-%m-%d")]
    description.append(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
    fields = "driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu,utilization.gpu"
    program = shutil.which("nvidia-smi")
    if torch.cuda.is_available() and program:
        command = [program, f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
        found = ""
        with suppress(subprocess.TimeoutExpired, OSError):
            found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
        names = ("driver", "clock", "of at most", "power limit", "°C", "busy before")
        description += [
            f"{name} {value.strip()}" for name, value in zip(names, found.split(","), strict=False) if value
        ]
    description += [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"]
    return ", ".join(description)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
