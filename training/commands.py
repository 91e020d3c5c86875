"""What `python -m training` does besides training: verify a folder, export a checkpoint, prepare data, compare."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from training import contracts, manifest, run_file, units
from training.config.base import ConfigError
from training.planning import plan as planning
from training.planning.footprint import MemoryFootprint
from training.planning.layouts import Ranks
from training.provenance import machine

SAY_SECONDS = 5.0
ASSUMED_GIB = 80.0
SAID_LETTERS = 2000


def verify(folders: Sequence[Path]) -> int:
    """Reads every file of each checkpoint, or of each folder of token shards; 0 if all are as they were written."""
    from training.corpus import shards
    from training.corpus.errors import DataError

    failed = 0
    for folder in folders:
        try:
            if shards.has_index(folder):
                index = shards.verify(folder)
                print(f"{folder}: verified, {index.tokens:,} tokens, {len(index.files)} shards, {index.bytes:,} bytes")
            else:
                found = manifest.verify(folder)
                if why := manifest.marked_damaged(folder):
                    raise manifest.CheckpointError(
                        f"its digests are right, but it was found damaged: {why}. No run goes on from it; "
                        f"to have it count again delete its file {manifest.DAMAGED}"
                    )
                print(f"{folder}: verified, step {found.step}, {len(found.files)} files, {found.bytes:,} bytes")
        except DataError as error:
            failed = 1
            _complain(error.message)
        except manifest.CheckpointError as error:
            failed = 1
            _complain(f"{folder}: {error}")
    return failed


def export(options: argparse.Namespace) -> int:
    """A checkpoint's weights as one safetensors file, or as Hugging Face's folder; nothing is left half done.

    Adapters: a folder as peft has it, or, merged into the weights that they are beside, as above.
    """
    from training.attempt.files import DISK_FULL
    from training.corpus.errors import DataError

    checkpoint, target = options.checkpoint, options.hf or options.target
    try:
        tensors, size, more = _exported(options)
    except DataError as error:
        _complain(f"{checkpoint}: {error.message}")
        return 1
    except manifest.CheckpointError as error:
        _complain(f"{checkpoint}: {error}")
        return 1
    except OSError as error:
        remedy = (
            ". Nothing was left there: free some room, or name another place"
            if error.errno in {*DISK_FULL, errno.EFBIG}
            else ""
        )
        print(f"{target}: {error.strerror or error}{remedy}", file=sys.stderr)
        return 1
    print(f"{target}: {tensors} tensors, {size:,} bytes, from {checkpoint.name}{more}")
    return 0


def _complain(message: str) -> None:
    """One line on stderr. What a checkpoint says of itself may be anybody's words, and does nothing to a terminal."""
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message[:SAID_LETTERS])
    print(
        line[:SAID_LETTERS] + ("…" if len(line) > SAID_LETTERS or len(message) > SAID_LETTERS else ""), file=sys.stderr
    )


def _exported(options: argparse.Namespace) -> tuple[int, int, str]:
    """Tensors, bytes of them, and what else is to be told."""
    from training.weights import export as exporting
    from training.weights import export_adapters, export_hugging_face

    checkpoint, target = options.checkpoint, options.target
    if options.hf is not None:
        shard_bytes = int(options.shard_gb * 10**9)
        made = export_hugging_face.export(
            checkpoint,
            options.hf,
            merged=options.merged,
            dtype=options.dtype,
            shard_bytes=shard_bytes,
            tokenizer=options.tokenizer,
        )
        files = "1 file" if made.files == 1 else f"{made.files} files"
        return made.tensors, made.bytes, f", in {files} of {options.dtype}; tokenizer: {made.tokenizer}"
    if not export_adapters.has_adapters(checkpoint):
        return *exporting.export(checkpoint, target), ""
    return *(export_adapters.export_merged if options.merged else export_adapters.export)(checkpoint, target), ""


def prepare(file: Path) -> int:
    """Makes a run's data, on this machine and now, so that no GPU waits for it later."""
    from training.corpus.cache import cache_dir
    from training.corpus.errors import DataError

    try:
        run = run_file.load(file)
        cache = cache_dir(file.absolute().parent / "runs" / run.name)
        made = contracts.recipe(run.config.recipe).prepared(cache, None, run.config.recipe_options(), tell=_Teller())
    except DataError as error:
        print(error.within(f"run.{run.config.recipe}"), file=sys.stderr)
        return 1
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    facts = ", ".join(f"{name} {value}" for name, value in made.facts.items())
    print(f"{made.path}: {facts or made.identity}")
    return 0


def plan(options: argparse.Namespace) -> int:
    """Tells how a run's ranks would share the work, the memory of each, and why; starts nothing."""
    from training.corpus.errors import DataError
    from training.weights import configured

    try:
        run = run_file.load(options.run)
        config = run.of_trainer(what="plan")
        weights = configured.weights_path(config)
        is_here = weights is None or os.path.exists(weights)
        settled = configured.with_sizes(contracts.recipe(config.recipe), config) if is_here else config
        per_node = options.ranks_per_node or run.ranks_per_node
        world_size = options.ranks or run.nodes * per_node
        memory, where = _memory_of_a_rank(options.gpu_memory, per_node, on_cpu=run.on_cpu)
        ranks = Ranks(world_size, min(per_node, world_size), int(memory * units.GIB), on_cpu=run.on_cpu)
        found = planning.plan(settled, ranks)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        needs = _bytes_per_rank(found.footprint) if found.footprint else None
        chosen = {"parallelism": found.config.parallelism, "mesh": dict(found.shape)}
        print(json.dumps({**chosen, "bytes_per_rank": needs, "why": found.why}))
        return 0
    print(*found.lines(ranks), sep="\n")
    print(f"memory of a rank: {memory:.1f} GiB, {where}")
    if not is_here:
        print(f"{weights}, which tells the model's sizes, is not on this machine: memory is not estimated")
    return 0


def _bytes_per_rank(footprint: MemoryFootprint) -> dict[str, object]:
    """Return the parts of a footprint by name. `again` and `last` are former names of `recomputed` and `final`."""
    former = {"again": footprint.recomputed, "last": footprint.final}
    return {**vars(footprint), **former, "total": footprint.total}


def _memory_of_a_rank(said: float | None, per_node: int, *, on_cpu: bool) -> tuple[float, str]:
    """GiB, and where that is known from."""
    if said is not None:
        return said, "as --gpu-memory says"
    if not on_cpu:
        gpus = machine.gpus(None).get("gpus", [])
        if sizes := [gpu["memory_gib"] for gpu in gpus if "memory_gib" in gpu]:
            return min(sizes), f"of this machine's {gpus[0].get('name', 'GPU')}"
        return ASSUMED_GIB, "assumed: there is no GPU here, and no --gpu-memory"
    return machine.processors()["memory_gib"] / per_node, "this machine's, divided over the ranks of a node"


class _Teller:
    """Says how far it is, but not too often."""

    def __init__(self) -> None:
        self._due = time.monotonic() + SAY_SECONDS

    def __call__(self, progress: object | None) -> None:
        if progress is not None and (now := time.monotonic()) >= self._due:
            self._due = now + SAY_SECONDS
            print(progress, flush=True)


def _whole(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"is {text}. Write a whole number from 1 on.")
    return int(text)


def _amount(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text}. Write a number above 0.")
    return found


def plan_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m training plan", description=_first_line(plan))
    parser.add_argument("run", type=Path, help="run.toml or a whole job spec")
    parser.add_argument("--ranks", type=_whole, help="how many; default: as its [resources] say")
    parser.add_argument("--ranks-per-node", type=_whole, help="that share a node; default: as its [resources] say")
    parser.add_argument("--gpu-memory", type=_amount, metavar="GIB", help="of a rank; default: this machine's")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def verify_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m training verify", description=_first_line(verify))
    parser.add_argument("folder", nargs="+", type=Path, help="a checkpoint, or a folder of token shards")
    return parser.parse_args(arguments)


def prepare_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m training prepare", description=_first_line(prepare))
    parser.add_argument("run", type=Path, help="run.toml or a whole job spec: its table [run] counts")
    return parser.parse_args(arguments)


def export_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m training export", description=_first_line(export))
    parser.add_argument("checkpoint", type=Path, help="its folder: job/checkpoints/step-400")
    parser.add_argument("target", type=Path, nargs="?", help="the file to make, by custom with the ending .safetensors")
    parser.add_argument(
        "--hf", type=Path, metavar="FOLDER", help="the folder to make, which transformers loads, tokenizer and all"
    )
    parser.add_argument(
        "--merged", action="store_true", help="adapters: the whole weights with them; else a folder as peft has it"
    )
    folder = parser.add_argument_group("with --hf")
    folder.add_argument("--dtype", choices=("fp32", "bf16"), help="of the weights; default: fp32, as they were trained")
    folder.add_argument("--shard-gb", type=_amount, metavar="GB", help="of each file at most; default: 5")
    folder.add_argument("--tokenizer", metavar="FILE", help="its tokenizer.json, or none; default: the run's own")
    options = parser.parse_intermixed_args(arguments)
    if (options.hf is None) == (options.target is None):
        parser.error("write the file to make, or --hf FOLDER")
    if options.hf is None and (options.dtype or options.shard_gb or options.tokenizer):
        parser.error("--dtype, --shard-gb and --tokenizer go with --hf")
    options.dtype, options.shard_gb = options.dtype or "fp32", options.shard_gb or 5.0
    return options


def _first_line(function: object) -> str:
    return (function.__doc__ or "").partition("\n")[0]


def run(name: str, arguments: Sequence[str]) -> int:
    """One of COMMANDS with what was written behind it."""
    if name == "compare":
        from training.compare import command

        return command.compare(command.options(arguments))
    if name == "export":
        return export(export_options(arguments))
    if name == "plan":
        return plan(plan_options(arguments))
    if name == "prepare":
        return prepare(prepare_options(arguments).run)
    return verify(verify_options(arguments).folder)


COMMANDS = ("verify", "export", "prepare", "plan", "compare")
