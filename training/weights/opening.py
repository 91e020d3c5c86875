"""Weights to start from: a safetensors file, or a folder of them, mapped and read tensor by tensor.

Nothing of a file is read before it is asked for: a rank that holds a part of a tensor reads that part.
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
from training.weights.safetensors import FormatError, Stored, read_header

if TYPE_CHECKING:
    from torch import Tensor

OPTION = "from_weights"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
BESIDE_TOKENIZER = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "merges.txt", GENERATION),
)
"""What a model's folder may have beside its tokenizer.json, for whoever uses the model."""
KINDS = ("F64", "F32", "F16", "BF16")
"""What weights come in, as the format names it."""


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
        """All that is needed to open it again, and to export what comes of it."""
        folder = self.path if self.path.is_dir() else self.path.parent
        beside = (CONFIG, INDEX, TOKENIZER, *BESIDE_TOKENIZER) if self.path.is_dir() else ()
        there = [folder / name for name in beside if data_roots.is_file(folder / name)]
        return [*sorted({stored.file for stored in self.tensors.values()}), *there]

    def read(self, name: str) -> Tensor:
        """The whole tensor, mapped: what of it is not looked at is not read."""
        return self.tensors[name].read()


def open_weights(path: Path) -> Weights:
    """DataError, in a sentence, if there is nothing that could be started from."""
    if os.path.isdir(path):  # False where it may not be looked at: then it may not be opened, either
        return _open_folder(path)
    tensors, about = _open_file(path)
    return Weights(path, tensors, about)


def wrong(message: str, option: str = OPTION) -> DataError:
    return DataError(message, option)


def _open_folder(folder: Path) -> Weights:
    try:
        data_roots.check_folder(folder)
        there = sorted(os.listdir(folder))
    except OSError as error:
        raise _unreadable(folder, error) from None
    # Names that begin with a dot are what copying programs leave, and macOS.
    ours = [name for name in there if name.lower().endswith(".safetensors") and not name.startswith(".")]
    # Hugging Face's library, too, looks for the single file first: it leaves an old index beside one that it saves.
    names = [SINGLE] if SINGLE in there else _listed(folder) if INDEX in there else ours
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
    config = _json(folder / CONFIG) if CONFIG in there else None
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
        with data_roots.open_file(path) as file:
            found = json.loads(file.read().decode())
    except OSError as error:
        raise wrong(f"{path} can't be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise wrong(f"{path} is not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise wrong(f"{path} is no JSON object.")
    return found


def _open_file(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    try:
        tensors, about = read_header(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    except FormatError as error:
        raise wrong(str(error)) from None
    for name, stored in tensors.items():
        if stored.kind not in KINDS:
            raise wrong(f"{path} has {name} as {stored.kind}; weights to start from are {', '.join(KINDS)}.")
    return tensors, about


def _unreadable(path: Path, error: OSError) -> DataError:
    return wrong(f"{path} can't be read ({error.strerror}). Name a safetensors file, or a folder, that the nodes see.")


def some(names: Iterable[str]) -> str:
    """`a, b, c and 12 more`."""
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


def digest(path: Path) -> str:
    """sha256 of a small file."""
    with data_roots.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
