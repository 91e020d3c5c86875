"""Run one rank, from its command line to its exit code."""

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
from training.attempt import hang
from training.attempt import workspace as workspaces
from training.attempt.files import DISK_FULL
from training.attempt.heartbeat import Heartbeat
from training.attempt.stopping import StopRequest
from training.config import run_config
from training.config.base import ConfigError, Problem
from training.config.exit_codes import STOPPED
from training.reporting.reporter import Reporter
from training.runtime import data_roots
from training.runtime.imports import garbage_collection_paused

if TYPE_CHECKING:
    from training.contracts import TrainingLoop
    from training.federated.custom.user_code import UserCode
    from training.loop import LoopServices
    from training.runtime.distributed import World


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m training",
        description="Run one rank.",
        epilog="Other commands, each with its own --help: python -m training verify | export | prepare | plan | "
        "compare.",
    )
    parser.add_argument("run", type=Path, help="run.toml or a complete job specification; its table [run] is used")
    parser.add_argument(
        "--run-dir", type=Path, help="where everything is stored; default: runs/<name> next to the file"
    )
    parser.add_argument("--resume", default=workspaces.NEWEST, help="newest (default), none, or a checkpoint's name")
    return parser.parse_args(arguments)


def train(run: run_file.RunFile, options: argparse.Namespace, *, heartbeat_type: type[Heartbeat] = Heartbeat) -> int:
    stop = StopRequest()
    workspace = workspaces.from_launcher()
    stop.listen(launched=workspace is not None)
    rank = int(os.environ.get("RANK", "0"))
    heartbeat = None
    sys.stdout, sys.stderr = cast(TextIO, _LossyStream(sys.stdout)), cast(TextIO, _LossyStream(sys.stderr))
    if workspace is not None:
        hang.install(workspace.attempt_dir, rank=rank, incarnation=workspace.incarnation)
        heartbeat = heartbeat_type.open(workspace.attempt_dir, rank=rank, incarnation=workspace.incarnation)
    # cuBLAS chooses its workspace, which determines the order of sums, when it is first loaded.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Imported late, as torch takes a second, which configuration errors need not wait for; but before "init": that
    # phase is for meeting the other ranks and its time limit is short, while imports from a shared disk take longer.
    with garbage_collection_paused():
        from training import trainer  # noqa: F401
        from training.runtime import distributed
    gc.freeze()  # all of it stays in memory, so no later collection needs to scan it

    distributed.initialise_gpu(on_cpu=run.on_cpu)
    if heartbeat is not None:
        heartbeat.beat("init")
    world = distributed.join(on_cpu=run.on_cpu)
    if workspace is None:
        workspace = _standalone_workspace(world, run, options)
        hang.install(workspace.attempt_dir, rank=rank, incarnation=workspace.incarnation)
        heartbeat = heartbeat_type.open(workspace.attempt_dir, rank=rank, incarnation=workspace.incarnation)
    assert heartbeat is not None
    stop.watch(workspace.attempt_dir, workspace.incarnation)
    return _train(run, workspace, world, heartbeat, stop)


def _train(
    run: run_file.RunFile, workspace: workspaces.Workspace, world: World, heartbeat: Heartbeat, stop: StopRequest
) -> int:
    settings = run.config
    from training.loop import LoopServices
    from training.runtime import distributed
    from training.step import compiled_code
    from training.step.determinism import set_determinism

    reporter = Reporter(
        workspace.attempt_dir,
        rank=world.rank,
        incarnation=workspace.incarnation,
        node=os.environ.get("VIGIL_NODE", ""),
        restart_count=int(os.environ.get("VIGIL_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT") or 0),
        flush_seconds=settings.flush_seconds,
        flush_steps=settings.flush_steps,
    )
    set_determinism(settings.determinism)
    if isinstance(settings, run_config.RunConfig) and settings.compile:
        compiled_code.use_private_cache()
    if run.data_roots is not None:
        _confine(run.data_roots, workspace)
    try:
        if not run.on_cpu:
            distributed.check_devices(world, gpus_per_node=run.gpus_per_node)
        completed = _loop(run, workspace, world, LoopServices(reporter, heartbeat, stop, run.mtbf_hours)).run()
    except BaseException as error:
        _fail(reporter, error)
    reporter.close()
    distributed.leave()
    return 0 if completed or workspace.launched else STOPPED


def _confine(roots: Sequence[str], workspace: workspaces.Workspace) -> None:
    """Restrict reading to the site's folders, what this and other runs have made, and Python's standard library."""
    from training.corpus.cache import cache_dir
    from training.corpus.documents import library_folder

    data_roots.confine(roots, trusted=[cache_dir(workspace.run_dir), workspace.job_dir, library_folder()])


def _loop(run: run_file.RunFile, workspace: workspaces.Workspace, world: World, services: LoopServices) -> TrainingLoop:
    """Return the loop of the run: a federation's, the trainer's, or one that its communication provides."""
    settings = run.config
    if not isinstance(settings, run_config.RunConfig):
        from training.federated.rounds import Rounds

        return Rounds(
            settings,
            workspace,
            world,
            services,
            user_code=_user_code(run.client, workspace),
            least_share=run.least_share,
        )
    from training import contracts
    from training.trainer import Trainer

    trainer = contracts.communication(settings.communication).trainer
    return (trainer() if trainer else Trainer)(settings, workspace, world, services)


def _user_code(files: run_file.ClientFiles | None, workspace: workspaces.Workspace) -> UserCode | None:
    """Return the user's own files: where the launcher has put them, or where the run's file says they are."""
    from training.federated.custom.user_code import UserCode

    if files is None:
        return None
    folder = workspace.job_dir / "code" if workspace.launched else files.directory
    if folder is None:
        message = 'names no directory. Without a launcher nothing is fetched: write directory = ".", in a clone.'
        raise ConfigError([Problem("client", message)])
    return UserCode(folder, workspace.job_dir, **files.names)


def _fail(reporter: Reporter, error: BaseException) -> NoReturn:
    """Report the error, and end without waiting for threads that may wait for peers that are gone."""
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
    """End the process at once, as everything that counts is on disk.

    A process group's threads live for as long as anything references the group, the trainer too, and peers disconnect
    from them meanwhile: what they or a library do during the interpreter's shutdown must not fail a completed run.
    """
    with suppress(OSError):  # the reader is gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _standalone_workspace(world: World, run: run_file.RunFile, options: argparse.Namespace) -> workspaces.Workspace:
    from training.runtime import distributed

    created = None
    if world.leads:
        run_dir: Path = options.run_dir or options.run.parent / "runs" / run.name
        created = workspaces.create_standalone(run_dir.absolute(), resume=options.resume)
        print(f"run directory: {created.run_dir}", flush=True)
    workspace: workspaces.Workspace = distributed.broadcast(world, created)
    return workspace


class _LossyStream:
    """A rank's log, on the run's own disk. Output is dropped while the disk is full, and training continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _ignoring_full_disk():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _ignoring_full_disk():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _ignoring_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
