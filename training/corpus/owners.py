"""Whose tokens they are: a file beside token shards, owners.json, made with them. A federation may divide them by it.

{"format": "vigil-owners", "version": 1, "names": ["ast", "asyncio"],
 "train": [[0, 40211], [1, 120077]], "validation": [[1, 8012]]}

Of each split the owners' numbers in the order of its tokens, with how many there are until another's begin. An owner is
what lies straight in the source: a folder, with all that is in it and below, or a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from training.corpus.errors import DataError
from training.corpus.shards import SPLITS, Index
from training.corpus.windows import begins
from training.data import Ids, Split
from training.runtime import data_roots

FILE = "owners.json"
FORMAT, VERSION = "vigil-owners", 1
FILE_BYTES = 256 * 2**20


@dataclass
class Owners:
    """The owners of all tokens, as runs of one owner's."""

    names: list[str] = field(default_factory=list)
    runs: Mapping[Split, list[list[int]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, split: Split, name: str, tokens: int) -> None:
        """The next tokens of a split."""
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == len(self.names):
            self.names.append(name)
        runs = self.runs[split]
        if runs and runs[-1][0] == number:
            runs[-1][1] += tokens
        else:
            runs.append([number, tokens])

    def write(self, folder: Path) -> None:
        about: dict[str, object] = {"format": FORMAT, "version": VERSION, "names": self.names}
        about |= {split: self.runs[split] for split in SPLITS}
        with open(folder / FILE, "w") as file:
            json.dump(about, file)
            file.flush()
            os.fsync(file.fileno())

    def of_windows(self, index: Index, split: Split, context: int) -> Ids:
        """The owner's number of each window: of one that holds two owners' tokens, whose the middle one is."""
        numbers, tokens = np.array(self.runs[split], dtype=np.int64).reshape(-1, 2).T
        middles = begins(index, split, context) + context // 2
        found: Ids = numbers[np.searchsorted(np.cumsum(tokens), middles, side="right")]
        return found


def read(folder: Path, index: Index) -> Owners | None:
    """None: nobody has told. DataError if the file is not of these shards."""
    path = folder / FILE
    if not data_roots.is_file(path):
        return None
    try:
        with data_roots.open_file(path) as file:
            found = json.loads(file.read(FILE_BYTES))
        owners = Owners(list(map(str, found["names"])), {split: found[split] for split in SPLITS})
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ValueError(f'its format is not "{FORMAT}", version {VERSION}')
        for split in SPLITS:
            _check(owners, split, sum(shard.tokens for shard in index.shards(split)))
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}). Copy it anew.", "source") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} does not tell whose tokens these are: {error}. Make it anew.", "source") from None
    return owners


def _check(owners: Owners, split: Split, tokens: int) -> None:
    runs = np.array(owners.runs[split])
    if runs.dtype.kind != "i" or runs.ndim != 2 or runs.shape[1] != 2:
        raise ValueError(f"{split} is no list of owners and tokens")
    if runs.min() < 0 or runs[:, 0].max() >= len(owners.names):
        raise ValueError(f"{split} has an owner without a name")
    if (there := int(runs[:, 1].sum())) != tokens:
        raise ValueError(f"{split} has owners of {there:,} tokens, but there are {tokens:,}")
