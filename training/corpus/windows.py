"""The samples of one split: windows of `context` + 1 consecutive tokens, read directly from the mapped shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from training.corpus.errors import DataError
from training.corpus.shards import ShardIndex
from training.data import Ids, Split
from training.runtime import data_roots

Windowed = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class Windows:
    """Each window starts at the last target of the previous one, so that every position is a target once per epoch.

    No window crosses a shard's end: at most `context` positions of each shard remain unused.
    """

    def __init__(self, folder: Path, index: ShardIndex, split: Split, context: int) -> None:
        little = np.dtype(index.dtype).newbyteorder("<")
        shards = [shard for shard in index.shards(split) if shard.tokens]
        self._files = [folder / shard.file for shard in shards]
        self._tokens = [_map_shard(file, little) for file in self._files]
        self._vocabulary = index.tokenizer.vocabulary
        # If the vocabulary uses the whole range of the dtype, no token can be too large.
        self._is_always_valid = np.iinfo(index.dtype).max < self._vocabulary
        self._context = context
        self.by_shard = [_count(len(tokens), context) for tokens in self._tokens]
        """Number of windows of each shard."""
        self._ends = np.cumsum(self.by_shard, dtype=np.int64)
        if not len(self):
            longest = max((shard.tokens for shard in shards), default=0)
            most = f"Take at most {longest - 1}, or more data" if longest > 1 else "More data is needed"
            how = " or a larger validation_percent" if split == "validation" else ""
            message = f"{context} is longer than the {split} data, {longest:,} tokens. {most}{how}."
            raise DataError(message, "context")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, ids: Ids) -> Windowed:
        """Return the samples (n, context + 1)."""
        rows = np.empty((len(ids), self._context + 1), dtype=np.int64)
        shards = np.searchsorted(self._ends, ids, side="right")
        for row, (shard, sample) in enumerate(zip(shards.tolist(), ids.tolist(), strict=True)):
            start = (sample - (int(self._ends[shard - 1]) if shard else 0)) * self._context
            rows[row] = self._tokens[shard][start : start + self._context + 1]
        if not self._is_always_valid and len(rows) and (largest := int(rows.max())) >= self._vocabulary:
            damaged = self._files[int(shards[int(rows.max(axis=1).argmax())])]
            message = (
                f"{damaged} contains token {largest}, but its tokenizer has only {self._vocabulary}. Was it made with "
                "another one? Create the shards again."
            )
            raise DataError(message, "source")
        return rows


def window_starts(index: ShardIndex, split: Split, context: int) -> Ids:
    """Return the index of each window's first token among all tokens of the split. No shard is opened for it."""
    starts, before = [np.arange(0)], 0
    for shard in index.shards(split):
        starts.append(before + context * np.arange(_count(shard.tokens, context)))
        before += shard.tokens
    return np.concatenate(starts)


def _count(tokens: int, context: int) -> int:
    """Return the number of windows of a shard."""
    return max(0, (tokens - 1) // context)


def _map_shard(path: Path, dtype: np.dtype[Any]) -> np.memmap[Any, Any]:
    try:
        with data_roots.open_file(path) as file:
            return np.memmap(file, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}. Copy it again.", "source") from None
