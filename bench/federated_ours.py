"""Federations of ours as they really run: Rounds with a spool and checkpoints in a folder of their own, one rank.

In a process each: `python -m bench.federated --one NAME …` (bench/federated.py) prints what it found as its last line.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.federated.rounds import Rounds

Hook = Callable[["Rounds"], None]
MLP = {"recipe": "tabular", "learning_rate": 0.3, "batch": 32, "split": "iid", "rounds": 100_000}
SAVES = 5
MIB = 2**20


class EvaluatedRound(Exception):
    """Raised when a run has run for long enough."""


@contextmanager
def running(table: dict[str, Any], *, began: Hook, after: Hook) -> Iterator[Callable[[], None]]:
    """Run the federation to its last round, or until a hook raises Over. `after` is called after each round."""
    from training.attempt import workspace
    from training.attempt.heartbeat import Heartbeat
    from training.attempt.stopping import StopRequest
    from training.federated.rounds import Rounds
    from training.federation import config
    from training.loop import LoopServices
    from training.reporting.reporter import Reporter
    from training.runtime import distributed
    from training.runtime.distributed import StepFlags
    from training.step.determinism import set_determinism

    class Watched(Rounds):
        def _begin(self, start: Any) -> None:
            super()._begin(start)
            began(self)

        def _between_steps(self, agreed: StepFlags) -> bool:
            cut = super()._between_steps(agreed)
            after(self)
            return cut

    settings = config.parse(table)
    set_determinism(settings.determinism)
    world = distributed.join(on_cpu=True)
    made = workspace.create_standalone(Path(tempfile.mkdtemp(prefix="vigil-federation-"))) if world.leads else None
    where = distributed.broadcast(world, made)
    reporter = Reporter(where.attempt_dir, rank=world.rank, incarnation=0)
    heartbeat = Heartbeat.open(where.attempt_dir, rank=world.rank, incarnation=0)
    rounds = Watched(settings, where, world, LoopServices(reporter, heartbeat, StopRequest()))

    def run() -> None:
        with contextlib.suppress(EvaluatedRound):
            rounds.run()

    try:
        yield run
    finally:
        reporter.close()
        distributed.leave()
        if world.leads:
            shutil.rmtree(where.run_dir, ignore_errors=True)


def turns(request: str) -> None:
    """Do rounds in turn with others (Turns). `request`: the run's table, and where its work goes."""
    from bench.federated_rivals import Over as NoMore
    from bench.federated_rivals import Turns

    found = json.loads(request)
    taken: list[Turns] = []

    def began(rounds: Rounds) -> None:
        if found["work"]:
            write_work(rounds, Path(found["work"]))
        taken.append(Turns(lambda: score(rounds)))
        taken[0].begin()

    def after(rounds: Rounds) -> None:
        try:
            taken[0].done()
        except NoMore:
            raise EvaluatedRound from None

    with running(found["table"], began=began, after=after) as run, contextlib.suppress(NoMore):
        run()


def score(rounds: Rounds) -> dict[str, float]:
    judged = rounds.evaluator.evaluate(rounds.server, should_continue=lambda: True)
    assert judged is not None
    return {name: judged.means[name] for name in ("loss", "accuracy") if name in judged.means}


def write_work(rounds: Rounds, path: Path) -> None:
    """Write the data, split and weights, so that the others do exactly the same work."""
    import numpy as np

    from bench.federated_rivals import Work

    federation, config = rounds.federation, rounds.config
    model, owners = federation.model, federation.divided.owners
    rows, targets = model.task.batch("train", np.arange(len(owners["train"])))
    state = model.task.batch("validation", np.arange(len(owners["validation"])))
    weights = model.weights.tensors(rounds.server.weights)
    Work.write(
        path,
        rows=rows.numpy(),
        targets=targets.numpy(),
        owners=owners["train"],
        held_out_rows=state[0].numpy(),
        held_out_targets=state[1].numpy(),
        batch=np.array(config.batch),
        learning_rate=np.array(config.learning_rate),
        **{f"weight:{name}": value.numpy() for name, value in weights.items()},
    )


def alone(request: str) -> dict[str, Any]:
    """Measure rounds from torch's import on: the end of the first round, the time of one round, and memory.

    Memory is what Linux counts as resident, above what it was once torch was imported (`torch_mib`). `rounds_mib`:
    the peak in a round, without the table of samples, which the recipe holds as a whole.
    """
    import torch

    torch.set_num_threads(1)
    found = json.loads(request)
    base, began_at = resident("VmRSS"), time.perf_counter()
    forget_peak()
    moments: list[float] = []
    result = {"made_mib": 0.0, "first_seconds": 0.0, "table_mib": 0.0}

    def began(rounds: Rounds) -> None:
        result["made_mib"] = (resident("VmHWM") - base) / MIB
        result["table_mib"] = table_bytes(rounds) / MIB
        forget_peak()
        moments.append(time.perf_counter())

    def after(rounds: Rounds) -> None:
        moments.append(time.perf_counter())
        result["first_seconds"] = result["first_seconds"] or moments[-1] - began_at
        if len(moments) > found["rounds"]:
            raise EvaluatedRound

    with running(found["table"], began=began, after=after) as run, contextlib.redirect_stdout(io.StringIO()):
        run()
    in_rounds = (resident("VmHWM") - base) / MIB
    return {
        **result,
        "torch_mib": base / MIB,
        "peak_mib": max(result["made_mib"], in_rounds),
        "rounds_mib": in_rounds - result["table_mib"],
        "seconds": [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)],
    }


def state(request: str) -> dict[str, Any]:
    """Measure the peak memory while one round is saved and the next ones run, and what clients store.

    All ranks of a run call it together, each with its own RANK.
    """
    import torch

    torch.set_num_threads(1)
    found = json.loads(request)
    moments: list[float] = []
    result: dict[str, Any] = {}

    def began(rounds: Rounds) -> None:
        forget_peak()
        moments.append(time.perf_counter())

    def after(rounds: Rounds) -> None:
        moments.append(time.perf_counter())
        if rounds.step == found["saved"]:
            rounds._save()
            result["stall_seconds"] = time.perf_counter() - moments[-1]
        if rounds.step >= found["rounds"]:
            rounds.checkpoints.finish_save()
            assert rounds.checkpoints.latest is not None
            result["save_seconds"] = rounds.checkpoints.latest.seconds
            result["peak_mib"] = resident("VmHWM") / MIB
            clients, state = rounds.server.clients, rounds.server.client_state
            result["kept_mib"] = sum(v[0].nbytes * clients for v in state.values()) / MIB
            raise EvaluatedRound

    with running(found["table"], began=began, after=after) as run, contextlib.redirect_stdout(io.StringIO()):
        run()
    return {**result, "seconds": [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]}


def table_bytes(rounds: Rounds) -> int:
    """Return the bytes of all samples together."""
    owners = rounds.federation.divided.owners
    sample = rounds.federation.model.task.batch("train", owners["train"][:0])
    samples = sum(map(len, owners.values()))
    return samples * sum(part[0].numel() * part.itemsize if len(part) else _each(part) for part in sample)


def _each(part: Any) -> int:
    size: int = part.itemsize
    for length in part.shape[1:]:
        size *= length
    return size


def ledger(request: str) -> dict[str, Any]:
    """Measure the CPU time of what is written per round: reports, in whichever thread, and checkpoints.

    It is processor time rather than elapsed time, half of which would come from other processes on the machine.
    """
    import torch

    torch.set_num_threads(1)
    found = json.loads(request)
    spent = {"reports": 0.0}
    marks: list[tuple[float, float]] = []
    result: dict[str, Any] = {}

    def began(rounds: Rounds) -> None:
        for name in ("report_round", "report_evaluation"):
            setattr(rounds.round_reporter, name, _counted(getattr(rounds.round_reporter, name), spent))

    def after(rounds: Rounds) -> None:
        if rounds.step == found["warm"]:
            spent["reports"] = 0.0
        if rounds.step >= found["warm"]:
            marks.append((time.process_time(), time.thread_time()))
        if len(marks) > found["rounds"]:
            result.update(_saved(rounds))
            raise EvaluatedRound

    with running(found["table"], began=began, after=after) as run, contextlib.redirect_stdout(io.StringIO()):
        run()
    rounds = found["rounds"]
    process, thread = ((marks[-1][which] - marks[0][which]) / rounds for which in (0, 1))
    reports = spent["reports"] / rounds + process - thread
    part = reports / process + result["save_seconds"] / result["interval_seconds"]
    return {"round_seconds": process, "report_seconds": reports, **result, "part": part}


def _counted(function: Callable[..., None], spent: dict[str, float]) -> Callable[..., None]:
    def counted(*arguments: Any) -> None:
        began = time.thread_time()
        function(*arguments)
        spent["reports"] += time.thread_time() - began

    return counted


def _saved(rounds: Rounds) -> dict[str, float]:
    """Return the CPU time of a checkpoint up to its commit (not the first, which prepares), and the first interval."""
    taken = []
    for _ in range(SAVES + 1):
        began = time.process_time()
        rounds._save()
        rounds.checkpoints.wait()
        taken.append(time.process_time() - began)
        rounds.step += 1  # each under a name of its own
    return {"save_seconds": sorted(taken[1:])[SAVES // 2], "interval_seconds": rounds.cadence.interval}


def sums(request: str) -> dict[str, Any]:
    """Add many updates of a large model as the controller does, and by float32's own add_, in turn."""
    import torch

    from training.federated import schedule
    from training.federated import sums as ours

    torch.set_num_threads(1)
    found = json.loads(request)
    numbers, updates = found["numbers"], found["updates"]
    weights = torch.linspace(1, 2, updates, dtype=torch.float64)
    ids = torch.arange(updates).numpy()
    same = torch.ones(updates, dtype=torch.int64).numpy()
    chunks = schedule.make_chunks(ids, same, same, parameters=numbers, is_unstacked=True)
    rows = torch.randn(max(len(chunk.clients) for chunk in chunks), numbers)  # more than any cache holds

    def with_tree() -> torch.Tensor:
        tree = ours.Tree(len(chunks))
        for number, chunk in enumerate(chunks):
            tree.put_sum(number, [(rows[: len(chunk.clients)], weights[chunk.clients])], torch.device("cpu"))
        return tree.root

    def plain() -> torch.Tensor:
        total = torch.zeros(numbers)
        for chunk in chunks:
            for row, client in zip(rows, chunk.clients.tolist(), strict=False):
                total.add_(row, alpha=float(weights[client]))
        return total

    taken: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(found["pairs"]):
        for name, function in (("ours", with_tree), ("plain", plain)):
            began = time.perf_counter()
            function()
            taken[name].append(time.perf_counter() - began)
    difference = (with_tree() - plain().double()).abs().max() / with_tree().abs().max()
    return {**taken, "difference": float(difference)}


def resident(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    """Reset VmHWM."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
