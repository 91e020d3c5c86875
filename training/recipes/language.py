"""A byte-level GPT on the sources of Python's standard library: real text that every machine has."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from training.data import Batch, Ids, Prepared, Split, Task

VOCABULARY = 256
SHARD_TOKENS = 4 * 2**20
END_OF_FILE = b"\0"
VALIDATION_EVERY = 20
"""About each twentieth file is kept for validation."""
LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
SPLITS: tuple[Split, ...] = ("train", "validation")


def prepare(cache: Path, identity: str | None = None) -> Prepared:
    """The tokens on disk, made on first use. `identity` asks for the very data that a checkpoint was trained on."""
    if identity and _is_whole(cache / identity):
        return Prepared(cache / identity, identity)
    sources = sorted(_sources())
    described = "\n".join(f"{name} {size}" for name, size in sources)
    current = f"language-{sys.version_info.major}.{sys.version_info.minor}-{_digest(described.encode())[:10]}"
    if identity and identity != current:
        raise FileNotFoundError(
            f"This run was trained on {identity}, which is not in {cache} any more, and this Python's standard library "
            f"makes {current}. Resume where that folder is, or start afresh."
        )
    if not _is_whole(cache / current):
        _write_shards(cache / current, [name for name, _ in sources])
    return Prepared(cache / current, current)


def build(
    data: Path,
    *,
    layers: Annotated[int, "1..128", "Transformer blocks."] = 3,
    heads: Annotated[int, "1..128", "Attention heads a block."] = 4,
    head_width: Annotated[int, "8..256", "Of each head; the model is heads × head_width wide."] = 24,
    context: Annotated[int, "8..8192", "Bytes that the model sees at once."] = 96,
    dropout: Annotated[float, "0..0.9", "Part of each block's output that is silenced in training."] = 0.0,
) -> Task:
    shards = {split: Shards(data, split, context) for split in SPLITS}
    return Task(
        model=Gpt(layers=layers, heads=heads, width=heads * head_width, context=context, dropout=dropout),
        samples={split: len(found) for split, found in shards.items()},
        batch=lambda split, ids: (shards[split].windows(ids),),
        loss=_loss,
        score=lambda model, batch: {"loss": _loss(model, batch)},
        unit="tokens",
        units_per_sample=context,
        facts={"data": data.name},
    )


class Gpt(nn.Module):
    """(samples, context) bytes → (samples, context, 256) logits. Pre-norm, learned positions, tied embedding."""

    def __init__(self, *, layers: int, heads: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(heads, width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's: what is added to the residual stream starts smaller, the more blocks add to it."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                onto_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if onto_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        return functional.linear(self.norm(stream), self.tokens.weight)


class Block(nn.Module):
    """Attention and a two-layer network, each added to the stream (samples, context, width)."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.dropout(self._attend(self.attention_norm(stream)))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(stream)), approximate="tanh")
        result: Tensor = stream + self.dropout(self.mlp_out(hidden))
        return result

    def _attend(self, stream: Tensor) -> Tensor:
        samples, context, width = stream.shape
        query, key, value = self.attention_in(stream).view(samples, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(samples, context, width))
        return result


def _loss(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Mean cross-entropy of each next byte, in nats."""
    (windows,) = batch
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1))


class Shards:
    """The windows of one split: `context` + 1 consecutive bytes each, the next starting where the last is predicted."""

    def __init__(self, folder: Path, split: Split, context: int) -> None:
        index = json.loads((folder / "index.json").read_text())
        self._tokens = [np.memmap(folder / shard["file"], dtype=np.uint8, mode="r") for shard in index[split]]
        self._context = context
        windows = [max(0, (len(tokens) - 1) // context) for tokens in self._tokens]
        self._ends = np.cumsum(windows)
        if not len(self):
            raise ValueError(
                f"context {context} is longer than the {split} data; take at most {len(self._tokens[0]) - 1}"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def windows(self, ids: Ids) -> Tensor:
        """(samples, context + 1) int64."""
        rows = np.empty((len(ids), self._context + 1), dtype=np.uint8)
        for row, (shard, sample) in enumerate(zip(np.searchsorted(self._ends, ids, side="right"), ids, strict=True)):
            start = (sample - (self._ends[shard - 1] if shard else 0)) * self._context
            rows[row] = self._tokens[shard][start : start + self._context + 1]
        return torch.from_numpy(rows).long()


def _sources() -> Iterator[tuple[str, int]]:
    """(path below the standard library, bytes) of every source file."""
    root = sysconfig.get_path("stdlib")
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                yield os.path.relpath(path, root), os.path.getsize(path)


def _write_shards(folder: Path, names: list[str]) -> None:
    """Makes the folder in one rename: of several jobs that race, the first wins and the others take what it made."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.{os.urandom(4).hex()}")
    staging.mkdir(parents=True)
    try:
        root = Path(sysconfig.get_path("stdlib"))
        index: dict[str, Any] = {"python": sys.version.split()[0], "files": len(names)}
        for split in SPLITS:
            chosen = [name for name in names if _split_of(name) == split]
            text = END_OF_FILE.join((root / name).read_bytes() for name in chosen)
            index[split] = [
                _write_shard(staging / f"{split}-{first // SHARD_TOKENS:05d}.bin", text[first : first + SHARD_TOKENS])
                for first in range(0, len(text), SHARD_TOKENS)
            ]
        (staging / "index.json").write_text(json.dumps(index))
        _put_in_place(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, folder: Path) -> None:
    try:
        os.rename(staging, folder)
    except OSError:
        if not folder.exists():
            raise
        if not _is_whole(folder):  # damaged: out of the way with it; who has it open keeps what it has
            os.rename(folder, staging.with_name(f"{staging.name}.damaged"))
            shutil.rmtree(staging.with_name(f"{staging.name}.damaged"), ignore_errors=True)
            os.rename(staging, folder)


def _write_shard(path: Path, tokens: bytes) -> dict[str, object]:
    with open(path, "wb") as file:
        file.write(tokens)
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "tokens": len(tokens), "sha256": _digest(tokens)}


def _is_whole(folder: Path) -> bool:
    """Whether every shard is there as it was written: a shared cache is not to be trusted blindly."""
    try:
        index = json.loads((folder / "index.json").read_text())
        return all(
            _digest((folder / shard["file"]).read_bytes()) == shard["sha256"]
            for split in SPLITS
            for shard in index[split]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _split_of(name: str) -> Split:
    return "train" if int(_digest(name.encode())[:8], 16) % VALIDATION_EVERY else "validation"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
