"""`python -m training compare RUN.toml`: the same work done in several ways, side by side."""

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
from training.compare import asked, picture
from training.compare.asked import Candidate, Refused
from training.compare.results import Comparison, Result
from training.compare.running import Failed, Run, Stopped, Work, run
from training.compare.table import seconds, size, table
from training.config.asked import ConfigError
from training.launch.ranks import become_subreaper
from training.launch.stop import Signals
from training.provenance.machine import gpus, processors

EPILOG = """\
--with NAME=setting=value,setting=value names a way and what it does otherwise than RUN.toml; settings are those of
[run], tables by a dot (mesh.tp=2, fsdp.reshard=never). Without any: ddp and fsdp.

    python -m training compare run.toml
    python -m training compare run.toml --with plain=dtype=fp32 --with half=dtype=bf16 --ranks 4 --rounds 3
"""
STOPPED = 130
"""The exit code after Ctrl-C, as a shell tells it."""
SAY_SECONDS = 0.5


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m training compare",
        description="Runs two or more configurations on the same work and prints their figures side by side.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN.toml", help="a run.toml or a whole job spec")
    parser.add_argument("--with", dest="changes", action="append", default=[], metavar="NAME=key=value,…", help="a way")
    parser.add_argument("--steps", type=_count, default=40, help="of each run; 40")
    parser.add_argument("--rounds", type=_count, default=5, help="of all ways in turn, A/B/A/B; 5")
    parser.add_argument("--ranks", type=_count, help="default: as RUN.toml says for a node, else one a GPU, else 2")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where everything is kept; a new folder beside RUN.toml"
    )
    return parser.parse_args(arguments)


def compare(options: argparse.Namespace) -> int:
    """0 if all ran, 1 if one failed, 2 if it can't be compared, 130 if it was stopped."""
    try:
        base = run_file.load(options.run)
        there = 0 if base.on_cpu else len(_gpus_here())
        ranks = options.ranks or _ranks_of(options.run) or there or 2
        if 0 < there < ranks:
            raise Refused([f"--ranks: {ranks} ranks need a GPU each, and here are {there}."])
        ways = asked.candidates(base.of_trainer(what="compare"), options.changes, steps=options.steps, ranks=ranks)
        out = _folder(options.out, options.run, base.name)
    except (ConfigError, Refused, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    signals = Signals()
    signals.install()
    become_subreaper()
    work = Work(
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
        results=[Result(way.name, way.changes, []) for way in ways],
    )
    size = f"{ranks} rank{'s' * (ranks > 1)}, {options.rounds} round{'s' * (options.rounds > 1)}"
    print(f"{' against '.join(way.name for way in ways)}: {size}; in {out}", flush=True)
    try:
        comparison = _rounds(comparison, ways, work, signals)
    except Stopped:
        print("\nstopped; nothing of it runs any more", file=sys.stderr)
        return STOPPED
    return _tell(comparison, out)


def _rounds(comparison: Comparison, ways: list[Candidate], work: Work, signals: Signals) -> Comparison:
    """A/B/A/B; a way that fails is not tried again."""
    results = {result.name: result for result in comparison.results}
    for number in range(1, comparison.rounds + 1):
        for way in ways:
            known = results[way.name]
            if known.failure:
                continue
            progress = _Progress(f"round {number} of {comparison.rounds}  {way.name}", work)
            try:
                with progress:
                    found = run(way, number, work, signals, progress.watch)
            except Failed as failed:
                where = work.out / f"{way.name}-{number}" / "job"
                failure = f"round {number}: {failed} (logs in {where})"
                results[way.name] = Result(way.name, way.changes, known.runs, failure)
                progress.say(f"failed: {failed}")
                continue
            results[way.name] = Result(way.name, way.changes, [*known.runs, found])
            progress.say(_in_short(found))
    return Comparison(**{**vars(comparison), "results": list(results.values())})


def _in_short(run: Run) -> str:
    rate = run.units_per_step / run.seconds / len(run.peak_bytes)
    return f"{rate:,.0f} {run.unit}/s a rank, {size(max(run.peak_bytes))}, step {seconds(run.seconds)}"


def _tell(comparison: Comparison, out: Path) -> int:
    print()
    print(table(comparison))
    (out / "compare.json").write_text(json.dumps(comparison.told(), indent=1) + "\n", encoding="utf-8")
    if comparison.ran:
        (out / "compare.svg").write_text(picture.draw(comparison), encoding="utf-8")
    print(f"\n{out / 'compare.json'}" + f", {out / 'compare.svg'}" * bool(comparison.ran))
    return 1 if any(result.failure for result in comparison.results) else 0


class _Progress:
    """Says while a run lasts how far it is, where somebody looks on; otherwise a line when it is over."""

    def __init__(self, what: str, work: Work) -> None:
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

    def say(self, result: str) -> None:
        print(f"{chr(13) * self._live}{self._what}: {result}{' ' * 20 * self._live}", flush=True)

    def _follow(self) -> None:
        while self._live and not self._over.wait(SAY_SECONDS):
            beat = read_beat(heartbeat_path(self._attempt, rank=0, incarnation=0)) if self._attempt else None
            where = "starting" if beat is None else beat.phase
            if beat is not None and beat.phase in ("step", "data"):
                where = f"step {beat.step} of {self._steps}"
            print(f"\r{self._what}: {where}, {time.monotonic() - self._began:.0f} s    ", end="", flush=True)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _ranks_of(file: Path) -> int:
    """The ranks of one node, as the file says in [launch] or [resources]; 0 where it says nothing."""
    document = tomllib.loads(file.read_text(encoding="utf-8"))
    allocation = document.get("launch", document.get("resources", {}))
    found = [allocation.get(name) for name in ("gpus_per_node", "ranks_per_node") if isinstance(allocation, dict)]
    return next((count for count in found if type(count) is int and count > 0), 0)


def _folder(wanted: Path | None, file: Path, name: str) -> Path:
    """One that is new, or empty."""
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        if any(wanted.iterdir()):
            raise Refused([f"--out: {wanted} is not empty. Name a new folder."])
        return wanted.absolute()
    runs = file.absolute().parent / "runs"
    runs.mkdir(exist_ok=True)
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.compare-"
    number = 1
    while True:
        with suppress(FileExistsError):
            (found := runs / f"{stem}{number}").mkdir()
            return found
        number += 1


def _gpus_here() -> list[dict[str, object]]:
    found: list[dict[str, object]] = gpus(os.environ.get("CUDA_VISIBLE_DEVICES")).get("gpus", [])
    return found


def _machine() -> str:
    """When and on what."""
    found = processors()
    told = [
        time.strftime("%Y-%m-%d"),
        f"{found['cpus']} × {found.get('cpu', 'processors')}",
        f"{found['memory_gib']} GiB",
    ]
    told += [str(gpu["name"]) for gpu in _gpus_here()]
    return ", ".join([*told, f"load before {os.getloadavg()[0]:.1f}"])


def _cache(file: Path) -> Path:
    """Where the run itself keeps its data when it is started by hand."""
    from training.corpus.cache import cache_dir

    return cache_dir(file.absolute().parent / "runs" / "compare")
