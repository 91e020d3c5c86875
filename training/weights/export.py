"""The model of a checkpoint as one plain `safetensors` file, whatever layout it was saved on.

No process group and no GPU: torch's table of contents says where the chunks of each tensor lie, and one tensor after
the other is put together in memory and appended.
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
from training.weights.safetensors import Entry, can_hold, write

MODEL = "model."
NONE = "none"


def export(checkpoint: Path, target: Path) -> tuple[int, int]:
    """Writes the model's tensors to `target`, which appears whole or not at all; answers (tensors, bytes of them).

    CheckpointError if the checkpoint is damaged or has no model; FileExistsError if there is something at `target`.
    """
    found = manifests.verify(checkpoint)
    stored = Stored(checkpoint, found)
    return write(target, stored.entries, stored.about, lambda entry: stored.read(entry.name))


class Source(Protocol):
    """A whole model by our names, one tensor at a time."""

    @property
    def entries(self) -> list[Entry]: ...
    @property
    def about(self) -> dict[str, str]: ...
    def read(self, name: str) -> Tensor: ...


class Stored:
    """The model's tensors of a verified checkpoint."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = checkpoint, manifest
        self._metadata = read_metadata(checkpoint)
        self._tensors = dict(_of_the_model(self._metadata))

    @property
    def entries(self) -> list[Entry]:
        return [Entry(name, about.properties.dtype, tuple(about.size)) for name, about in self._tensors.items()]

    @property
    def about(self) -> dict[str, str]:
        return about_of(self._manifest)

    def read(self, name: str) -> Tensor:
        return _assemble(self._folder, MODEL + name, self._tensors[name], self._metadata, self._manifest)


def _of_the_model(metadata: Metadata) -> list[tuple[str, TensorStorageMetadata]]:
    found = [
        (name.removeprefix(MODEL), about)
        for name, about in metadata.state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(about, TensorStorageMetadata)
    ]
    if not found:
        raise CheckpointError("there is no model in it")
    for name, about in found:
        if not can_hold(about.properties.dtype):
            raise CheckpointError(f"{name} is {about.properties.dtype}, which safetensors has no name for")
    return found


def recipe_of(manifest: Manifest) -> tuple[str, dict[str, Any]]:
    """The recipe that it was trained with, and its options; CheckpointError if they are no table."""
    recipe = str(manifest.config.get("recipe", ""))
    options = manifest.config.get(recipe, {})
    if not isinstance(options, dict):
        raise CheckpointError(f"its manifest is damaged: the options of its recipe {recipe!r:.40} are no table")
    return recipe, options


def adapters_of(manifest: Manifest) -> str:
    """What of a federation's model was trained, and is in it."""
    return str(manifest.config.get("adapters", NONE))


def about_of(manifest: Manifest) -> dict[str, str]:
    """Where it comes from; the format has text for values."""
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


def _assemble(folder: Path, name: str, about: TensorStorageMetadata, metadata: Metadata, manifest: Manifest) -> Tensor:
    """One whole tensor from its chunks, of which none is in memory twice."""
    whole = torch.empty(about.size, dtype=about.properties.dtype)
    covered = 0
    for chunk, part in _chunks(folder, name, about, metadata, manifest):
        if part.shape == whole.shape:
            return part
        target = whole
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dim, offset, size)
        target.copy_(part)
        covered += part.numel()
    if covered != whole.numel():
        raise CheckpointError(f"{name} is not whole: {covered} of its {whole.numel()} elements are there")
    return whole


def _chunks(
    folder: Path, name: str, about: TensorStorageMetadata, metadata: Metadata, manifest: Manifest
) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
    files = {file.file for file in manifest.files}
    for chunk in about.chunks:
        place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
        if place is None or place.relative_path not in files:
            raise CheckpointError(f"{name} lies in no file of the checkpoint")
        part = _loaded(folder / place.relative_path, place.offset, place.length)
        if part is None:
            raise CheckpointError(f"{place.relative_path} has no tensor where a chunk of {name} belongs")
        if part.shape != chunk.sizes or part.dtype != about.properties.dtype:
            raise CheckpointError(f"{name} has a chunk of {list(part.shape)} where {list(chunk.sizes)} belongs")
        yield chunk, part


def _loaded(path: Path, offset: int, length: int) -> Tensor | None:
    """The plain tensor that a part of a file is; None if it is none."""
    with open(path, "rb") as file:
        try:
            part = torch.load(_create_file_view(file, offset, length), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        except OSError:
            raise
        except Exception:  # torch's reader tells of foreign bytes by many kinds of errors
            return None
    is_plain = type(part) is Tensor and part.layout is torch.strided and part.device.type == "cpu"
    return part if is_plain else None
