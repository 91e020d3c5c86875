"""Open weights to start from: a safetensors file, or a folder of them, mapped and read tensor by tensor.

Nothing is read before it is requested: a rank with a part of a tensor reads that part only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.corpus.errors import DataError
from training.runtime import data_roots
from training.weights.safetensors import FormatError, StoredTensor, read_header

if TYPE_CHECKING:
    from torch import Tensor

OPTION = "from_weights"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
TOKENIZER_COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "merges.txt", GENERATION),
)
"""Files that a model's folder may have next to its tokenizer.json, for users of the model."""
KINDS = ("F64", "F32", "F16", "BF16")
"""Supported types of elements, by the format's names."""


@dataclass(frozen=True)
class Weights:
    """The weights at a path."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The file's metadata, such as the run that it came from."""
    config: Mapping[str, Any] | None = None
    """The folder's config.json; None: it has none."""

    @property
    def files(self) -> list[Path]:
        """All files that are needed to open the weights again, and to export what is trained from them."""
        folder = self.path if self.path.is_dir() else self.path.parent
        names = (CONFIG, INDEX, TOKENIZER, *TOKENIZER_COMPANIONS) if self.path.is_dir() else ()
        companions = [folder / name for name in names if data_roots.is_file(folder / name)]
        return [*sorted({stored.file for stored in self.tensors.values()}), *companions]

    def read(self, name: str) -> Tensor:
        """Return the whole tensor, mapped: parts that are not accessed are not read."""
        return self.tensors[name].read()


def open_weights(path: Path) -> Weights:
    """Open weights at a path. Raises DataError if a run cannot start from them."""
    if os.path.isdir(path):  # also False without permission, in which case it cannot be opened either
        return _open_folder(path)
    tensors, metadata = _open_file(path)
    return Weights(path, tensors, metadata)


def weights_error(message: str, option: str = OPTION) -> DataError:
    return DataError(message, option)


def _open_folder(folder: Path) -> Weights:
    try:
        data_roots.check_folder(folder)
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise _unreadable(folder, error) from None
    # Names that begin with a dot are left by copying programs and macOS.
    shards = [name for name in names if name.lower().endswith(".safetensors") and not name.startswith(".")]
    # The single file comes first, as in Hugging Face's library, which leaves an old index next to one that it saves.
    files = [SINGLE] if SINGLE in names else _indexed_files(folder) if INDEX in names else shards
    if not files:
        raise weights_error(f"{folder} has no *.safetensors. Name a folder that has, or one such file.")
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for name in files:
        found, more_metadata = _open_file(folder / name)
        if duplicates := sorted(tensors.keys() & found.keys()):
            raise weights_error(
                f"{folder} has {duplicates[0]} twice, in {tensors[duplicates[0]].file.name} and in {name}."
            )
        tensors |= found
        metadata |= more_metadata
    config = _json(folder / CONFIG) if CONFIG in names else None
    return Weights(folder, tensors, metadata, config)


def _indexed_files(folder: Path) -> list[str]:
    """Return the files that the index of a sharded model names."""
    weight_map = _json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise weights_error(f"{folder / INDEX} has no weight_map from tensors to files.")
    names = sorted(set(weight_map.values()))
    if odd := next((name for name in names if Path(name).name != name), None):
        raise weights_error(f"{folder / INDEX} names {odd!r:.100}, which is not a file in the same folder.")
    return names


def _json(path: Path) -> dict[str, Any]:
    try:
        with data_roots.open_file(path) as file:
            content = json.loads(file.read().decode())
    except OSError as error:
        raise weights_error(f"{path} can't be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise weights_error(f"{path} is not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise weights_error(f"{path} is not a JSON object.")
    return content


def _open_file(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    try:
        tensors, metadata = read_header(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    except FormatError as error:
        raise weights_error(str(error)) from None
    for name, stored in tensors.items():
        if stored.kind not in KINDS:
            raise weights_error(f"{path} has {name} as {stored.kind}; weights to start from are {', '.join(KINDS)}.")
    return tensors, metadata


def _unreadable(path: Path, error: OSError) -> DataError:
    return weights_error(
        f"{path} can't be read ({error.strerror}). Name a safetensors file or a folder that the nodes can access."
    )


def first_names(names: Iterable[str]) -> str:
    """List the first names: `a, b, c and 12 more`."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more


def digest(path: Path) -> str:
    """Return the sha256 of a small file."""
    with data_roots.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
