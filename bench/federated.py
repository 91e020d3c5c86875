"""Rounds of a federation of virtual clients, beside a plain torch loop, pfl-research and Flower's simulation.

    python -m bench federated [--row rounds|crowd|state|sum|ledger …] [--turns 5]
    python -m bench federated --gallery          # the gallery in docs/reference/

All train the same: a network 64-64-10 on 1,497 digits that are divided evenly, FedAvg, one epoch in batches of 32. Each
is a process of its own, and they take turns; ours are whole rounds, with validation, spool and checkpoints, of which
the others have none. One thread each; Flower has an actor a core, each of one thread. The rivals are installed into
var/bench on demand, with the torch of this environment; one that can't be is not measured, and the rest goes on.

Bars: 1,000 clients ≥ 4× the loop, ≥ 5× pfl-research, ≥ 20× Flower, ≤ 0.3 s, ≤ 150 MiB above torch, the first round
≤ 3 s after torch's import; 100 clients ≥ 1.5× the loop, ≥ 10× Flower; 10,000 clients ≤ 3 s, and the peak of
the process ≤ 1.1× that of 1,000 with as many samples each; what SCAFFOLD's peak with 10,000 clients, one save with it,
lies above FedAvg's ≤ 1.3× what all clients keep, on each of two ranks ≤ 1.5×; the sum of 100 updates of 10 M numbers in
float64 ≤ 2.5× float32's; what is written down ≤ 10 % of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")

from training.launch.environment import HEAP  # for all of them: theirs gain by it, too

os.environ.update(HEAP)


from bench import stage
from bench.contenders import Contender, ContenderTurn, Silent, contending

FLOWER = ("flwr[simulation]==1.41.*",)
PFL = (
    "--no-deps", "pfl==0.6.0", "dp-accounting==0.5.*", "prv-accountant==0.2.*", "numpy", "scipy", "dm-tree", "absl-py",
    "attrs", "wrapt", "multiprocess", "dill",
)  # fmt: skip
"""By name, for its own requirements would bring another torch."""
RIVALS = {"pfl-research": ("federated-pfl", PFL, "pfl"), "Flower": ("federated-flower", FLOWER, "flower")}
ROWS = ("rounds", "crowd", "state", "sum", "ledger")
TURNS = 5
SAMPLES = 10
"""Of each client of a larger crowd."""
ALIKE = 10.0
"""Millionths by which losses may be apart of those that do the same. A client has one batch, so the order in it
is nothing, and what is left is float32's rounding: below 1."""


@dataclass(frozen=True)
class Sizes:
    clients: tuple[int, ...] = (1000, 100)
    rounds: int = 2
    turns: int = TURNS
    client_counts: tuple[int, int] = (1000, 10_000)
    stateful_clients: int = 10_000
    """Clients that keep something from round to round."""
    numbers: int = 10_000_000
    updates: int = 100
    pairs: int = 3
    ledger_rounds: int = 60


BARS = {
    1000: {"loop": 4.0, "pfl-research": 5.0, "Flower": 20.0},
    100: {"loop": 1.5, "Flower": 10.0},
}
"""Of so many clients: how many times as fast as whom."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.federated")
    parser.add_argument("--row", action="append", choices=ROWS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--gallery", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "ASKED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return _measure_in_child(*options.one)
    print(stage.machine())
    if options.gallery:
        from bench.federated_gallery import write

        return write(stage.REPOSITORY / "docs" / "reference")
    return measure(options.row or ROWS, Sizes(turns=options.turns))


def measure(rows: Sequence[str], sizes: Sizes, *, rivals: bool = True) -> int:
    print("one thread each (OMP_NUM_THREADS=1, torch.set_num_threads(1)); Flower has an actor a core, one thread each")
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    if "rounds" in rows:
        for clients in sizes.clients:
            figures[f"{clients}"] = _rounds(clients, sizes, bars, rivals=rivals)
        figures["alone"] = _alone(max(sizes.clients), bars)
    if "crowd" in rows:
        figures["crowd"] = _many_clients(sizes, bars)
    if "state" in rows:
        figures["state"] = _state(sizes, bars)
    if "sum" in rows:
        figures["sum"] = _sum(sizes, bars)
    if "ledger" in rows:
        figures["ledger"] = _ledger(max(sizes.clients), sizes, bars)
    return stage.result("federated", bars=bars, **figures)


def _measure_in_child(name: str, request: str) -> int:
    """Run a measurement in a child process and return the result that it prints as its last line."""
    import torch

    torch.set_num_threads(1)
    from bench import federated_ours, federated_rivals

    if name in ("turns", "loop"):
        (federated_ours.turns if name == "turns" else federated_rivals.loop)(request)
    else:
        print(json.dumps(getattr(federated_ours, name)(request)))
    return 0


def _rounds(clients: int, sizes: Sizes, bars: dict[str, bool], *, rivals: bool) -> dict[str, Any]:
    """Run our rounds and the others' in turn; the first round of each is not counted."""
    from bench.federated_ours import MLP

    print(f"\n{clients:,} clients, {sizes.turns} turns of {sizes.rounds} rounds each, after one that warms up")
    found: dict[str, list[ContenderTurn]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = folder / "work.npz"
        options = json.dumps({"table": {**MLP, "clients": clients}, "work": str(work)})
        ours = (sys.executable, "-m", "bench.federated", "--one")
        contenders = {"ours": stack.enter_context(contending((*ours, "turns", options), folder, {}))}
        contenders["loop"] = stack.enter_context(contending((*ours, "loop", str(work)), folder, {}))
        for name in RIVALS if rivals else ():
            try:
                contenders[name] = stack.enter_context(_rival(name, work, folder))
                contenders[name].turn(1)
            except (Silent, OSError, subprocess.CalledProcessError) as error:
                contenders.pop(name, None)
                print(f"  {name}: not measured: {' '.join(str(error).split())[:300]}")
        for name in ("ours", "loop"):
            contenders[name].turn(1)
        for _ in range(sizes.turns):
            for name, contender in contenders.items():
                found.setdefault(name, []).append(contender.turn(sizes.rounds))
    return _compared(clients, found, bars)


@contextmanager
def _rival(name: str, work: Path, folder: Path) -> Iterator[Contender]:
    """Return third-party software in an environment of its own, with this environment's torch."""
    place, packages, function = RIVALS[name]
    python = stage.others(place, *packages)
    (site,) = (python.parent.parent / "lib").glob("python3*/site-packages")
    import torch

    (site / "torch_of_this_environment.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    code = f"from bench.federated_rivals import {function}; {function}({str(work)!r})"
    environment = {"FLWR_HOME": str(folder / "flwr"), "RAY_TMPDIR": "/tmp"}
    apart = ("unshare", "-rn") if name == "Flower" else ()
    with contending((*apart, python, "-c", code), folder, environment) as contender:
        yield contender


def _compared(clients: int, found: dict[str, list[ContenderTurn]], bars: dict[str, bool]) -> dict[str, Any]:
    ours = [statistics.median(turn.seconds) for turn in found["ours"]]
    last = found["ours"][-1]
    figures: dict[str, Any] = {}
    for name, turns in found.items():
        rounds = [second for turn in turns for second in turn.seconds]
        cpu = statistics.median(turn.cpu_seconds for turn in turns)
        ratios = [statistics.median(turn.seconds) / ref for turn, ref in zip(turns, ours, strict=True)]
        ratio, end = statistics.median(ratios), turns[-1]
        print(
            f"  {name:<12} {statistics.median(rounds):7.3f} s a round ({min(rounds):.3f} to {max(rounds):.3f}), CPU "
            f"{cpu:.3f} s; {ratio:.1f}× ours ({min(ratios):.1f} to {max(ratios):.1f}); "
            f"then loss {end.loss:.5f}, accuracy {end.accuracy:.3f}"
            + (f"; {len(end.lost)} answers were lost: {end.lost[-1][:200]}" if end.lost else "")
        )
        figures[name] = {"seconds": statistics.median(rounds), "cpu_seconds": cpu, "ratio": ratio, "loss": end.loss}
        if limit := BARS.get(clients, {}).get(name):
            bars[f"{clients}, {name}"] = stage.bar(f"{clients:,} clients, {name} beside ours", ratio, limit, unit="×")
        if name != "ours":
            apart = abs(end.loss - last.loss) * 1e6
            what = f"{name} did the same: losses apart, millionths"
            bars[f"{clients}, {name}, same"] = stage.bar(what, apart, ALIKE, at_least=False)
    if clients == 1000:
        figure = figures["ours"]["seconds"]
        bars["1000, seconds"] = stage.bar("1,000 clients, a whole round", figure, 0.3, at_least=False, unit=" s")
    return figures


def _alone(clients: int, bars: dict[str, bool]) -> dict[str, Any]:
    from bench.federated_ours import MLP

    found = _found("alone", table={**MLP, "clients": clients}, rounds=8)
    print(f"\n{clients:,} clients in a fresh process, from torch's import on, all other imports with it")
    first, peak = found["first_seconds"], found["peak_mib"]
    bars["first"] = stage.bar("the first round is over after", first, 3.0, at_least=False, unit=" s")
    bars["memory"] = stage.bar("resident above torch, at most", peak, 150.0, at_least=False, unit=" MiB")
    return found


def _many_clients(sizes: Sizes, bars: dict[str, bool]) -> dict[str, Any]:
    """Compare ten times as many clients with as many samples each; the whole process counts, samples included."""
    from bench.federated_ours import MLP

    print(
        f"\n{SAMPLES} samples a client, a sixth of them to be judged by; 64 features, made up; memory above torch alone"
    )
    found = {}
    for clients in sizes.client_counts:
        options = {"source": "synthetic", "samples": SAMPLES * clients, "features": 64, "held_out": 6}
        table = {**MLP, "clients": clients, "learning_rate": 0.01, "tabular": options}
        run = found[clients] = _found("alone", table=table, rounds=8)
        seconds = run["seconds"] = statistics.median(run["seconds"][1:])
        print(
            f"  {clients:>6,} clients: {seconds:.2f} s a round; at most {run['made_mib']:.0f} MiB while the table of "
            f"{run['table_mib']:.0f} MiB was made, {run['table_mib'] + run['rounds_mib']:.0f} MiB with it in rounds"
        )
    few, many = (found[clients] for clients in sizes.client_counts)
    seconds = many["seconds"]
    ratio = (many["torch_mib"] + many["peak_mib"]) / (few["torch_mib"] + few["peak_mib"])
    above = many["rounds_mib"] / few["rounds_mib"]
    print(f"  what lies above torch in rounds, without the tables: {above:.2f}×")
    bars["crowd, seconds"] = stage.bar("a round of the larger crowd", seconds, 3.0, at_least=False, unit=" s")
    bars["crowd, memory"] = stage.bar("its peak memory beside the smaller one's", ratio, 1.1, at_least=False, unit="×")
    return {str(clients): first for clients, first in found.items()}


STATE_RATIO = {1: 1.3, 2: 1.5}
"""By ranks: what one of them may take for client state, in sizes of the whole. One rank stores it, and needs the rest
for a chunk and for what a save sets aside. Each of two stores a half and, during a round, copies of the clients that it
computes; the one whose clients have less to do computes two thirds of them."""


def _state(sizes: Sizes, bars: dict[str, bool]) -> dict[str, Any]:
    """The peak memory of an algorithm whose clients keep a control variate each, beside one whose clients keep none."""
    print(
        f"\n{sizes.stateful_clients:,} clients as above, eight rounds, the third of them saved while the fourth goes on"
    )
    figures: dict[str, Any] = {}
    for ranks in (1, 2):
        found = {name: _of_ranks(name, ranks, sizes) for name in ("fedavg", "scaffold")}
        figures[f"{ranks}"] = found
        for name, each in found.items():
            peaks = ", ".join(f"{first['peak_mib']:.0f}" for first in each)
            seconds, first = statistics.median(each[0]["seconds"][1:]), each[0]
            print(
                f"  {ranks} rank{'s' * (ranks > 1)}, {name:<8}: at most {peaks} MiB; {seconds:.2f} s a round; a save "
                f"stops rounds for {first['stall_seconds'] * 1000:.0f} ms and takes {first['save_seconds']:.2f} s"
            )
        state = found["scaffold"][0]["kept_mib"]
        above = max(
            many["peak_mib"] - none["peak_mib"] for many, none in zip(found["scaffold"], found["fedavg"], strict=True)
        )
        print(f"  clients keep {state:.0f} MiB; above FedAvg {above:.0f} MiB")
        what = f"{ranks} rank{'s' * (ranks > 1)}, SCAFFOLD's memory above FedAvg's, beside what clients keep"
        bars[f"state, {ranks}"] = stage.bar(what, above / state, STATE_RATIO[ranks], at_least=False, unit="×")
    return figures


def _of_ranks(algorithm: str, ranks: int, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the results of each rank of a run."""
    from bench.federated_ours import MLP

    options = {"source": "synthetic", "samples": SAMPLES * sizes.stateful_clients, "features": 64, "held_out": 6}
    table = {
        **MLP,
        "clients": sizes.stateful_clients,
        "learning_rate": 0.01,
        "algorithm": algorithm,
        "tabular": options,
    }
    text = json.dumps({"table": table, "rounds": 8, "saved": 3})
    where = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    where["MASTER_PORT"] = str(stage.free_port())
    with ThreadPoolExecutor(ranks) as threads:
        found = [
            threads.submit(_in_child, "state", text, environment={**where, "RANK": str(rank)}) for rank in range(ranks)
        ]
        return [item.result() for item in found]


def _sum(sizes: Sizes, bars: dict[str, bool]) -> dict[str, Any]:
    found = _found("sums", numbers=sizes.numbers, updates=sizes.updates, pairs=sizes.pairs)
    ratios = [ours_of_turn / theirs for ours_of_turn, theirs in zip(found["ours"], found["plain"], strict=True)]
    print(f"\nthe sum of {sizes.updates} updates of {sizes.numbers:,} numbers, chunk by chunk; {sizes.pairs} pairs")
    for name, what in (("ours", "float64 along a tree"), ("plain", "float32, add_(alpha=…)")):
        print(f"  {what}: {' '.join(f'{seconds:.2f}' for seconds in found[name])} s")
    print(f"  largest difference, beside the largest number: {found['difference']:.1e}")
    ratio = statistics.median(ratios)
    bars["sum"] = stage.bar("float64 beside float32", ratio, 2.5, at_least=False, unit="×")
    return {**found, "ratio": ratio}


def _ledger(clients: int, sizes: Sizes, bars: dict[str, bool]) -> dict[str, Any]:
    from bench.federated_ours import MLP

    found = _found("ledger", table={**MLP, "clients": clients}, warm=5, rounds=sizes.ledger_rounds)
    print(f"\nwhat is written down of {clients:,} clients, default settings, CPU time of all threads")
    print(
        f"  a round {found['round_seconds'] * 1000:.1f} ms, of which reports {found['report_seconds'] * 1000:.1f} ms; "
        f"a checkpoint {found['save_seconds'] * 1000:.0f} ms every {found['interval_seconds']:.0f} s"
    )
    bars["ledger"] = stage.bar("of a round", found["part"] * 100, 10.0, at_least=False, unit=" %")
    return found


def _found(name: str, **request: Any) -> dict[str, Any]:
    return _in_child(name, json.dumps(request))


def _in_child(name: str, request: str, *, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    return stage.in_child("bench.federated", "--one", name, request, environment=environment)


if __name__ == "__main__":
    sys.exit(main())
