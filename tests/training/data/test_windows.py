"""Test samples of token shards: every position once per epoch, for any set of participants."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from training.corpus.errors import DataError
from training.corpus.shards import read_index
from training.corpus.windows import Windows
from training.loader.order import Order, Share


def _shards(folder: Path, lengths: list[int], *, dtype: str = "uint16", vocabulary: int = 60_000) -> Path:
    """Tokens that count on from shard to shard."""
    names = [f"{number}.bin" for number in range(len(lengths))]
    first = 0
    for name, length in zip(names, lengths, strict=True):
        np.arange(first, first + length).astype(np.dtype(dtype).newbyteorder("<")).tofile(folder / name)
        first += length
    tokenizer = {"name": "counting", "sha256": "", "vocabulary": vocabulary, "end_of_document": 0}
    listed = [{"file": name, "tokens": length} for name, length in zip(names, lengths, strict=True)]
    about = {"format": "vigil-tokens", "version": 1, "dtype": dtype, "tokenizer": tokenizer}
    (folder / "index.json").write_text(json.dumps({**about, "train": listed, "validation": []}))
    return folder


def _windows(folder: Path, context: int) -> Windows:
    return Windows(folder, read_index(folder), "train", context)


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.integers(0, 90), min_size=1, max_size=6), st.integers(1, 20), st.integers(0, 2**32))
def test_every_position_is_a_target_once_an_epoch(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], context: int, seed: int
) -> None:
    expected = []
    for first, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        expected += range(first + 1, first + 1 + (length - 1) // context * context if length else 0)
    folder = _shards(tmp_path_factory.mktemp("shards"), lengths)
    if not expected:
        with pytest.raises(DataError, match=rf"^context: {context} is longer than the train data"):
            _windows(folder, context)
        return
    windows = _windows(folder, context)
    ids = Order(len(windows), seed).ids(np.arange(len(windows)))
    rows = windows[ids]
    assert rows.shape == (len(windows), context + 1)
    assert sorted(rows[:, 1:].reshape(-1).tolist()) == expected
    assert (np.diff(rows) == 1).all(), "no window runs from one shard into the next"
    assert sum(windows.by_shard) == len(windows)


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 5), st.integers(1, 300), st.integers(0, 2**32))
def test_no_two_coordinates_share_a_sample(batch: int, count: int, step: int, spare: int, seed: int) -> None:
    """One epoch has each sample once; if it ends within a batch, the next epoch's samples come again."""
    samples = batch * 6 + spare
    order = Order(samples, seed)
    taken = []
    for index in range(count):
        share = Share(index, count, batch, batch)
        taken.append(set(order.ids(step * batch + share.start + np.arange(share.size)).tolist()))
    assert sum(map(len, taken)) == len(set.union(*taken)) == batch
    assert set.union(*taken) == set(order.ids(step * batch + np.arange(batch)).tolist())


@pytest.mark.parametrize(("dtype", "largest"), [("uint8", 255), ("uint16", 65_535), ("uint32", 100_000)])
def test_tokens_of_any_width(dtype: str, largest: int, tmp_path: Path) -> None:
    folder = _shards(tmp_path, [largest + 1], dtype=dtype, vocabulary=largest + 1)
    windows = _windows(folder, 5)
    last = windows[np.array([len(windows) - 1])]
    assert last.dtype == np.int64
    assert last[0].tolist() == list(range(len(windows) * 5 - 5, len(windows) * 5 + 1))


def test_a_token_that_the_tokenizer_doesn_t_have(tmp_path: Path) -> None:
    windows = _windows(_shards(tmp_path, [50, 60], vocabulary=100), 9)
    assert windows[np.array([0, 5])].max() < 100
    with pytest.raises(DataError, match=r"^source: .*/1.bin contains token 104, but its tokenizer has only 100"):
        windows[np.array([0, 10])]


def test_a_context_longer_than_the_data(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        _windows(_shards(tmp_path, [30, 50]), 50)
    assert str(caught.value) == "context: 50 is longer than the train data, 50 tokens. Take at most 49, or more data."


def test_a_shard_that_cannot_be_opened_is_reported_in_a_sentence(tmp_path: Path) -> None:
    """The length of a file is available to those who may not read it."""
    folder = _shards(tmp_path, [50])
    index = read_index(folder)
    (folder / "0.bin").unlink()
    with pytest.raises(DataError, match="0.bin can't be read: No such file or directory"):
        Windows(folder, index, "train", 8)
