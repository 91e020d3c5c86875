"""Store what data(client) returns on disk, once for each client: all ranks and attempts of a run map the same files.

A folder has one file for each part of a sample and split, with the clients' samples one after the other, and INDEX,
which is written last. It belongs to one run.
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
MAX_PARTS, MAX_DIMS = 16, 8  # of a sample, and of a part of it


@dataclass(frozen=True)
class SamplePart:
    """The dtype and shape of one of the tensors that a sample consists of."""

    dtype: str
    shape: tuple[int, ...]
    """Without the first dim, the samples."""

    @classmethod
    def of(cls, tensor: Tensor) -> SamplePart:
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))

    def __str__(self) -> str:
        return f"{self.dtype} of shape (samples, {', '.join(map(str, self.shape))})".replace(", )", ",)")


@dataclass(frozen=True)
class StoredClientData:
    """A folder with the samples of all clients."""

    folder: Path
    parts: tuple[SamplePart, ...]
    sizes: Mapping[Split, Sequence[int]]
    """By split, the number of samples of each client."""
    names: tuple[str, ...]
    """The names of the clients; empty if client.py does not define name()."""
    identity: str

    def tensors(self, split: Split) -> tuple[Tensor, ...]:
        """Return the parts (samples, …) of a split, mapped from disk."""
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
        """Return the client of each sample, (samples,)."""
        return np.repeat(np.arange(len(self.sizes[split])), np.array(self.sizes[split], dtype=np.int64))


@dataclass
class DataProgress:
    """The progress of calling data() for each client."""

    clients: int
    done: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return f"data() of client {self.done:,} of {self.clients:,}, {self.bytes / 1e6:,.1f} MB so far"

    def facts(self) -> dict[str, object]:
        return asdict(self)


def load(folder: Path) -> StoredClientData | None:
    """Return the data stored in a folder; None if it has no index."""
    try:
        found = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError):
        return None
    parts = tuple(SamplePart(part["dtype"], tuple(part["shape"])) for part in found["parts"])
    return StoredClientData(folder, parts, found["sizes"], tuple(found["names"]), found["identity"])


def store(
    folder: Path,
    data: Callable[[int], Any],
    name: Callable[[int], str] | None,
    *,
    clients: int,
    holdout_interval: int,
    report: Callable[..., None],
) -> StoredClientData:
    """Call `data` for each client and store the results. The folder appears complete or not at all.

    `holdout_interval`: every so many samples one is used for validation, if `data` names none; 0: none. DataError for
    data that cannot be trained on.
    """
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.{os.urandom(4).hex()}")
    staging.mkdir(parents=True)
    try:
        with ExitStack() as files:
            _write(staging, files, _fetched(data, clients, holdout_interval), name, DataProgress(clients), report)
        if load(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    found = load(folder)
    assert found is not None
    return found


SplitTensors = dict[Split, tuple[Tensor, ...]]


def _write(
    folder: Path,
    files: ExitStack,
    splits: Iterator[SplitTensors],
    name: Callable[[int], str] | None,
    progress: DataProgress,
    report: Callable[..., None],
) -> None:
    digest = hashlib.sha256()
    parts: list[SamplePart] = []
    opened: dict[tuple[Split, int], IO[bytes]] = {}
    sizes: dict[Split, list[int]] = {split: [] for split in SPLITS}
    for client, divided in enumerate(splits):
        for split, tensors in divided.items():
            _check_alike(client, parts, [SamplePart.of(tensor) for tensor in tensors])
            sizes[split].append(len(tensors[0]))
            for place, tensor in enumerate(tensors):
                file = opened.get((split, place))
                if file is None:
                    file = files.enter_context((folder / _file(split, place)).open("wb"))
                    opened[split, place] = file
                memory = tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().data
                digest.update(memory)
                file.write(memory)
                progress.bytes += len(memory)
        progress.done = client + 1
        report(progress)
    for file in opened.values():
        file.flush()
        os.fsync(file.fileno())
    digest.update(json.dumps([sizes, [asdict(part) for part in parts]]).encode())
    index = {
        "parts": [asdict(part) for part in parts],
        "sizes": sizes,
        "names": [_client_name(name, client) for client in range(progress.clients)] if name is not None else [],
        "identity": f"client-{digest.hexdigest()[:16]}",
    }
    (folder / INDEX).write_text(json.dumps(index))


def _fetched(data: Callable[[int], Any], clients: int, holdout_interval: int) -> Iterator[SplitTensors]:
    for client in range(clients):
        found = data(client)
        divided = _by_split(client, found) if isinstance(found, Mapping) else _hold_out(client, found, holdout_interval)
        if not len(divided["train"][0]):
            raise DataError(
                f"data({client}) returns no sample to train on. Return some for each client, or set fewer clients."
            )
        yield divided


def _by_split(client: int, found: Mapping[Any, Any]) -> SplitTensors:
    if "train" not in found or not found.keys() <= set(SPLITS):
        keys = ", ".join(map(repr, found)) or "nothing"
        raise DataError(f'data({client}) returns a dict of {keys}. Its keys are "train" and, optionally, "validation".')
    train = _tensors(client, found["train"])
    if found.get("validation") is None:
        return {"train": train, "validation": tuple(tensor[:0] for tensor in train)}
    return {"train": train, "validation": _tensors(client, found["validation"])}


def _hold_out(client: int, found: object, holdout_interval: int) -> SplitTensors:
    """Use every `holdout_interval`-th sample for validation."""
    tensors = _tensors(client, found)
    rows = torch.arange(len(tensors[0]))
    is_validation = (
        rows % holdout_interval == holdout_interval - 1
        if holdout_interval
        else torch.zeros(len(rows), dtype=torch.bool)
    )
    return {
        "train": tuple(tensor[~is_validation] for tensor in tensors),
        "validation": tuple(tensor[is_validation] for tensor in tensors),
    }


def _tensors(client: int, found: object) -> tuple[Tensor, ...]:
    if not isinstance(found, tuple | list) or not 1 <= len(found) <= MAX_PARTS:
        raise DataError(
            f"data({client}) returns a {type(found).__name__}, not a tuple of tensors such as (inputs, labels), each"
            " with the samples as its first dim."
        )
    try:
        tensors = tuple(_tensor(part).detach().cpu() for part in found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"data({client}) returns something that is not a tensor: {error}") from None
    if any(
        not 1 <= tensor.dim() <= MAX_DIMS or tensor.is_complex() or tensor.layout is not torch.strided
        for tensor in tensors
    ):
        shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        raise DataError(
            f"data({client}) returns {shapes}. Return dense real tensors with the samples as their first dim."
        )
    if len({len(tensor) for tensor in tensors}) > 1:
        counts = ", ".join(str(len(tensor)) for tensor in tensors)
        raise DataError(f"data({client}) returns parts of {counts} samples. All parts need the same number of samples.")
    return tensors


def _tensor(part: Any) -> Tensor:
    """Return a tensor; arrays may be views that torch does not support, such as reversed ones."""
    return torch.as_tensor(np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part)


def _check_alike(client: int, parts: list[SamplePart], found: list[SamplePart]) -> None:
    if not parts:
        parts += found
    elif parts != found:
        is_, was = "; ".join(map(str, found)), "; ".join(map(str, parts))
        text = f"data({client}) returns {is_}, but the clients before it returned {was}."
        raise DataError(f"{text} All clients must return the same dtypes and shapes.")


def _client_name(name: Callable[[int], str], client: int) -> str:
    found = name(client)
    if not isinstance(found, str):
        raise DataError(f"name({client}) returns a {type(found).__name__}, not a string.")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in found[:MAX_NAME_CHARS])


MAX_NAME_CHARS = 100


def _file(split: Split, place: int) -> str:
    return f"{split}.{place}.bin"
