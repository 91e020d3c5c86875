"""A checkpoint as a model's folder of Hugging Face's, which AutoModelForCausalLM and AutoTokenizer load.

    model.safetensors                                           or, where that would be larger than a shard may be,
    model-00001-of-00003.safetensors, …, model.safetensors.index.json
    tokenizer.json, tokenizer_config.json, …                    what the run's tokens were made with
    config.json                                                 written last: without it nothing loads

The language recipe's decoder is a Llama in everything that can be set, so config.json says all of it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from training import manifest as manifests
from training.config.dims import Dims
from training.manifest import CheckpointError, Manifest
from training.models.llama_sizes import llama_dims
from training.weights import base, export_adapters, llama_config, lora, tokenizer_files
from training.weights.export import NONE, Source, Stored, adapters_of, recipe_of
from training.weights.llama import SIZES, shapes, their_name
from training.weights.opening import CONFIG, INDEX, SINGLE, some
from training.weights.safetensors import Entry, write

RECIPE = "language"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAID = frozenset({*SIZES, "preset", "context", "max_context"})
"""Options that config.json says."""
OF_TRAINING = frozenset({
    *("source", "tokenizer", "suffixes", "text_field", "validation_percent", "shards_folder"),
    *("dropout", "from_weights", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets"),
})  # fmt: skip
"""Options that change nothing of what the trained model computes."""
OFF = (None, False, 0, "none")


@dataclass(frozen=True)
class Made:
    """What an export has written."""

    tensors: int
    bytes: int
    files: int
    tokenizer: str


def export(
    checkpoint: Path,
    target: Path,
    *,
    merged: bool = False,
    dtype: Literal["fp32", "bf16"] = "fp32",
    shard_bytes: int,
    tokenizer: str | None = None,
) -> Made:
    """A folder `target`, which appears whole or not at all. `tokenizer`: a tokenizer.json, or none; else the run's.

    CheckpointError or DataError, with what to do, where it can't be; FileExistsError if there is something at `target`.
    """
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists. Remove it, or choose another name.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no folder. Make it, or choose another place.")
    found = manifests.check(checkpoint)
    _check_options(found)
    has_adapters = export_adapters.are_in(checkpoint)
    if has_adapters and not merged:
        raise CheckpointError("it holds adapters alone, and this folder is of whole weights. Add --merged")
    manifests.verify(checkpoint)
    source: Source = export_adapters.Merged(checkpoint, found) if has_adapters else Stored(checkpoint, found)
    dims = _dims(found, source)
    kept = checkpoint.resolve().parent.parent / base.FOLDER
    files = tokenizer_files.find(found, kept, tokenizer, rows=dims.vocabulary, longest=dims.longest)
    parts = list(_parts(_entries(source, dims, DTYPES[dtype]), shard_bytes))
    with _appearing(target) as folder:
        _write_weights(folder, parts, source)
        for name, content in files.contents.items():
            _write(folder / name, content)
        kind = str(DTYPES[dtype]).removeprefix("torch.")
        _write(folder / CONFIG, _json({**llama_config.written(dims, kind), **files.ids}))
    total = sum(entry.bytes for part in parts for entry in part)
    return Made(sum(map(len, parts)), total, len(parts), files.name)


def _check_options(manifest: Manifest) -> None:
    recipe, options = recipe_of(manifest)
    if recipe != RECIPE:
        raise CheckpointError(
            f"it is of the recipe {recipe}, and only {RECIPE} trains what Hugging Face has a class for. Without --hf "
            "its weights come as one safetensors file"
        )
    if (adapters := adapters_of(manifest)) not in (NONE, *lora.FEDERATED):
        raise CheckpointError(
            f"it holds adapters of {adapters} alone, which Hugging Face has no class for. Without --hf they come as "
            "one safetensors file"
        )
    for name, value in options.items():
        if name not in SAID | OF_TRAINING and value not in OFF:
            raise CheckpointError(
                f"it was trained with {name} = {json.dumps(value)}, which a Llama's {CONFIG} has no word for. Without "
                "--hf its weights come as one safetensors file"
            )


def _dims(manifest: Manifest, source: Source) -> Dims:
    """The sizes, which all tensors have."""
    there = {entry.name: entry.shape for entry in source.entries}
    try:
        known = llama_dims(**{**recipe_of(manifest)[1], "vocabulary": there["tokens.weight"][0]})
        if known.layers > len(there):  # before a name is made for each of a thousand million
            raise ValueError
        expected = shapes(vars(known))
        json.dumps(llama_config.written(known, "float32"), allow_nan=False)
    except (LookupError, ArithmeticError, ValueError, TypeError, AttributeError):
        raise CheckpointError(f"its settings make no decoder of what it holds: {some(there)}") from None
    if known.tied:
        there.pop("head.weight", None)  # the embedding's, once more
    if odd := {name for name in expected.keys() | there.keys() if expected.get(name) != there.get(name)}:
        raise CheckpointError(f"it has other tensors than its settings make: {some(odd)}")
    return known


def _entries(source: Source, dims: Dims, dtype: torch.dtype) -> list[Entry]:
    """The tensors by our names, in the order of the model."""
    return [Entry(name, dtype, shape) for name, shape in shapes(vars(dims)).items()]


def _parts(entries: Iterable[Entry], most: int) -> Iterator[list[Entry]]:
    """The tensors of one file each, of at most so many bytes; one that is larger has a file of its own."""
    part: list[Entry] = []
    for entry in entries:
        if part and sum(other.bytes for other in part) + entry.bytes > most:
            yield part
            part = []
        part.append(entry)
    yield part


def _write_weights(folder: Path, parts: list[list[Entry]], source: Source) -> None:
    ours = {their_name(entry.name): entry for part in parts for entry in part}

    def read(entry: Entry) -> Tensor:
        return source.read(ours[entry.name].name).to(entry.dtype)

    names = [f"model-{number + 1:05}-of-{len(parts):05}.safetensors" for number in range(len(parts))]
    if len(parts) == 1:
        names = [SINGLE]
    where: dict[str, str] = {}
    for name, part in zip(names, parts, strict=True):
        theirs = [replace(entry, name=their_name(entry.name)) for entry in part]
        write(folder / name, theirs, source.about, read)
        where |= {entry.name: name for entry in theirs}
    if len(parts) > 1:
        total = sum(entry.bytes for entry in ours.values())
        _write(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": where}))


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder to write to, that is at `target` once all went well, and gone otherwise."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.mkdir()
        yield partial
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    """Writes a new file durably."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
