"""The model of a checkpoint as one plain `safetensors` file, whatever layout it was saved on.

No process group and no GPU: torch's table of contents says where the chunks of each tensor lie, and one tensor after
the other is put together in memory and appended. The format (github.com/huggingface/safetensors, "Format") is eight
bytes, a JSON header and the tensors' bytes, so writing it needs no further package; a test reads it with the real one.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from training import manifest as manifests
from training.checkpoint import storage
from training.manifest import CheckpointError, Manifest

MODEL = "model."
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ALIGNMENT = 8
"""The header is padded with spaces to a multiple of so many bytes, so that a reader can map what follows."""


def export(checkpoint: Path, target: Path) -> tuple[int, int]:
    """Writes the model's tensors to `target`, which appears whole or not at all; answers (tensors, bytes of them).

    CheckpointError if the checkpoint is damaged or has no model; FileExistsError if there is something at `target`.
    """
    found = manifests.verify(checkpoint)
    stored = Stored(checkpoint, found)
    return write(target, stored.entries, about_of(found), lambda entry: stored.read(entry.name))


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Stored:
    """The model's tensors of a verified checkpoint."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = checkpoint, manifest
        self._metadata = storage.read_metadata(checkpoint)
        self._tensors = dict(_of_the_model(self._metadata))

    @property
    def entries(self) -> list[Entry]:
        return [Entry(name, about.properties.dtype, tuple(about.size)) for name, about in self._tensors.items()]

    def read(self, name: str) -> Tensor:
        return _assemble(self._folder, MODEL + name, self._tensors[name], self._metadata, self._manifest)


def write(
    target: Path, entries: Sequence[Entry], about: Mapping[str, str], read: Callable[[Entry], Tensor]
) -> tuple[int, int]:
    """One file, tensor by tensor; it appears whole or not at all. Answers (tensors, bytes of them)."""
    tensors = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header, size = _header(tensors, about)
    if target.exists():
        raise FileExistsError(f"{target} exists. Remove it, or choose another name.")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(partial, "xb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for entry in tensors:
                whole = read(entry).contiguous()
                file.write(whole.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, target)  # unlike a rename, it fails where somebody else was faster
    finally:
        partial.unlink(missing_ok=True)
    return len(tensors), size


def _of_the_model(metadata: Metadata) -> list[tuple[str, TensorStorageMetadata]]:
    found = [
        (name.removeprefix(MODEL), about)
        for name, about in metadata.state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(about, TensorStorageMetadata)
    ]
    if not found:
        raise CheckpointError("there is no model in it")
    for name, about in found:
        if about.properties.dtype not in DTYPES:
            raise CheckpointError(f"{name} is {about.properties.dtype}, which safetensors has no name for")
    return found


def _header(tensors: Sequence[Entry], about: Mapping[str, str]) -> tuple[bytes, int]:
    """Widest elements come first: then each tensor begins at a multiple of its element's size."""
    entries: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for entry in tensors:
        begin, end = end, end + entry.bytes
        offsets = {"data_offsets": [begin, end]}
        entries[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), **offsets}
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % ALIGNMENT), end


def about_of(manifest: Manifest) -> dict[str, str]:
    """Where it comes from; the format has text for values."""
    recipe = str(manifest.config.get("recipe", ""))
    options = manifest.config.get(recipe, {})
    return {
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
    """One whole tensor from its chunks."""
    whole = torch.empty(about.size, dtype=about.properties.dtype)
    covered = 0
    for chunk, part in _chunks(folder, name, about, metadata, manifest):
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
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            part = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        if part.shape != chunk.sizes or part.dtype != about.properties.dtype:
            raise CheckpointError(f"{name} has a chunk of {list(part.shape)} where {list(chunk.sizes)} belongs")
        yield chunk, part
