"""One rank of a run, from its command line to its exit code."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from training import manifest, run_file
from training.attempt import hang, workspace
from training.attempt.files import DISK_FULL
from training.attempt.heartbeat import Heartbeat
from training.attempt.stopping import StopRequest
from training.config import run_config
from training.config.base import ConfigError, Problem
from training.reporting.reporter import Reporter
from training.runtime import data_roots
from training.runtime.imports import without_collections

if TYPE_CHECKING:
    from training.federated.custom.program import Program
    from training.loop import Loop
    from training.runtime.distributed import World

STOPPED = 75


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m training",
        description="One rank of a run.",
        epilog="Other things to do, each with --help of its own: python -m training verify | export | prepare | plan | "
        "compare.",
    )
    parser.add_argument("run", type=Path, help="run.toml or a whole job spec: its table [run] counts")
    parser.add_argument("--run-dir", type=Path, help="where everything is kept; default: runs/<name> beside the file")
    parser.add_argument("--resume", default=workspace.NEWEST, help="newest (default), none, or a checkpoint's name")
    return parser.parse_args(arguments)


def train(run: run_file.RunFile, options: argparse.Namespace, *, heart: type[Heartbeat] = Heartbeat) -> int:
    stop = StopRequest()
    where = workspace.from_launcher()
    stop.listen(launched=where is not None)
    rank = int(os.environ.get("RANK", "0"))
    heartbeat = None
    sys.stdout, sys.stderr = cast(TextIO, _Log(sys.stdout)), cast(TextIO, _Log(sys.stderr))
    if where is not None:
        hang.install(where.attempt_dir, rank=rank, incarnation=where.incarnation)
        heartbeat = heart.open(where.attempt_dir, rank=rank, incarnation=where.incarnation)
    # cuBLAS picks its workspace, and with it the order of sums, when it is first loaded.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # torch: a second that a wrong configuration need not wait for. The trainer, too, before "init": the limit of that
    # phase is short, it is for meeting the other ranks, and imports from a shared disk can take longer.
    with without_collections():
        from training import trainer  # noqa: F401
        from training.runtime import distributed
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


def _train(
    run: run_file.RunFile, where: workspace.Workspace, world: World, heartbeat: Heartbeat, stop: StopRequest
) -> int:
    settings = run.config
    from training.runtime import distributed
    from training.step import compiled_code
    from training.step.determinism import set_determinism

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
    if isinstance(settings, run_config.RunConfig) and settings.compile:
        compiled_code.keep_apart()
    if run.data_roots is not None:
        _confine(run.data_roots, where)
    try:
        if not run.on_cpu:
            distributed.check_devices(world, gpus_per_node=run.gpus_per_node)
        given = {"reporter": reporter, "heartbeat": heartbeat, "stop": stop, "mtbf_hours": run.mtbf_hours}
        completed = _loop(run, where, world, given).run()
    except BaseException as error:
        _fail(reporter, error)
    reporter.close()
    distributed.leave()
    return 0 if completed or where.launched else STOPPED


def _confine(roots: Sequence[str], where: workspace.Workspace) -> None:
    """Confines it to the site's folders, what this and other runs have made, and the text that every Python has."""
    from training.corpus.cache import cache_dir
    from training.corpus.documents import library_folder

    data_roots.confine(roots, own=[cache_dir(where.run_dir), where.job_dir, library_folder()])


def _loop(run: run_file.RunFile, where: workspace.Workspace, world: World, given: dict[str, Any]) -> Loop:
    """The loop of the run: a federation's, the trainer's, or one that its communication brings."""
    settings = run.config
    if not isinstance(settings, run_config.RunConfig):
        from training.federated.rounds import Rounds

        return Rounds(settings, where, world, program=_program(run.client, where), least_share=run.least_share, **given)
    from training import contracts
    from training.trainer import Trainer

    own = contracts.communication(settings.communication).trainer
    return (own() if own else Trainer)(settings, where, world, **given)


def _program(files: run_file.ClientFiles | None, where: workspace.Workspace) -> Program | None:
    """Somebody's own files: where the launcher has put them, or where the run's file says that they are."""
    from training.federated.custom.program import Program

    if files is None:
        return None
    folder = where.job_dir / "code" if where.launched else files.directory
    if folder is None:
        message = 'names no directory. By hand nothing is fetched: write directory = ".", in a clone.'
        raise ConfigError([Problem("client", message)])
    return Program(folder, where.job_dir, **files.names)


def _fail(reporter: Reporter, error: BaseException) -> NoReturn:
    """Says why, and ends without waiting for threads that may wait for peers that are gone."""
    from training.corpus.errors import DataError
    from training.guards.numerics import NumericsError

    if isinstance(error, ConfigError | manifest.CheckpointError | DataError | NumericsError):
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    reporter.event("run.failed", error=str(error)[:4000], exception=type(error).__name__)
    reporter.close()
    end(1)


def end(code: int) -> NoReturn:
    """Ends the process at once, as all that counts is on disk.

    A process group's threads live for as long as anything holds the group, the trainer too, and peers hang up on them
    meanwhile: what they or a library do while the interpreter is taken apart must not fail a run that is completed.
    """
    with suppress(OSError):  # nobody reads it any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _place_by_hand(world: World, run: run_file.RunFile, options: argparse.Namespace) -> workspace.Workspace:
    from training.runtime import distributed

    made = None
    if world.leads:
        run_dir: Path = options.run_dir or options.run.parent / "runs" / run.name
        made = workspace.create_standalone(run_dir.absolute(), resume=options.resume)
        print(f"run directory: {made.run_dir}", flush=True)
    found: workspace.Workspace = distributed.broadcast(world, made)
    return found


class _Log:
    """Where a rank says things: a file on the run's own disk. What has no room there is lost, and training goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _lost_where_full():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _lost_where_full():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _lost_where_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
