"""Export a checkpoint as a Hugging Face model folder, which AutoModelForCausalLM and AutoTokenizer load.

    model.safetensors                                           or, if larger than a shard may be,
    model-00001-of-00003.safetensors, …, model.safetensors.index.json
    tokenizer.json, tokenizer_config.json, …                    the tokenizer of the run's data
    config.json                                                 written last: nothing loads without it

The language recipe's decoder is a Llama in every configurable respect, so config.json describes it completely.
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
from training.weights.export import NONE, CheckpointModel, ModelSource, adapters_of, recipe_of
from training.weights.llama import SIZES, hugging_face_name, shapes
from training.weights.safetensors import TensorEntry, write
from training.weights.weight_files import CONFIG, INDEX, SINGLE, first_names

RECIPE = "language"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONFIG_OPTIONS = frozenset({*SIZES, "preset", "context", "max_context"})
"""Options that config.json expresses."""
TRAINING_OPTIONS = frozenset({
    *("source", "tokenizer", "suffixes", "text_field", "validation_percent", "shards_folder"),
    *("dropout", "from_weights", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets"),
})  # fmt: skip
"""Options that do not affect what the trained model computes."""
OFF_VALUES = (None, False, 0, "none")


@dataclass(frozen=True)
class ExportResult:
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
) -> ExportResult:
    """Write a folder `target`, which appears complete or not at all.

    `tokenizer`: a tokenizer.json, or none; default: the run's. Raises CheckpointError or DataError, saying what to
    do, and FileExistsError if `target` exists.
    """
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists. Remove it, or choose another name.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is not a folder. Create it, or choose another place.")
    manifest = manifests.check(checkpoint)
    _check_options(manifest)
    has_adapters = export_adapters.has_adapters(checkpoint)
    if has_adapters and not merged:
        raise CheckpointError("it holds adapters alone, and this folder is of whole weights. Add --merged")
    manifests.verify(checkpoint)
    source: ModelSource = (
        export_adapters.MergedModel(checkpoint, manifest) if has_adapters else CheckpointModel(checkpoint, manifest)
    )
    dims = _dims(manifest, source)
    base_folder = checkpoint.resolve().parent.parent / base.FOLDER
    files = tokenizer_files.find(
        manifest, base_folder, tokenizer, vocabulary=dims.vocabulary, max_length=dims.longest_context
    )
    parts = list(_parts(_entries(source, dims, DTYPES[dtype]), shard_bytes))
    with _atomic_folder(target) as folder:
        _write_weights(folder, parts, source)
        for name, content in files.contents.items():
            _write(folder / name, content)
        kind = str(DTYPES[dtype]).removeprefix("torch.")
        _write(folder / CONFIG, _json({**llama_config.to_config(dims, kind), **files.ids}))
    total = sum(entry.bytes for part in parts for entry in part)
    return ExportResult(sum(map(len, parts)), total, len(parts), files.name)


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
        if name not in CONFIG_OPTIONS | TRAINING_OPTIONS and value not in OFF_VALUES:
            raise CheckpointError(
                f"it was trained with {name} = {json.dumps(value)}, which a Llama's {CONFIG} has no word for. Without "
                "--hf its weights come as one safetensors file"
            )


def _dims(manifest: Manifest, source: ModelSource) -> Dims:
    """Return the model's sizes after checking that all tensors have them."""
    stored = {entry.name: entry.shape for entry in source.entries}
    try:
        dims = llama_dims(**{**recipe_of(manifest)[1], "vocabulary": stored["tokens.weight"][0]})
        if dims.layers > len(stored):  # before generating names for, say, a billion layers
            raise ValueError
        expected = shapes(vars(dims))
        json.dumps(llama_config.to_config(dims, "float32"), allow_nan=False)
    except (LookupError, ArithmeticError, ValueError, TypeError, AttributeError):
        raise CheckpointError(f"its settings make no decoder of what it holds: {first_names(stored)}") from None
    if dims.tied:
        stored.pop("head.weight", None)  # a copy of the embedding
    if odd := {name for name in expected.keys() | stored.keys() if expected.get(name) != stored.get(name)}:
        raise CheckpointError(f"it has other tensors than its settings make: {first_names(odd)}")
    return dims


def _entries(source: ModelSource, dims: Dims, dtype: torch.dtype) -> list[TensorEntry]:
    """Return the tensors by our names, in the model's order."""
    return [TensorEntry(name, dtype, shape) for name, shape in shapes(vars(dims)).items()]


def _parts(entries: Iterable[TensorEntry], max_bytes: int) -> Iterator[list[TensorEntry]]:
    """Yield the tensors of each file, at most `max_bytes` each; a larger tensor gets a separate file."""
    part: list[TensorEntry] = []
    for entry in entries:
        if part and sum(other.bytes for other in part) + entry.bytes > max_bytes:
            yield part
            part = []
        part.append(entry)
    yield part


def _write_weights(folder: Path, parts: list[list[TensorEntry]], source: ModelSource) -> None:
    ours = {hugging_face_name(entry.name): entry for part in parts for entry in part}

    def read(entry: TensorEntry) -> Tensor:
        return source.read(ours[entry.name].name).to(entry.dtype)

    names = [f"model-{number + 1:05}-of-{len(parts):05}.safetensors" for number in range(len(parts))]
    if len(parts) == 1:
        names = [SINGLE]
    file_of: dict[str, str] = {}
    for name, part in zip(names, parts, strict=True):
        renamed = [replace(entry, name=hugging_face_name(entry.name)) for entry in part]
        write(folder / name, renamed, source.metadata, read)
        file_of |= {entry.name: name for entry in renamed}
    if len(parts) > 1:
        total = sum(entry.bytes for entry in ours.values())
        _write(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": file_of}))


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write to; it becomes `target` on success and is deleted otherwise."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.mkdir()
        yield partial
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    """Write a new file durably."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
