"""The model of a checkpoint as one plain `safetensors` file, whatever layout it was saved on.

No process group and no GPU: torch's table of contents says where the chunks of each tensor lie, and one tensor after
the other is put together in memory and appended. The format (github.com/huggingface/safetensors, "Format") is eight
bytes, a JSON header and the tensors' bytes, so writing it needs no further package; a test reads it with the real one.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from training import manifest as manifests
from training import storage
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
    metadata = storage.read_metadata(checkpoint)
    tensors = _of_the_model(metadata)
    header, size = _header(tensors, found)
    if target.exists():
        raise FileExistsError(f"{target} exists. Remove it, or choose another name.")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(partial, "xb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name, about in tensors:
                whole = _assemble(checkpoint, name, about, metadata, found)
                file.write(whole.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, target)  # unlike a rename, it fails where somebody else was faster
    finally:
        partial.unlink(missing_ok=True)
    return len(tensors), size


def _of_the_model(metadata: Metadata) -> list[tuple[str, TensorStorageMetadata]]:
    """Widest elements first: then each tensor begins at a multiple of its element's size."""
    found = [
        (name, about)
        for name, about in metadata.state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(about, TensorStorageMetadata)
    ]
    if not found:
        raise CheckpointError("there is no model in it")
    for name, about in found:
        if about.properties.dtype not in DTYPES:
            raise CheckpointError(f"{name} is {about.properties.dtype}, which safetensors has no name for")
    return sorted(found, key=lambda item: (-item[1].properties.dtype.itemsize, item[0]))


def _header(tensors: list[tuple[str, TensorStorageMetadata]], manifest: Manifest) -> tuple[bytes, int]:
    entries: dict[str, Any] = {"__metadata__": _about(manifest)}
    end = 0
    for name, about in tensors:
        begin, end = end, end + about.size.numel() * about.properties.dtype.itemsize
        entries[name.removeprefix(MODEL)] = {
            "dtype": DTYPES[about.properties.dtype],
            "shape": list(about.size),
            "data_offsets": [begin, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % ALIGNMENT), end


def _about(manifest: Manifest) -> dict[str, str]:
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
