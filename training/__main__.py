"""`python -m training run.toml`: one rank of a run. `python -m training verify FOLDER…`: are its digests right?

    python -m training examples/language.toml                                     # one rank, in this process
    python -m torch.distributed.run --nproc-per-node 2 -m training run.toml       # two
    python -m training run.toml --resume step-200                                 # newest (default), none, or a name
    python -m training export runs/gpt/job/checkpoints/step-400 gpt.safetensors   # the weights alone, as one file
    python -m training prepare run.toml                                           # its data alone, on any machine

Started by hand a run keeps everything in `runs/<name>` beside the TOML file, and goes on where it was stopped. Exit
codes: 0 completed (under Vigil's launcher: or stopped), 75 stopped with a checkpoint, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training import commands, config, hang, manifest, place, run_file
from training.heartbeat import Heartbeat
from training.loading import without_collections
from training.report import Reporter
from training.stopping import StopRequest

if TYPE_CHECKING:
    from training.distributed import World

STOPPED = 75


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in commands.COMMANDS:
        return commands.run(arguments[0], arguments[1:])
    options = parse(arguments)
    try:
        run = run_file.load(options.run)
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return train(run, options)


def train(run: run_file.RunFile, options: argparse.Namespace, *, heart: type[Heartbeat] = Heartbeat) -> int:
    stop = StopRequest()
    where = place.from_launcher()
    stop.listen(launched=where is not None)
    rank = int(os.environ.get("RANK", "0"))
    heartbeat = None
    if where is not None:
        hang.install(where.attempt_dir, rank=rank, incarnation=where.incarnation)
        heartbeat = heart.open(where.attempt_dir, rank=rank, incarnation=where.incarnation)
    # cuBLAS picks its workspace, and with it the order of sums, when it is first loaded.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # torch: a second that a wrong configuration need not wait for. The trainer, too, before "init": the limit of that
    # phase is short, it is for meeting the other ranks, and imports from a shared disk can take longer.
    with without_collections():
        from training import distributed, trainer  # noqa: F401
    gc.freeze()  # all of it stays, so no later collection need look through it

    distributed.wake(on_cpu=run.on_cpu)
    if heartbeat is not None:
        heartbeat.beat("init")
    world = distributed.join(on_cpu=run.on_cpu)
    if where is None:
        where = _place_by_hand(world, run, options)
        hang.install(where.attempt_dir, rank=rank, incarnation=where.incarnation)
        heartbeat = heart.open(where.attempt_dir, rank=rank, incarnation=where.incarnation)
    assert heartbeat is not None
    stop.watch(where.attempt_dir, where.incarnation)
    return _train(run, where, world, heartbeat, stop)


def _train(run: run_file.RunFile, where: place.Place, world: World, heartbeat: Heartbeat, stop: StopRequest) -> int:
    settings = run.config
    from training import communication, distributed
    from training.trainer import set_determinism

    reporter = Reporter.open(
        where.attempt_dir,
        rank=world.rank,
        incarnation=where.incarnation,
        node=os.environ.get("VIGIL_NODE", ""),
        restart_count=int(os.environ.get("VIGIL_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or 0),
        flush_seconds=settings.flush_seconds,
        flush_steps=settings.flush_steps,
    )
    set_determinism(settings.determinism)
    try:
        completed = communication.trainer(settings)(
            settings, where, world, reporter=reporter, heartbeat=heartbeat, stop=stop, mtbf_hours=run.mtbf_hours
        ).run()
    except BaseException as error:
        _fail(reporter, error)
    reporter.close()
    distributed.leave()
    return 0 if completed or where.launched else STOPPED


def _fail(reporter: Reporter, error: BaseException) -> None:
    """Says why, and ends without waiting for threads that may wait for peers that are gone."""
    from training.corpus.errors import DataError
    from training.numerics import NumericsError

    if isinstance(error, config.ConfigError | manifest.CheckpointError | DataError | NumericsError):
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    reporter.event("run.failed", error=str(error)[:4000], exception=type(error).__name__)
    reporter.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _place_by_hand(world: World, run: run_file.RunFile, options: argparse.Namespace) -> place.Place:
    from training import distributed

    made = None
    if world.leads:
        run_dir: Path = options.run_dir or options.run.parent / "runs" / run.name
        made = place.by_hand(run_dir.absolute(), resume=options.resume)
        print(f"run directory: {made.run_dir}", flush=True)
    found: place.Place = distributed.broadcast(world, made)
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m training", description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="run.toml or a whole job spec: its table [run] counts")
    parser.add_argument("--run-dir", type=Path, help="where everything is kept; default: runs/<name> beside the file")
    parser.add_argument("--resume", default=place.NEWEST, help="newest (default), none, or a checkpoint's name")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
