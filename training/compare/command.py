"""`python -m training compare RUN.toml`: run the same work with several configurations, and compare them."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from training import run_file
from training.attempt.heartbeat import heartbeat_path, read_beat
from training.compare import candidates, picture
from training.compare.candidates import Candidate, ComparisonError
from training.compare.results import CandidateResult, Comparison
from training.compare.running import CandidateRun, ComparisonStopped, ComparisonWork, RunFailed, run
from training.compare.table import seconds, size, table
from training.config.base import ConfigError
from training.launch.ranks import become_subreaper
from training.launch.stop import Signals
from training.provenance.machine import gpus, processors

EPILOG = """\
--with NAME=setting=value,setting=value names a candidate and its changes to RUN.toml. Settings are those of [run],
with a dot for tables (mesh.tp=2, fsdp.reshard=never). Without --with: ddp and fsdp.

    python -m training compare run.toml
    python -m training compare run.toml --with plain=dtype=fp32 --with half=dtype=bf16 --ranks 4 --rounds 3
"""
STOPPED = 130
"""The exit code after Ctrl-C, as a shell reports it."""
PROGRESS_SECONDS = 0.5


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m training compare",
        description="Run two or more configurations on the same work and print their results side by side.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN.toml", help="a run.toml or a complete job specification")
    parser.add_argument(
        "--with", dest="changes", action="append", default=[], metavar="NAME=key=value,…", help="a candidate"
    )
    parser.add_argument("--steps", type=_count, default=40, help="steps of each run (default 40)")
    parser.add_argument(
        "--rounds", type=_count, default=5, help="how often to run all candidates in turn, A/B/A/B (default 5)"
    )
    parser.add_argument("--ranks", type=_count, help="default: as in RUN.toml for one node, else one per GPU, else 2")
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder; default: a new folder next to RUN.toml")
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace) -> int:
    """Return 0 if all runs succeeded, 1 if one failed, 2 if the comparison is impossible, 130 if it was stopped."""
    try:
        base = run_file.load(options.run)
        gpu_count = 0 if base.on_cpu else len(_gpus_here())
        ranks = options.ranks or _configured_ranks(options.run) or gpu_count or 2
        if 0 < gpu_count < ranks:
            raise ComparisonError([f"--ranks: {ranks} ranks need a GPU each, but only {gpu_count} are available."])
        candidates_ = candidates.candidates(
            base.trainer_config(what="compare"), options.changes, steps=options.steps, ranks=ranks
        )
        out = _folder(options.out, options.run, base.name)
    except (ConfigError, ComparisonError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    signals = Signals()
    signals.install()
    become_subreaper()
    work = ComparisonWork(
        ranks=ranks,
        steps=options.steps,
        on_cpu=base.on_cpu,
        out=out,
        cache=_cache(options.run),
    )
    comparison = Comparison(
        name=base.name,
        machine=_machine(),
        ranks=ranks,
        steps=options.steps,
        rounds=options.rounds,
        seed=base.config.seed,
        results=[CandidateResult(candidate.name, candidate.changes, []) for candidate in candidates_],
    )
    size = f"{ranks} rank{'s' * (ranks > 1)}, {options.rounds} round{'s' * (options.rounds > 1)}"
    print(f"{' vs '.join(candidate.name for candidate in candidates_)}: {size}; in {out}", flush=True)
    try:
        comparison = _run_rounds(comparison, candidates_, work, signals)
    except ComparisonStopped:
        print("\nstopped; no process is left running", file=sys.stderr)
        return STOPPED
    return _write_results(comparison, out)


def _run_rounds(
    comparison: Comparison, candidates_: list[Candidate], work: ComparisonWork, signals: Signals
) -> Comparison:
    """Run all candidates in turn, A/B/A/B; one that fails is not tried again."""
    results = {result.name: result for result in comparison.results}
    for number in range(1, comparison.rounds + 1):
        for candidate in candidates_:
            result = results[candidate.name]
            if result.failure:
                continue
            progress = _Progress(f"round {number} of {comparison.rounds}  {candidate.name}", work)
            try:
                with progress:
                    finished = run(candidate, number, work, signals, progress.watch)
            except RunFailed as failed:
                where = work.out / f"{candidate.name}-{number}" / "job"
                failure = f"round {number}: {failed} (logs in {where})"
                results[candidate.name] = CandidateResult(candidate.name, candidate.changes, result.runs, failure)
                progress.finish(f"failed: {failed}")
                continue
            results[candidate.name] = CandidateResult(candidate.name, candidate.changes, [*result.runs, finished])
            progress.finish(_summary(finished))
    return Comparison(**{**vars(comparison), "results": list(results.values())})


def _summary(run: CandidateRun) -> str:
    rate = run.units_per_step / run.seconds / len(run.peak_bytes)
    return f"{rate:,.0f} {run.unit}/s a rank, {size(max(run.peak_bytes))}, step {seconds(run.seconds)}"


def _write_results(comparison: Comparison, out: Path) -> int:
    print()
    print(table(comparison))
    (out / "compare.json").write_text(json.dumps(comparison.to_dict(), indent=1) + "\n", encoding="utf-8")
    if comparison.ran:
        (out / "compare.svg").write_text(picture.draw(comparison), encoding="utf-8")
    print(f"\n{out / 'compare.json'}" + f", {out / 'compare.svg'}" * bool(comparison.ran))
    return 1 if any(result.failure for result in comparison.results) else 0


class _Progress:
    """Shows on a terminal how far a run is; otherwise prints one line when it is over."""

    def __init__(self, what: str, work: ComparisonWork) -> None:
        self._what, self._steps = what, work.steps
        self._attempt: Path | None = None
        self._over = threading.Event()
        self._began = time.monotonic()
        self._live = sys.stdout.isatty()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def watch(self, attempt: Path) -> None:
        self._attempt = attempt

    def finish(self, result: str) -> None:
        print(f"{chr(13) * self._live}{self._what}: {result}{' ' * 20 * self._live}", flush=True)

    def _follow(self) -> None:
        while self._live and not self._over.wait(PROGRESS_SECONDS):
            beat = read_beat(heartbeat_path(self._attempt, rank=0, incarnation=0)) if self._attempt else None
            where = "starting" if beat is None else beat.phase
            if beat is not None and beat.phase in ("step", "data"):
                where = f"step {beat.step} of {self._steps}"
            print(f"\r{self._what}: {where}, {time.monotonic() - self._began:.0f} s    ", end="", flush=True)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _configured_ranks(file: Path) -> int:
    """Return the ranks per node from [launch] or [resources]; 0 if neither says."""
    document = tomllib.loads(file.read_text(encoding="utf-8"))
    allocation = document.get("launch", document.get("resources", {}))
    found = [allocation.get(name) for name in ("gpus_per_node", "ranks_per_node") if isinstance(allocation, dict)]
    return next((count for count in found if type(count) is int and count > 0), 0)


def _folder(wanted: Path | None, file: Path, name: str) -> Path:
    """Return a folder that is new or empty."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise ComparisonError([f"--out: {wanted} is not empty. Name a new folder."])
        return wanted.absolute()
    runs = file.absolute().parent / "runs"
    runs.mkdir(exist_ok=True)
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.compare-"
    number = 1
    while True:
        with suppress(FileExistsError):
            (folder := runs / f"{stem}{number}").mkdir()
            return folder
        number += 1


def _gpus_here() -> list[dict[str, object]]:
    listed: list[dict[str, object]] = gpus(os.environ.get("CUDA_VISIBLE_DEVICES")).get("gpus", [])
    return listed


def _machine() -> str:
    """Describe the date and the machine."""
    cpu = processors()
    parts = [
        time.strftime("%Y-%m-%d"),
        f"{cpu['cpus']} × {cpu.get('cpu', 'processors')}",
        f"{cpu['memory_gib']} GiB",
    ]
    parts += [str(gpu["name"]) for gpu in _gpus_here()]
    return ", ".join([*parts, f"load before {os.getloadavg()[0]:.1f}"])


def _cache(file: Path) -> Path:
    """Return the folder in which the run would cache its data when started manually."""
    from training.corpus.cache import cache_dir

    return cache_dir(file.absolute().parent / "runs" / "compare")
