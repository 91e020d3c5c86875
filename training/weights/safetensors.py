"""Weights to start from: a safetensors file, or a folder of them, mapped and read tensor by tensor.

The format (github.com/huggingface/safetensors, "Format") is eight bytes, a JSON header and the tensors' bytes, so
reading it needs no further package. Nothing of a file is read before it is asked for: a rank that holds a part of a
tensor reads that part.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.corpus.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

OPTION = "from_weights"
INDEX = "model.safetensors.index.json"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
HEADER_BYTES = 100 * 2**20
"""The largest header that is read, as the format's own library has it."""
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
}  # fmt: skip
"""The format's names of what weights come in: torch's, and bytes each."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: Path
    dtype: str
    """torch's name."""
    shape: tuple[int, ...]
    begin: int
    """Byte of the file."""
    bytes: int


@dataclass(frozen=True)
class Weights:
    """What a path holds."""

    path: Path
    tensors: Mapping[str, Stored]
    about: Mapping[str, str] = field(default_factory=dict)
    """What the file itself says, such as the run that it came from."""
    config: Mapping[str, Any] | None = None
    """The folder's config.json; None: there is none."""

    @property
    def files(self) -> list[Path]:
        """All that is needed to open it again."""
        folder = self.path if self.path.is_dir() else self.path.parent
        beside = [folder / CONFIG, folder / INDEX, folder / TOKENIZER] if self.path.is_dir() else []
        return [*sorted({stored.file for stored in self.tensors.values()}), *(path for path in beside if path.exists())]

    def read(self, name: str) -> Tensor:
        """The whole tensor, mapped: what of it is not looked at is not read."""
        import torch

        stored = self.tensors[name]
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if not stored.bytes:
            return torch.empty(stored.shape, dtype=dtype)
        # Private, so that nothing can ever be written back.
        mapped = torch.UntypedStorage.from_file(str(stored.file), False, stored.begin + stored.bytes)
        content = torch.empty(0, dtype=torch.uint8).set_(mapped)[stored.begin :]  # type: ignore[arg-type]
        if stored.begin % dtype.itemsize:
            content = content.clone()  # the format allows it, a view does not
        return content.view(dtype).view(stored.shape)


def open_weights(path: Path) -> Weights:
    """DataError, in a sentence, if there is nothing that could be started from."""
    if path.is_dir():
        return _open_folder(path)
    tensors, about = _open_file(path)
    return Weights(path, tensors, about)


def wrong(message: str, option: str = OPTION) -> DataError:
    return DataError(message, option)


def _open_folder(folder: Path) -> Weights:
    names = _listed(folder) if (folder / INDEX).exists() else sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise wrong(f"{folder} has no *.safetensors. Name a folder that has, or one such file.")
    tensors: dict[str, Stored] = {}
    about: dict[str, str] = {}
    for name in names:
        found, said = _open_file(folder / name)
        if twice := sorted(tensors.keys() & found.keys()):
            raise wrong(f"{folder} has {twice[0]} twice, in {tensors[twice[0]].file.name} and in {name}.")
        tensors |= found
        about |= said
    config = _json(folder / CONFIG) if (folder / CONFIG).exists() else None
    return Weights(folder, tensors, about, config)


def _listed(folder: Path) -> list[str]:
    """The files that the index of a model in several names."""
    listed = _json(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise wrong(f"{folder / INDEX} has no weight_map from tensors to files.")
    names = sorted(set(listed.values()))
    if odd := next((name for name in names if Path(name).name != name), None):
        raise wrong(f"{folder / INDEX} names {odd!r:.100}, which is not a file beside it.")
    return names


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(f"{path} can't be read ({error.strerror}).") from None
    except (UnicodeDecodeError, ValueError) as error:
        raise wrong(f"{path} is not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise wrong(f"{path} is no JSON object.")
    return found


def _open_file(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, HEADER_BYTES):
                raise wrong(f"{path} is no safetensors file: it has no header.")
            header = json.loads(file.read(length))
    except OSError as error:
        message = f"{path} can't be read ({error.strerror}). Name a safetensors file, or a folder, that the nodes see."
        raise wrong(message) from None
    except (UnicodeDecodeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise wrong(f"{path} is no safetensors file: its header is not JSON ({error}).") from None
    if not isinstance(header, dict):
        raise wrong(f"{path} is no safetensors file: its header is no JSON object.")
    about = header.pop("__metadata__", None) or {}
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    end = max((stored.begin + stored.bytes for stored in tensors.values()), default=8 + length)
    if end > size:
        raise wrong(f"{path} ends early: {size:,} bytes of {end:,}. Copy it anew.")
    return tensors, {str(name): str(value) for name, value in about.items()}


def _stored(path: Path, name: str, entry: Any, start: int) -> Stored:
    try:
        low, high = entry["data_offsets"]
        kind, shape = entry["dtype"], tuple(entry["shape"])
        whole = all(type(number) is int and number >= 0 for number in (low, high, *shape))
    except (TypeError, KeyError, ValueError):
        raise wrong(f"{path} is no safetensors file: its header says nothing of where {name} lies.") from None
    if kind not in DTYPES:
        raise wrong(f"{path} has {name} as {kind}; weights to start from are {', '.join(DTYPES)}.")
    dtype, each = DTYPES[kind]
    if not whole or high - low != math.prod(shape) * each:
        raise wrong(f"{path} is damaged: {name} of shape {list(shape)} can't lie in {high - low} bytes of {kind}.")
    return Stored(path, dtype, shape, start + low, high - low)


def some(names: Iterable[str]) -> str:
    """`a, b, c and 12 more`."""
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


def digest(path: Path) -> str:
    """sha256 of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
