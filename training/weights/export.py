"""Export the model of a checkpoint as one plain `safetensors` file, whatever layout it was saved on.

Needs no process group and no GPU: torch's table of contents locates the chunks of each tensor, and one tensor after the
other is assembled in memory and appended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from training import manifest as manifests
from training.checkpoint.contents import read_metadata
from training.manifest import CheckpointError, Manifest
from training.weights.safetensors import TensorEntry, can_hold, write

MODEL = "model."
NONE = "none"


def export(checkpoint: Path, target: Path) -> tuple[int, int]:
    """Write the model's tensors to `target`, which appears complete or not at all; return (tensors, their bytes).

    Raises CheckpointError if the checkpoint is damaged or has no model, FileExistsError if `target` exists.
    """
    manifest = manifests.verify(checkpoint)
    stored = CheckpointModel(checkpoint, manifest)
    return write(target, stored.entries, stored.metadata, lambda entry: stored.read(entry.name))


class ModelSource(Protocol):
    """A whole model by our names, read one tensor at a time."""

    @property
    def entries(self) -> list[TensorEntry]: ...
    @property
    def metadata(self) -> dict[str, str]: ...
    def read(self, name: str) -> Tensor: ...


class CheckpointModel:
    """The model's tensors of a verified checkpoint."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = checkpoint, manifest
        self._metadata = read_metadata(checkpoint)
        self._tensors = dict(_model_tensors(self._metadata))

    @property
    def entries(self) -> list[TensorEntry]:
        return [TensorEntry(name, about.properties.dtype, tuple(about.size)) for name, about in self._tensors.items()]

    @property
    def metadata(self) -> dict[str, str]:
        return metadata_of(self._manifest)

    def read(self, name: str) -> Tensor:
        return _assemble(self._folder, MODEL + name, self._tensors[name], self._metadata, self._manifest)


def _model_tensors(metadata: Metadata) -> list[tuple[str, TensorStorageMetadata]]:
    tensors = [
        (name.removeprefix(MODEL), about)
        for name, about in metadata.state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(about, TensorStorageMetadata)
    ]
    if not tensors:
        raise CheckpointError("there is no model in it")
    for name, entry in tensors:
        if not can_hold(entry.properties.dtype):
            raise CheckpointError(f"{name} is {entry.properties.dtype}, which safetensors has no name for")
    return tensors


def recipe_of(manifest: Manifest) -> tuple[str, dict[str, Any]]:
    """Return the recipe that a checkpoint was trained with, and its options.

    Raises CheckpointError if they are no table.
    """
    recipe = str(manifest.config.get("recipe", ""))
    options = manifest.config.get(recipe, {})
    if not isinstance(options, dict):
        raise CheckpointError(f"its manifest is damaged: the options of its recipe {recipe!r:.40} are no table")
    return recipe, options


def adapters_of(manifest: Manifest) -> str:
    """Return the adapters of a federated model: what of it was trained, and is in the checkpoint."""
    return str(manifest.config.get("adapters", NONE))


def metadata_of(manifest: Manifest) -> dict[str, str]:
    """Return the file's metadata: where the weights come from. The format allows text values only."""
    recipe, options = recipe_of(manifest)
    adapters = adapters_of(manifest)
    return {
        **({"adapters": adapters} if adapters != NONE else {}),
        "format": "pt",
        "framework": "vigil",
        "step": str(manifest.step),
        "consumed_samples": str(manifest.consumed_samples),
        "recipe": recipe,
        "options": json.dumps(options, sort_keys=True),
        "config_hash": manifest.config_hash,
        "data": manifest.data,
    }


def _assemble(folder: Path, name: str, entry: TensorStorageMetadata, metadata: Metadata, manifest: Manifest) -> Tensor:
    """Assemble a tensor from its chunks, of which none is in memory twice."""
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    covered = 0
    for chunk, part in _chunks(folder, name, entry, metadata, manifest):
        if part.shape == tensor.shape:
            return part
        target = tensor
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dim, offset, size)
        target.copy_(part)
        covered += part.numel()
    if covered != tensor.numel():
        raise CheckpointError(f"{name} is not whole: {covered} of its {tensor.numel()} elements are there")
    return tensor


def _chunks(
    folder: Path, name: str, entry: TensorStorageMetadata, metadata: Metadata, manifest: Manifest
) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
    files = {file.file for file in manifest.files}
    for chunk in entry.chunks:
        location = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
        if location is None or location.relative_path not in files:
            raise CheckpointError(f"{name} lies in no file of the checkpoint")
        part = _load_chunk(folder / location.relative_path, location.offset, location.length)
        if part is None:
            raise CheckpointError(f"{location.relative_path} has no tensor where a chunk of {name} belongs")
        if part.shape != chunk.sizes or part.dtype != entry.properties.dtype:
            raise CheckpointError(f"{name} has a chunk of {list(part.shape)} where {list(chunk.sizes)} belongs")
        yield chunk, part


def _load_chunk(path: Path, offset: int, length: int) -> Tensor | None:
    """Return the plain tensor in a part of a file, or None if it has none."""
    with open(path, "rb") as file:
        try:
            part = torch.load(_create_file_view(file, offset, length), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        except OSError:
            raise
        except Exception:  # torch's reader raises many kinds of errors for foreign bytes
            return None
    is_plain = type(part) is Tensor and part.layout is torch.strided and part.device.type == "cpu"
    return part if is_plain else None
