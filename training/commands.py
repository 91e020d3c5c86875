"""The commands of `python -m training` besides training: verify, export, prepare, plan and compare."""

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

PROGRESS_SECONDS = 5.0
ASSUMED_GIB = 80.0
MAX_MESSAGE_LENGTH = 2000


def verify(folders: Sequence[Path]) -> int:
    """Read every file of checkpoints or folders of token shards; exit with 0 if all are as they were written."""
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
                if reason := manifest.damage_reason(folder):
                    raise manifest.CheckpointError(
                        f"its digests are right, but it was found damaged: {reason}. No run resumes from it; "
                        f"to use it again, delete its file {manifest.DAMAGED}"
                    )
                print(f"{folder}: verified, step {found.step}, {len(found.files)} files, {found.bytes:,} bytes")
        except DataError as error:
            failed = 1
            _print_error(error.message)
        except manifest.CheckpointError as error:
            failed = 1
            _print_error(f"{folder}: {error}")
    return failed


def export(options: argparse.Namespace) -> int:
    """Export a checkpoint's weights as one safetensors file or a Hugging Face folder, complete or not at all.

    Adapters: a peft folder, or, merged into their base weights, as above.
    """
    from training.attempt.files import DISK_FULL
    from training.corpus.errors import DataError

    checkpoint, target = options.checkpoint, options.hf or options.target
    try:
        tensors, size, details = _export(options)
    except DataError as error:
        _print_error(f"{checkpoint}: {error.message}")
        return 1
    except manifest.CheckpointError as error:
        _print_error(f"{checkpoint}: {error}")
        return 1
    except OSError as error:
        remedy = (
            ". Nothing was left there: free some space, or choose another place"
            if error.errno in {*DISK_FULL, errno.EFBIG}
            else ""
        )
        print(f"{target}: {error.strerror or error}{remedy}", file=sys.stderr)
        return 1
    print(f"{target}: {tensors} tensors, {size:,} bytes, from {checkpoint.name}{details}")
    return 0


def _print_error(message: str) -> None:
    """Print one line to stderr.

    It may contain text from a checkpoint, so characters that affect a terminal are escaped.
    """
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message[:MAX_MESSAGE_LENGTH])
    print(line[:MAX_MESSAGE_LENGTH] + "…" * (max(len(line), len(message)) > MAX_MESSAGE_LENGTH), file=sys.stderr)


def _export(options: argparse.Namespace) -> tuple[int, int, str]:
    """Return (tensors, their bytes, further details for the message)."""
    from training.weights import export as exporting
    from training.weights import export_adapters, export_hugging_face

    checkpoint, target = options.checkpoint, options.target
    if options.hf is not None:
        shard_bytes = int(options.shard_gb * 10**9)
        result = export_hugging_face.export(
            checkpoint,
            options.hf,
            merged=options.merged,
            dtype=options.dtype,
            shard_bytes=shard_bytes,
            tokenizer=options.tokenizer,
        )
        files = "1 file" if result.files == 1 else f"{result.files} files"
        return result.tensors, result.bytes, f", in {files} of {options.dtype}; tokenizer: {result.tokenizer}"
    if not export_adapters.has_adapters(checkpoint):
        return *exporting.export(checkpoint, target), ""
    return *(export_adapters.export_merged if options.merged else export_adapters.export)(checkpoint, target), ""


def prepare(file: Path) -> int:
    """Make a run's data, on this machine and now, so that no GPU waits for it later."""
    from training.corpus.cache import cache_dir
    from training.corpus.errors import DataError

    try:
        run = run_file.load(file)
        cache = cache_dir(file.absolute().parent / "runs" / run.name)
        prepared = contracts.recipe(run.config.recipe).call_prepare(
            cache, None, run.config.recipe_options(), report_progress=_ProgressPrinter()
        )
    except DataError as error:
        print(error.within(f"run.{run.config.recipe}"), file=sys.stderr)
        return 1
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    facts = ", ".join(f"{name} {value}" for name, value in prepared.facts.items())
    print(f"{prepared.path}: {facts or prepared.identity}")
    return 0


def plan(options: argparse.Namespace) -> int:
    """Show how a run's ranks would share the work, the memory of each, and why; start nothing."""
    from training.corpus.errors import DataError
    from training.weights import configured

    try:
        run = run_file.load(options.run)
        config = run.trainer_config(what="plan")
        weights = configured.weights_path(config)
        is_here = weights is None or os.path.exists(weights)
        resolved = configured.with_sizes(contracts.recipe(config.recipe), config) if is_here else config
        per_node = options.ranks_per_node or run.ranks_per_node
        world_size = options.ranks or run.nodes * per_node
        memory, where = _rank_memory(options.gpu_memory, per_node, on_cpu=run.on_cpu)
        ranks = Ranks(world_size, min(per_node, world_size), int(memory * units.GIB), on_cpu=run.on_cpu)
        found = planning.plan(resolved, ranks)
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
        print(f"{weights}, which determines the model's sizes, is not on this machine: memory is not estimated")
    return 0


def _bytes_per_rank(footprint: MemoryFootprint) -> dict[str, object]:
    """Return the parts of a footprint by name. `again` and `last` are former names of `recomputed` and `final`."""
    former = {"again": footprint.recomputed, "last": footprint.final}
    return {**vars(footprint), **former, "total": footprint.total}


def _rank_memory(given: float | None, per_node: int, *, on_cpu: bool) -> tuple[float, str]:
    """Return GiB, and the source of that value."""
    if given is not None:
        return given, "from --gpu-memory"
    if not on_cpu:
        gpus = machine.gpus(None).get("gpus", [])
        if sizes := [gpu["memory_gib"] for gpu in gpus if "memory_gib" in gpu]:
            return min(sizes), f"of this machine's {gpus[0].get('name', 'GPU')}"
        return ASSUMED_GIB, "assumed: no GPU here, and no --gpu-memory"
    return machine.processors()["memory_gib"] / per_node, "this machine's memory divided by the ranks of a node"


class _ProgressPrinter:
    """Prints progress, but not too often."""

    def __init__(self) -> None:
        self._due = time.monotonic() + PROGRESS_SECONDS

    def __call__(self, progress: object | None) -> None:
        if progress is not None and (now := time.monotonic()) >= self._due:
            self._due = now + PROGRESS_SECONDS
            print(progress, flush=True)


def _positive_integer(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"is {text}. Write a whole number from 1 on.")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text}. Write a number above 0.")
    return number


def plan_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m training plan", description=_first_line(plan))
    parser.add_argument("run", type=Path, help="run.toml or a complete job specification")
    parser.add_argument("--ranks", type=_positive_integer, help="number of ranks; default: from its [resources]")
    parser.add_argument(
        "--ranks-per-node", type=_positive_integer, help="ranks that share a node; default: from its [resources]"
    )
    parser.add_argument(
        "--gpu-memory", type=_positive_number, metavar="GIB", help="memory of a rank; default: this machine's"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def verify_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m training verify", description=_first_line(verify))
    parser.add_argument("folder", nargs="+", type=Path, help="a checkpoint, or a folder of token shards")
    return parser.parse_args(arguments)


def prepare_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m training prepare", description=_first_line(prepare))
    parser.add_argument("run", type=Path, help="run.toml or a complete job specification; its table [run] is used")
    return parser.parse_args(arguments)


def export_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m training export", description=_first_line(export))
    parser.add_argument("checkpoint", type=Path, help="its folder: job/checkpoints/step-400")
    parser.add_argument("target", type=Path, nargs="?", help="the file to write, usually with the ending .safetensors")
    parser.add_argument(
        "--hf", type=Path, metavar="FOLDER", help="write a folder that transformers loads, including the tokenizer"
    )
    parser.add_argument(
        "--merged", action="store_true", help="for adapters: write whole weights that include them, not a peft folder"
    )
    folder = parser.add_argument_group("with --hf")
    folder.add_argument("--dtype", choices=("fp32", "bf16"), help="type of the weights; default: fp32, as trained")
    folder.add_argument("--shard-gb", type=_positive_number, metavar="GB", help="maximum size of each file; default: 5")
    folder.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json, or none; default: the run's own")
    options = parser.parse_intermixed_args(arguments)
    if (options.hf is None) == (options.target is None):
        parser.error("give the file to write, or --hf FOLDER")
    if options.hf is None and (options.dtype or options.shard_gb or options.tokenizer):
        parser.error("--dtype, --shard-gb and --tokenizer go with --hf")
    options.dtype, options.shard_gb = options.dtype or "fp32", options.shard_gb or 5.0
    return options


def _first_line(function: object) -> str:
    return (function.__doc__ or "").partition("\n")[0]


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one of COMMANDS with its arguments."""
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
