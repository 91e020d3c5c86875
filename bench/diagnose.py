"""Measure `vigil diagnose`: large logs compared to `grep -E` with the same patterns, memory, and a small log.

    python -m bench.diagnose [--gib 1.0] [--ranks 64]

Bars: all logs of 64 ranks, 1 GB together, at most twice the time of `LC_ALL=C grep -c -E` on one core, and at most
300 MB; the same where half of all lines match something in at most 20 s; a small log in at most 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import stage
from diagnosis.signatures.catalogue import shipped_catalogue

BAR_GREP, BAR_MIB, BAR_HALF_S, BAR_SMALL_S = 2.0, 300.0, 20.0, 0.5
CAUSE = "memory.gpu_oom"
LINES = (
    "[rank{r}]:[I1121 03:01:31.123456789 ProcessGroupNCCL.cpp:1234] [PG ID 1 PG GUID 1 Rank {r}] using GPU {r}",
    "dgx-03:{p}:{q} [{r}] NCCL INFO Channel {c:02d}/0 : {r}[{r}] -> {c}[{c}] via P2P/CUMEM/read",
    "2026-11-21 03:01:31,{c:03d} - megatron.training - INFO -  iteration {n:8d}/  500000 | consumed samples: {n:12d} | "
    "lm loss: 2.{c:05d}E+00 | loss scale: 1.0 | grad norm: 0.{c:03d} |",
    "/opt/env/lib/python3.11/site-packages/torch/utils/checkpoint.py:{p}: FutureWarning: `torch.cpu.amp` is old",
    "INFO:data.loader:shard {n} opened in 0.{c:03d} s, {p} samples, cache hit rate 0.{c:02d}",
    "{{'loss': 2.{c:04d}, 'grad_norm': 0.{c:03d}, 'learning_rate': 0.000{c}, 'epoch': {c}.{c:02d}}}",
)
WARNING = (
    "[rank{r}]:[W1121 03:01:31.123456789 socket.cpp:{p}] [c10d] The client socket has failed to connect to "
    "[dgx-03]:{q} (errno: 111 - Connection refused)."
)
END = """[rank{r}]: Traceback (most recent call last):
[rank{r}]:   File "/home/mira/train.py", line 412, in <module>
[rank{r}]:     main()
[rank{r}]:   File "/home/mira/train.py", line 300, in training_step
[rank{r}]:     loss.backward()
[rank{r}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.14 GiB. GPU {r} has a capacity of 79.15 GiB
"""


def _lines(rank: int, size: int, half: bool) -> Iterator[bytes]:
    """Return lines of one rank's log, of about this many bytes."""
    chance = random.Random(rank)
    made = 0
    block: list[str] = []
    while made < size:
        form = WARNING if half and chance.random() < 0.5 else chance.choice(LINES)
        line = (
            form.format(
                r=rank, p=chance.randrange(9999), q=chance.randrange(65536), c=chance.randrange(99), n=made // 100
            )
            + "\n"
        )
        made += len(line)
        block.append(line)
        if len(block) == 4096:
            yield "".join(block).encode()
            block = []
    yield "".join(block).encode()
    if rank == 0:
        yield END.format(r=rank).encode()


def _write(folder: Path, ranks: int, size: int, half: bool) -> list[Path]:
    """Write the logs.

    A few are generated line by line, the others are copies with another rank's number, as generating all would take
    minutes.
    """
    folder.mkdir()
    paths = []
    pool = [b"".join(_lines(rank, min(size, 4 << 20), half)) for rank in range(4)]
    for rank in range(ranks):
        path = folder / f"0.{rank}.log"
        with path.open("wb") as file:
            written = 0
            while written < size:
                part = pool[(rank + written) % 4].replace(b"[rank0]", f"[rank{rank}]".encode())
                written += file.write(part[: size - written])
            file.write(b"\n")
            if rank == 3:
                file.write(END.format(r=rank).encode())
        paths.append(path)
    return paths


def _grep_patterns() -> list[str]:
    """Return the catalogue's patterns in grep's syntax, without the few that grep cannot read."""
    found = []
    for pattern in shipped_catalogue().patterns:
        words = re.sub(r"\(\?P<\w+>|\(\?:|\(\?i:", "(", pattern).replace("(?i)", "").replace("(?m)", "")
        words = re.sub(r"\[\^?(?:\\.|[^\]\\])*\]", lambda match: _class(match[0]), words)
        words = words.replace(r"\d", "[0-9]").replace(r"\D", "[^0-9]").replace(r"\t", "\t")
        words = re.sub(r"([*+?}])\?", r"\1", words)
        words = re.sub(r"\\([\"'#/:,<>@%&=~ -])", r"\1", words)
        if subprocess.run(["grep", "-E", "-e", words], stdin=subprocess.DEVNULL, capture_output=True).returncode < 2:
            found.append(words)
    print(f"grep reads {len(found)} of {len(shipped_catalogue().patterns)} patterns")
    return found


def _class(text: str) -> str:
    """Translate a character class: grep knows no backslash inside one."""
    inner = text[1:-1].replace(r"\d", "0-9").replace(r"\w", "A-Za-z0-9_").replace(r"\s", " \t").replace(r"\S", "!-~")
    inner = re.sub(r"\\(.)", r"\1", inner)
    return f"[{inner}]"


def _grep(paths: list[Path], patterns: Path) -> float:
    began = time.perf_counter()
    made = subprocess.run(
        ["taskset", "-c", "0", "grep", "-c", "-E", "-f", str(patterns), *map(str, paths)],
        env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode > 1:
        raise SystemExit(f"grep: {made.stderr[:400]}")
    return time.perf_counter() - began


def _vigil(paths: list[Path]) -> tuple[float, float, dict[str, object]]:
    """Return seconds, peak MiB, and the verdict."""
    began = time.perf_counter()
    with subprocess.Popen(
        ["taskset", "-c", "0", sys.executable, "-m", "vigil_cli.main", "diagnose", "--json", *map(str, paths)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - began, used.ru_maxrss / 1024, json.loads(output)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.diagnose")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    print(stage.machine())
    size = int(options.gib * (1 << 30)) // options.ranks
    with tempfile.TemporaryDirectory(prefix="vigil-bench-") as made:
        folder = Path(made)
        paths = _write(folder / "plain", options.ranks, size, half=False)
        patterns = folder / "patterns"
        patterns.write_text("\n".join(_grep_patterns()) + "\n")
        rounds = [(_grep(paths, patterns), _vigil(paths)) for _ in range(3)]
        ratio, grep_s, (seconds, mib, verdict) = min((ours[0] / theirs, theirs, ours) for theirs, ours in rounds)
        print(
            f"{options.gib} GiB, {options.ranks} ranks: grep {grep_s:.2f} s, ours {seconds:.2f} s ({ratio:.2f}×), "
            f"{mib:.0f} MiB: {verdict['cause']}"
        )
        half = _write(folder / "half", options.ranks, size, half=True)
        half_s, half_mib, half_verdict = min(_vigil(half) for _ in range(2))
        print(f"half of all lines: {half_s:.2f} s, {half_mib:.0f} MiB: {half_verdict['cause']}")
        small = folder / "small.log"
        small.write_bytes(b"".join(_lines(0, 20_000, half=False)))
        small_s = sorted(_vigil([small])[0] for _ in range(7))[3]
        print(f"a small log: {small_s:.2f} s")
    if not verdict["cause"] == half_verdict["cause"] == CAUSE:
        raise SystemExit(f"the verdicts are {verdict['cause']} and {half_verdict['cause']}, not {CAUSE}")
    bars = {
        "grep": stage.bar("of grep's time", ratio, BAR_GREP, at_least=False, unit="×"),
        "memory": stage.bar("peak memory", max(mib, half_mib), BAR_MIB, at_least=False, unit=" MiB"),
        "half": stage.bar("half of all lines match", half_s, BAR_HALF_S, at_least=False, unit=" s"),
        "small": stage.bar("a small log", small_s, BAR_SMALL_S, at_least=False, unit=" s"),
    }
    return stage.result(
        "diagnose", bars=bars, ratio=ratio, seconds=seconds, grep_s=grep_s, mib=mib, half_s=half_s, small_s=small_s
    )


if __name__ == "__main__":
    sys.exit(main())
