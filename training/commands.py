"""What `python -m training` does besides training: verify a folder, export a checkpoint, prepare data, compare."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from training import config, manifest

SAY_SECONDS = 5.0


def verify(folders: Sequence[Path]) -> int:
    """Reads every file of each checkpoint, or of each folder of token shards; 0 if all are as they were written."""
    from training.corpus import shards
    from training.corpus.errors import DataError

    failed = 0
    for folder in folders:
        try:
            if (folder / shards.INDEX).is_file():
                index = shards.verify(folder)
                print(f"{folder}: verified, {index.tokens:,} tokens, {len(index.files)} shards, {index.bytes:,} bytes")
            else:
                found = manifest.verify(folder)
                print(f"{folder}: verified, step {found.step}, {len(found.files)} files, {found.bytes:,} bytes")
        except DataError as error:
            failed = 1
            print(error.message, file=sys.stderr)
        except manifest.CheckpointError as error:
            failed = 1
            print(f"{folder}: {error}", file=sys.stderr)
    return failed


def export(checkpoint: Path, target: Path) -> int:
    """The model's weights as one safetensors file; nothing is left where it could not be done."""
    from training import export as exporting

    try:
        tensors, size = exporting.export(checkpoint, target)
    except manifest.CheckpointError as error:
        print(f"{checkpoint}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{target}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"{target}: {tensors} tensors, {size:,} bytes, from {checkpoint.name}")
    return 0


def prepare(file: Path) -> int:
    """Makes a run's data, on this machine and now, so that no GPU waits for it later."""
    from training.corpus.errors import DataError
    from training.data import accepted, cache_dir

    try:
        run = config.load(file)
        recipe = importlib.import_module(f"training.recipes.{run.config.recipe}")
        options = accepted(recipe.prepare, run.config.recipe_options())
        if "tell" in inspect.signature(recipe.prepare).parameters:
            options["tell"] = _Teller()
        made = recipe.prepare(cache_dir(file.absolute().parent / "runs" / run.name), None, **options)
    except DataError as error:
        print(error.within(f"run.{run.config.recipe}"), file=sys.stderr)
        return 1
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    facts = ", ".join(f"{name} {value}" for name, value in made.facts.items())
    print(f"{made.path}: {facts or made.identity}")
    return 0


class _Teller:
    """Says how far it is, but not too often."""

    def __init__(self) -> None:
        self._due = time.monotonic() + SAY_SECONDS

    def __call__(self, progress: object | None) -> None:
        if progress is not None and (now := time.monotonic()) >= self._due:
            self._due = now + SAY_SECONDS
            print(progress, flush=True)


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
    parser.add_argument("target", type=Path, help="the file to make, by custom with the ending .safetensors")
    return parser.parse_args(arguments)


def _first_line(function: object) -> str:
    return (function.__doc__ or "").partition("\n")[0]


def run(name: str, arguments: Sequence[str]) -> int:
    """One of COMMANDS with what was written behind it."""
    if name == "compare":
        from training.lab import command

        return command.compare(command.options(arguments))
    if name == "export":
        options = export_options(arguments)
        return export(options.checkpoint, options.target)
    if name == "prepare":
        return prepare(prepare_options(arguments).run)
    return verify(verify_options(arguments).folder)


COMMANDS = ("verify", "export", "prepare", "compare")
