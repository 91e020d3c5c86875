"""What data(client) gives, asked once for each client and kept on disk: every rank and every attempt maps the same.

A folder holds one file for each part of a sample and split, the clients' samples one after the other, and INDEX, which
is written last. It belongs to one run: nobody else's data are taken for its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, get_args

import numpy as np
import torch
from torch import Tensor

from training.corpus.errors import DataError
from training.data import Split

INDEX = "index.json"
SPLITS: tuple[Split, ...] = get_args(Split)
PARTS, DIMS = 16, 8  # of a sample, and of a part


@dataclass(frozen=True)
class Part:
    """One of the tensors that a sample is made of."""

    dtype: str
    shape: tuple[int, ...]
    """Without the samples."""

    @classmethod
    def of(cls, tensor: Tensor) -> Part:
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))

    def __str__(self) -> str:
        return f"{self.dtype} of shape (samples, {', '.join(map(str, self.shape))})".replace(", )", ",)")


@dataclass(frozen=True)
class Kept:
    """A folder of samples."""

    folder: Path
    parts: tuple[Part, ...]
    sizes: Mapping[Split, Sequence[int]]
    """Of each client."""
    names: tuple[str, ...]
    """The clients', where it is told."""
    identity: str

    def tensors(self, split: Split) -> tuple[Tensor, ...]:
        """(samples, …) each, mapped."""
        rows = sum(self.sizes[split])
        return tuple(
            torch.from_file(
                str(self.folder / _file(split, place)),
                shared=False,
                size=rows * int(np.prod(part.shape, dtype=np.int64)),
                dtype=getattr(torch, part.dtype),
            ).reshape(rows, *part.shape)
            if rows
            else torch.empty(0, *part.shape, dtype=getattr(torch, part.dtype))
            for place, part in enumerate(self.parts)
        )

    def owners(self, split: Split) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The client of each sample."""
        return np.repeat(np.arange(len(self.sizes[split])), np.array(self.sizes[split], dtype=np.int64))


@dataclass
class Asking:
    """How far it is: told as progress."""

    clients: int
    done: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return f"data() of client {self.done:,} of {self.clients:,}, {self.bytes / 1e6:,.1f} MB so far"

    def facts(self) -> dict[str, object]:
        return asdict(self)


def load(folder: Path) -> Kept | None:
    """What is kept there; None: nothing whole."""
    try:
        found = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError):
        return None
    parts = tuple(Part(one["dtype"], tuple(one["shape"])) for one in found["parts"])
    return Kept(folder, parts, found["sizes"], tuple(found["names"]), found["identity"])


def make(
    folder: Path,
    data: Callable[[int], Any],
    name: Callable[[int], str] | None,
    *,
    clients: int,
    held_out: int,
    tell: Callable[..., None],
) -> Kept:
    """Asks `data` for each client; the folder is there whole or not at all. DataError for what can't be trained on."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.{os.urandom(4).hex()}")
    staging.mkdir(parents=True)
    try:
        with ExitStack() as files:
            _write(staging, files, _asked(data, clients, held_out), name, Asking(clients), tell)
        if load(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    found = load(folder)
    assert found is not None
    return found


Divided = dict[Split, tuple[Tensor, ...]]


def _write(
    folder: Path,
    files: ExitStack,
    asked: Iterator[Divided],
    name: Callable[[int], str] | None,
    asking: Asking,
    tell: Callable[..., None],
) -> None:
    digest = hashlib.sha256()
    parts: list[Part] = []
    opened: dict[tuple[Split, int], IO[bytes]] = {}
    sizes: dict[Split, list[int]] = {split: [] for split in SPLITS}
    for client, divided in enumerate(asked):
        for split, tensors in divided.items():
            _check_alike(client, parts, [Part.of(tensor) for tensor in tensors])
            sizes[split].append(len(tensors[0]))
            for place, tensor in enumerate(tensors):
                file = opened.get((split, place))
                if file is None:
                    file = files.enter_context((folder / _file(split, place)).open("wb"))
                    opened[split, place] = file
                memory = tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().data
                digest.update(memory)
                file.write(memory)
                asking.bytes += len(memory)
        asking.done = client + 1
        tell(asking)
    for file in opened.values():
        file.flush()
        os.fsync(file.fileno())
    digest.update(json.dumps([sizes, [asdict(part) for part in parts]]).encode())
    index = {
        "parts": [asdict(part) for part in parts],
        "sizes": sizes,
        "names": [_named(name, client) for client in range(asking.clients)] if name is not None else [],
        "identity": f"client-{digest.hexdigest()[:16]}",
    }
    (folder / INDEX).write_text(json.dumps(index))


def _asked(data: Callable[[int], Any], clients: int, held_out: int) -> Iterator[Divided]:
    for client in range(clients):
        found = data(client)
        divided = _by_split(client, found) if isinstance(found, Mapping) else _kept_apart(client, found, held_out)
        if not len(divided["train"][0]):
            raise DataError(f"data({client}) gives no sample to train on. Give each client some, or ask for fewer.")
        yield divided


def _by_split(client: int, found: Mapping[Any, Any]) -> Divided:
    if "train" not in found or not found.keys() <= set(SPLITS):
        keys = ", ".join(map(repr, found)) or "nothing"
        raise DataError(f'data({client}) gives a dict of {keys}. Its keys are "train" and, if you like, "validation".')
    train = _tensors(client, found["train"])
    if found.get("validation") is None:
        return {"train": train, "validation": tuple(tensor[:0] for tensor in train)}
    return {"train": train, "validation": _tensors(client, found["validation"])}


def _kept_apart(client: int, found: object, held_out: int) -> Divided:
    """The last of each so many samples is kept for validation."""
    tensors = _tensors(client, found)
    rows = torch.arange(len(tensors[0]))
    is_kept = rows % held_out == held_out - 1 if held_out else torch.zeros(len(rows), dtype=torch.bool)
    return {
        "train": tuple(tensor[~is_kept] for tensor in tensors),
        "validation": tuple(tensor[is_kept] for tensor in tensors),
    }


def _tensors(client: int, found: object) -> tuple[Tensor, ...]:
    if not isinstance(found, tuple | list) or not 1 <= len(found) <= PARTS:
        raise DataError(
            f"data({client}) gives a {type(found).__name__}, not a tuple of tensors such as (inputs, labels), each with"
            " the samples as its first dim."
        )
    try:
        tensors = tuple(_tensor(part).detach().cpu() for part in found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"data({client}) gives what is no tensor: {error}") from None
    if any(not 1 <= one.dim() <= DIMS or one.is_complex() or one.layout is not torch.strided for one in tensors):
        shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        raise DataError(f"data({client}) gives {shapes}. Give dense, real numbers, with the samples as the first dim.")
    if len({len(tensor) for tensor in tensors}) > 1:
        counts = ", ".join(str(len(tensor)) for tensor in tensors)
        raise DataError(f"data({client}) gives parts of {counts} samples. Give as many of each.")
    return tensors


def _tensor(part: Any) -> Tensor:
    """An array may be a view that torch has none like, a reversed one say."""
    return torch.as_tensor(np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part)


def _check_alike(client: int, parts: list[Part], found: list[Part]) -> None:
    if not parts:
        parts += found
    elif parts != found:
        is_, was = "; ".join(map(str, found)), "; ".join(map(str, parts))
        raise DataError(f"data({client}) gives {is_}, but the clients before it {was}. Give all of them alike.")


def _named(name: Callable[[int], str], client: int) -> str:
    found = name(client)
    if not isinstance(found, str):
        raise DataError(f"name({client}) gives a {type(found).__name__}, not a string.")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in found[:NAME_LETTERS])


NAME_LETTERS = 100


def _file(split: Split, place: int) -> str:
    return f"{split}.{place}.bin"
