"""A Llama-like decoder on text: byte by byte on the sources of Python's standard library, which every machine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from training.corpus import preparing as corpus
from training.corpus.preparing import Tell, Wanted
from training.corpus.shards import SPLITS, read_index
from training.corpus.windows import Windows
from training.data import Batch, Ids, Prepared, Split, Task
from training.dims import Dims

if TYPE_CHECKING:
    from torch import Tensor

VOCABULARY = 256
BOOKKEEPING = ("shards_folder",)
"""Options that decide no number: a resume may change them."""


def prepare(
    cache: Path,
    identity: str | None = None,
    tell: Tell = lambda progress: None,
    *,
    source: Annotated[
        str,
        "stdlib or a path",
        "What to train on: stdlib, the sources of Python's standard library; or a path that the nodes see: a folder of "
        "texts, JSON lines (.jsonl, .jsonl.gz) or token shards, or one such file.",
    ] = "stdlib",
    tokenizer: Annotated[
        str,
        "auto, bytes or a path",
        "bytes, or the path of a tokenizer.json (Hugging Face); auto: bytes, or what token shards were made with.",
    ] = "auto",
    suffixes: Annotated[str, "Endings of the files in a folder that are texts; .jsonl is always read."] = ".txt .md",
    text_field: Annotated[str, "Where the text is in each object of JSON lines."] = "text",
    validation_percent: Annotated[float, "0.01..50", "Part of the text that is kept for validation."] = 5.0,
    shards_folder: Annotated[
        str, "auto or a path", "Where the tokens are kept for later runs: auto, beside the runs, or a folder."
    ] = "auto",
) -> Prepared:
    """The tokens on disk, made on first use. `identity` asks for the very data that a checkpoint was trained on."""
    wanted = Wanted(source, tokenizer, suffixes, text_field, validation_percent)
    folder = cache if shards_folder == "auto" else Path(shards_folder).expanduser()
    return corpus.prepare(folder, wanted, identity, tell)


PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"layers": 3, "heads": 4, "kv_heads": 4, "head_width": 24, "hidden": 256, "context": 96},
    "1m": {"layers": 4, "heads": 4, "kv_heads": 4, "head_width": 32, "hidden": 344, "context": 256},
    "10m": {"layers": 6, "heads": 6, "kv_heads": 6, "head_width": 64, "hidden": 1024, "context": 512},
    "125m": {"layers": 12, "heads": 12, "kv_heads": 12, "head_width": 64, "hidden": 2048, "context": 1024},
    "350m": {"layers": 24, "heads": 16, "kv_heads": 16, "head_width": 64, "hidden": 2816, "context": 2048},
    "1b": {"layers": 16, "heads": 32, "kv_heads": 8, "head_width": 64, "hidden": 8192, "context": 2048},
    "3b": {"layers": 28, "heads": 24, "kv_heads": 8, "head_width": 128, "hidden": 8192, "context": 4096},
    "7b": {"layers": 32, "heads": 32, "kv_heads": 32, "head_width": 128, "hidden": 11008, "context": 4096},
}
"""By what they roughly hold besides the embeddings, in parameters."""


def dims(*, vocabulary: int = VOCABULARY, preset: str = "tiny", **given: Any) -> Dims:
    """The model's sizes: the preset's, but for those that were given; ValueError if they don't fit together."""
    known = {**PRESETS[preset], **{name: given[name] for name in PRESETS["tiny"] if given.get(name) is not None}}
    if given.get("kv_heads") is None and given.get("heads") is not None:
        known["kv_heads"] = known["heads"]
    if given.get("hidden") is None and (given.get("heads") is not None or given.get("head_width") is not None):
        known["hidden"] = -(-known["heads"] * known["head_width"] * 8 // 3 // 16) * 16
    if known["heads"] % known["kv_heads"]:
        fits = [count for count in range(1, known["heads"] + 1) if known["heads"] % count == 0]
        raise ValueError(f"kv_heads {known['kv_heads']} does not divide {known['heads']} heads. Take one of {fits}.")
    return Dims(
        width=known["heads"] * known["head_width"],
        vocabulary=vocabulary,
        tied=bool(given.get("tied")),
        dropout=float(given.get("dropout") or 0.0),
        **known,
    )


def build(
    data: Path,
    *,
    preset: Annotated[
        Literal["tiny", "1m", "10m", "125m", "350m", "1b", "3b", "7b"], "Sizes that go together; the rest overrides."
    ] = "tiny",
    layers: Annotated[int | None, "1..128", "Transformer blocks."] = None,
    heads: Annotated[int | None, "1..128", "Attention heads a block."] = None,
    kv_heads: Annotated[int | None, "1..128", "Heads of keys and values; fewer than heads: grouped queries."] = None,
    head_width: Annotated[int | None, "8..256", "Of each head, even; the model is heads × head_width wide."] = None,
    hidden: Annotated[int | None, "8..65536", "Width of the gated network in each block."] = None,
    context: Annotated[int | None, "8..131072", "Tokens that the model sees at once."] = None,
    tied: Annotated[bool, "The output layer shares the embedding's weight."] = False,
    dropout: Annotated[float, "0..0.9", "Part of each block's output that is silenced in training."] = 0.0,
) -> Task:
    import torch

    from training.models.llama import Llama, initialise

    index = read_index(data)
    sizes = dims(
        vocabulary=index.tokenizer.vocabulary,
        preset=preset,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        hidden=hidden,
        context=context,
        tied=tied,
        dropout=dropout,
    )
    windows = {split: Windows(data, index, split, sizes.context) for split in SPLITS}

    def batch(split: Split, ids: Ids) -> Batch:
        tokens = torch.from_numpy(windows[split][ids])
        return tokens[:, :-1], tokens[:, 1:]

    with torch.device("meta"):  # its memory comes once it is cut
        model = Llama(sizes)
    return Task(
        model=model,
        initialise=lambda name, tensor, generator: initialise(sizes, name, tensor, generator),
        samples={split: len(found) for split, found in windows.items()},
        batch=batch,
        loss=_loss,
        score=lambda model, batch: {"loss": _loss(model, batch)},
        inputs=lambda batch: batch[0],
        unit="tokens",
        units_per_sample=sizes.context,
        dims=sizes,
        show=lambda batch: [_text(tokens, index.tokenizer.name) for tokens in batch[0].tolist()],
        by_shard=windows["train"].by_shard,
        facts={"data": data.name},
    )


def _text(tokens: list[int], tokenizer: str) -> str:
    """As it was written, or by number where only the tokenizer's own library could tell."""
    return bytes(tokens).decode(errors="replace") if tokenizer == "bytes" else " ".join(map(str, tokens))


def _loss(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Mean cross-entropy of each next token, in nats."""
    from torch.nn import functional

    inputs, targets = batch
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
