"""The owners of tokens: owners.json, made together with token shards. A federation may divide the data by it.

{"format": "vigil-owners", "version": 1, "names": ["ast", "asyncio"],
 "train": [[0, 40211], [1, 120077]], "validation": [[1, 8012]]}

For each split, the owners' numbers in the order of its tokens, each with the number of consecutive tokens. An owner
is a top-level entry of the source: a folder with everything below it, or a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from training.corpus.errors import DataError
from training.corpus.shards import SPLITS, ShardIndex
from training.corpus.windows import window_starts
from training.data import Ids, Split
from training.runtime import data_roots

FILE = "owners.json"
FORMAT, VERSION = "vigil-owners", 1
FILE_BYTES = 256 * 2**20


@dataclass
class Owners:
    """The owners of all tokens, as runs of consecutive tokens of one owner."""

    names: list[str] = field(default_factory=list)
    runs: Mapping[Split, list[list[int]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    _numbers: dict[str, int] = field(default_factory=dict)

    def add(self, split: Split, name: str, tokens: int) -> None:
        """Record the owner of a split's next tokens."""
        number = self._numbers.setdefault(name, len(self._numbers))
        if number == len(self.names):
            self.names.append(name)
        runs = self.runs[split]
        if runs and runs[-1][0] == number:
            runs[-1][1] += tokens
        else:
            runs.append([number, tokens])

    def write(self, folder: Path) -> None:
        content: dict[str, object] = {"format": FORMAT, "version": VERSION, "names": self.names}
        content |= {split: self.runs[split] for split in SPLITS}
        with open(folder / FILE, "w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())

    def for_windows(self, index: ShardIndex, split: Split, context: int) -> Ids:
        """Return the owner's number of each window; of a window with several owners, that of its middle token."""
        numbers, tokens = np.array(self.runs[split], dtype=np.int64).reshape(-1, 2).T
        middles = window_starts(index, split, context) + context // 2
        owners: Ids = numbers[np.searchsorted(np.cumsum(tokens), middles, side="right")]
        return owners


def read(folder: Path, index: ShardIndex) -> Owners | None:
    """Return the owners, or None without such a file. Raises DataError if the file is not for these shards."""
    path = folder / FILE
    if not data_roots.is_file(path):
        return None
    try:
        with data_roots.open_file(path) as file:
            content = json.loads(file.read(FILE_BYTES))
        owners = Owners(list(map(str, content["names"])), {split: content[split] for split in SPLITS})
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f'its format is not "{FORMAT}", version {VERSION}')
        for split in SPLITS:
            _check(owners, split, sum(shard.tokens for shard in index.shards(split)))
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}). Copy it again.", "source") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is not a valid list of owners: {error}. Create it again.", "source") from None
    return owners


def _check(owners: Owners, split: Split, tokens: int) -> None:
    runs = np.array(owners.runs[split])
    if runs.dtype.kind != "i" or runs.ndim != 2 or runs.shape[1] != 2:
        raise ValueError(f"{split} is not a list of owners and tokens")
    if runs.min() < 0 or runs[:, 0].max() >= len(owners.names):
        raise ValueError(f"{split} has an owner without a name")
    if (listed := int(runs[:, 1].sum())) != tokens:
        raise ValueError(f"{split} has owners of {listed:,} tokens, but there are {tokens:,}")
