"""A Llama-like decoder on text: by default on the bytes of Python's standard library, which every machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from training.config.dims import Dims
from training.config.shape import Misfit, Shape
from training.corpus import owners, preparing
from training.corpus.errors import DataError
from training.corpus.preparing import CorpusOptions, OnShardProgress
from training.corpus.shards import SPLITS, ShardIndex, read_index
from training.corpus.tokenizer import BYTES, TokenizerId
from training.corpus.windows import Windows, window_starts
from training.data import Batch, Ids, Labels, Prepared, Split, Task
from training.models.llama_sizes import PRESETS, VOCABULARY, llama_dims

if TYPE_CHECKING:
    from torch import Tensor

    from training.config.base import BaseRunConfig
    from training.weights.lora import Lora
    from training.weights.weight_files import Weights

PADDING = 1024
"""Maximum number of unused rows that an embedding may have, so that kernels or a mesh divide it."""
BOOKKEEPING = ("shards_folder",)
"""Options that do not affect the computed numbers: a resume may change them."""
LABELS = 1000
"""With more owners than this, a split uses owners only, not labels."""
ADAPTERS = ("lora", "ffa_lora", "scl")
"""Adapters that a federation may train in addition to its weights."""
FIRST = ("preset", "context", "source", "tokenizer", "from_weights", "lora_rank")
"""Options that most runs set, in the order in which a form shows them: model, data, fine-tuning."""


def prepare(
    cache: Path,
    identity: str | None = None,
    report_progress: OnShardProgress = lambda progress: None,
    *,
    source: Annotated[
        str,
        "stdlib or a path",
        "What to train on: stdlib (the sources of Python's standard library), or the path of a file or folder of "
        "texts, JSON lines (.jsonl, .jsonl.gz) or token shards, which the nodes can access.",
    ] = "stdlib",
    tokenizer: Annotated[
        str,
        "auto, bytes or a path",
        "bytes, or the path of a Hugging Face tokenizer.json; auto: bytes, or the tokenizer of the token shards.",
    ] = "auto",
    suffixes: Annotated[str, "Endings of text files in a folder; .jsonl is always read."] = ".txt .md",
    text_field: Annotated[str, "Name of the text field in each object of JSON lines."] = "text",
    validation_percent: Annotated[float, "0.01..50", "Percentage of the text that is used for validation."] = 5.0,
    shards_folder: Annotated[
        str, "auto or a path", "Where tokens are stored for later runs: auto (next to the runs), or a folder."
    ] = "auto",
) -> Prepared:
    """Return the tokens on disk, made on first use. `identity`: the exact data that a checkpoint was trained on."""
    options = CorpusOptions(source, tokenizer, suffixes, text_field, validation_percent)
    folder = cache if shards_folder == "auto" else Path(shards_folder).expanduser()
    return preparing.prepare(folder, options, identity, report_progress)


def labels(data: Path, *, preset: str = "tiny", context: int | None = None) -> Labels:
    """Return the owner of each sample.

    A package or module of the standard library, else a top-level entry of the source.
    """
    index = read_index(data)
    context = context or PRESETS[preset]["context"]
    found = owners.read(data, index)
    if found is None:
        unlabelled: dict[Split, Ids] = {split: np.zeros_like(window_starts(index, split, context)) for split in SPLITS}
        return Labels(unlabelled, ("text",), unowned=_missing_owners(data))
    by_owner = {split: found.for_windows(index, split, context) for split in SPLITS}
    if len(found.names) > LABELS:
        return Labels({split: found * 0 for split, found in by_owner.items()}, ("text",), by_owner, tuple(found.names))
    return Labels(by_owner, tuple(found.names), by_owner, tuple(found.names))


def _missing_owners(data: Path) -> str:
    return (
        f"{data / owners.FILE}, which lists the owners of the tokens, is missing: the tokens were made by an older "
        'version or another program. Create them again from the texts (remove a cached folder), or write "iid".'
    )


def has_owners(**options: object) -> bool:
    """Return True: whether there are owners is known once the data is read."""
    return True


def knows_sizes(**given: Any) -> bool:
    """Return whether the options determine `dims`; otherwise the initial weights do, on the nodes."""
    return given.get("from_weights", "none") == "none" or given.get("layers") is not None


def dims(*, vocabulary: int | None = None, **options: Any) -> Dims:
    """Return the model's sizes. Raises ValueError if they do not fit together."""
    return llama_dims(vocabulary=VOCABULARY if vocabulary is None and _is_bytes(options) else vocabulary, **options)


def _is_bytes(given: Mapping[str, Any]) -> bool:
    """Return whether the tokens can only be bytes; token shards may have been made with any tokenizer."""
    tokenizer = given.get("tokenizer", "auto")
    return bool(tokenizer == "bytes") or bool(tokenizer == "auto" and given.get("source", "stdlib") == "stdlib")


def check(config: BaseRunConfig, shape: Shape) -> Iterator[Misfit]:
    """Yield what cannot work together, as far as that is known without opening a file."""
    options = config.recipe_options()
    if options.get("lora_rank"):
        from training.weights import lora

        for field, message in lora.problems(config, shape):
            yield Misfit(field, message)


def resolve_options(path: Path, **options: Any) -> dict[str, Any]:
    """Return the options as determined by the weights at `path`.

    Raises DataError, naming the option, if they contradict.
    """
    from training.weights.llama import SIZES, sizes_of
    from training.weights.weight_files import open_weights, weights_error

    weights = open_weights(path)
    found = sizes_of(weights)
    given = {name: options[name] for name in SIZES if options.get(name) not in (None, False)}
    if options.get("preset", "tiny") != "tiny":
        given = {**{name: size for name, size in PRESETS[options["preset"]].items() if name in SIZES}, **given}
    for name, value in given.items():
        if value != found[name]:
            option = name if options.get(name) == value else "preset"
            raise weights_error(
                f"makes {name} {value}, but the weights in {path} have {found[name]}. Leave it out.", option
            )
    limit = (weights.config or {}).get("max_position_embeddings")
    context = options.get("context") or found["context"]
    if isinstance(limit, int) and context > limit:
        raise weights_error(
            f"is {context}, but the weights in {path} support {limit} positions. Take at most {limit}.", "context"
        )
    # Our own export states the context that its run used, which is not a limit.
    meant_for = options.get("max_context") or max(context, found["max_context"])
    return {**options, **{name: found[name] for name in SIZES}, "context": context, "max_context": meant_for}


def weights(path: Path, data: Path) -> Callable[[str], Tensor | None]:
    """Return a function from a parameter's name to the whole tensor, mapped, or to None for an adapter's.

    Raises DataError if the data's tokens are not those of the weights.
    """
    from training.weights.llama import reader
    from training.weights.lora import base_name, is_adapter
    from training.weights.weight_files import open_weights

    opened = open_weights(path)
    _check_tokens(opened, data)
    read = reader(opened)
    return lambda name: None if is_adapter(name) else read(base_name(name))


def _check_tokens(weights: Weights, data: Path) -> None:
    """Check that tokens have the same meaning for weights and data. Raises DataError.

    By the tokenizer.json next to the weights, or by the data of their run.
    """
    from training.weights import byte_tokenizer
    from training.weights.llama import reader
    from training.weights.weight_files import TOKENIZER, digest, weights_error

    tokenizer = read_index(data).tokenizer
    file = weights.path / TOKENIZER
    if weights.path.is_dir() and file.exists():
        expected = tokenizer.sha256 if tokenizer.name != BYTES else byte_tokenizer.sha256()
        if digest(file) != expected:
            message = f'is {tokenizer.label}, but the weights are for {file}. Write tokenizer = "{file}".'
            raise weights_error(message, "tokenizer")
        return
    trained_on = weights.metadata.get("data", "").split("+")
    if len(trained_on) == 3:
        # Only the digest in a label counts: a tokenizer.json may be in another folder, under another name.
        if _digest_of(trained_on[1]) != _digest_of(tokenizer.label):
            raise weights_error(
                f"is {tokenizer.label}, but the weights in {weights.path} are for {trained_on[1]}.", "tokenizer"
            )
        return
    rows = reader(weights)("tokens.weight").shape[0]
    if rows > tokenizer.vocabulary + PADDING:
        message = (
            f"is {tokenizer.label}, of {tokenizer.vocabulary} tokens, but the weights in {weights.path} have {rows}."
        )
        raise weights_error(message, "tokenizer")


def _digest_of(label: str) -> str:
    return label.rpartition("-")[2]


@dataclass(frozen=True)
class LanguageOptions:
    """The options of a run that determine its model; `prepare` takes those of the data."""

    preset: Annotated[
        Literal["tiny", "1m", "10m", "125m", "350m", "1b", "3b", "7b"],
        "Predefined sizes; other options override them.",
    ] = "tiny"
    layers: Annotated[int | None, "1..128", "Transformer blocks."] = None
    heads: Annotated[int | None, "1..128", "Attention heads per block."] = None
    kv_heads: Annotated[int | None, "1..128", "Key-value heads; fewer than heads: grouped-query attention."] = None
    head_width: Annotated[int | None, "8..256", "Width of a head, even; the model is heads × head_width wide."] = None
    hidden: Annotated[int | None, "8..65536", "Width of the feed-forward network in each block."] = None
    context: Annotated[int | None, "8..131072", "Context length in tokens."] = None
    tied: Annotated[bool, "The output layer shares the embedding's weight."] = False
    dropout: Annotated[float, "0..0.9", "Dropout rate of each block's output."] = 0.0
    vocabulary: Annotated[
        int | None, "2..1048576", "Rows of the embedding; default: as many as the tokenizer has tokens."
    ] = None
    rope_base: Annotated[float | None, "1..1e9", "Base of the rotary positions' wavelengths; default: 10,000."] = None
    rope_factor: Annotated[
        float | None,
        "1..1024",
        "Position scaling as in Llama 3.1: long waves are slowed down by this factor; default: no scaling.",
    ] = None
    rope_low_freq_factor: Annotated[
        float | None, "0.001..1024", "Waves longer than rope_original_context / this are long; default: 1."
    ] = None
    rope_high_freq_factor: Annotated[
        float | None, "0.001..1024", "Waves shorter than rope_original_context / this are not scaled; default: 4."
    ] = None
    rope_original_context: Annotated[int | None, "1..", "Context length before position scaling; default: 8,192."] = (
        None
    )
    max_context: Annotated[
        int | None,
        "1..",
        "Context length that the model is meant for, written into exports; default: from weights or position scaling, "
        "or context.",
    ] = None
    norm_epsilon: Annotated[float | None, "1e-12..0.1", "ε of the RMS norms; default: 1e-5."] = None
    from_weights: Annotated[
        str,
        "none or a path",
        "Start from these weights: a Llama folder from Hugging Face, or a file that `export` made. The sizes "
        "come with them.",
    ] = "none"
    lora_rank: Annotated[
        int, "0..1024", "Train LoRA adapters of this rank, with frozen weights; 0: train all weights."
    ] = 0
    lora_alpha: Annotated[float | None, "0.001..10000", "Adapters scale by alpha / rank; default: twice the rank."] = (
        None
    )
    lora_dropout: Annotated[float, "0..0.9", "Dropout rate of the adapters' inputs."] = 0.0
    lora_targets: Annotated[
        str, "Matrices of each block that get an adapter: query, key, value, out, gate, up, down; or all."
    ] = "query value"


def build(data: Path, options: LanguageOptions) -> Task:
    """Return a Llama of these sizes on the tokens in `data`; with a `lora_rank`, its adapters are what is trained."""
    from training.weights import lora

    index = read_index(data)
    sizes = dims(**{**asdict(options), "vocabulary": _rows(options.vocabulary, index.tokenizer)})
    adapters = None
    if options.lora_rank:
        adapters = lora.Lora.parse(options.lora_rank, options.lora_alpha, options.lora_dropout, options.lora_targets)
    return _task(data, index, sizes, adapters)


def _rows(vocabulary: int | None, tokenizer: TokenizerId) -> int:
    """Return the rows of the embedding: as configured, or as many as there are tokens.

    Raises DataError if there are too few.
    """
    if vocabulary is not None and vocabulary < tokenizer.vocabulary:
        raise DataError(f"is {vocabulary}, but {tokenizer.label} has {tokenizer.vocabulary} tokens.", "vocabulary")
    return vocabulary or tokenizer.vocabulary


def _task(data: Path, index: ShardIndex, sizes: Dims, adapters: Lora | None) -> Task:
    """Return the model, without memory, and functions that read, score and show its samples."""
    import torch

    from training.models.llama import Llama, initialise
    from training.weights import lora

    windows = {split: Windows(data, index, split, sizes.context) for split in SPLITS}

    def batch(split: Split, ids: Ids) -> Batch:
        tokens = torch.from_numpy(windows[split][ids])
        return tokens[:, :-1], tokens[:, 1:]

    with torch.device("meta"):  # memory is allocated once the model is split
        model = Llama(sizes)
        if adapters is not None:
            lora.add(model, adapters)

    def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if lora.is_adapter(name):
            lora.initialise(name, tensor, generator)
        else:
            initialise(sizes, name, tensor, generator)

    return Task(
        model=model,
        initialise=fill,
        samples={split: len(found) for split, found in windows.items()},
        batch=batch,
        loss=_loss,
        score=lambda model, batch: {"loss": _loss(model, batch)},
        score_samples=_loss_per_sample,
        inputs=lambda batch: batch[0],
        unit="tokens",
        units_per_sample=sizes.context,
        dims=sizes,
        show=lambda batch: [_text(tokens, index.tokenizer.name) for tokens in batch[0].tolist()],
        by_shard=windows["train"].by_shard,
        facts={"data": data.name},
    )


def _text(tokens: list[int], tokenizer: str) -> str:
    """Return the text of tokens, or their numbers if only the tokenizer's library can decode them."""
    return bytes(tokens).decode(errors="replace") if tokenizer == "bytes" else " ".join(map(str, tokens))


def _loss(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Return the mean cross-entropy of each next token, in nats."""
    from torch.nn import functional

    inputs, targets = batch
    return functional.cross_entropy(_logits(model, inputs), targets.flatten())


def _loss_per_sample(model: Callable[..., Tensor], batch: Batch) -> dict[str, Tensor]:
    """Return the mean loss of each sample over its tokens."""
    from torch.nn import functional

    inputs, targets = batch
    losses = functional.cross_entropy(_logits(model, inputs), targets.flatten(), reduction="none")
    return {"loss": losses.view(targets.shape).mean(dim=1)}


def _logits(model: Callable[..., Tensor], inputs: Tensor) -> Tensor:
    """Return logits (tokens, vocabulary).

    A GPU's autocast, unlike a CPU's, would leave the softmax in half precision.
    """
    logits = model(inputs).flatten(0, 1)
    return logits if logits.dtype.itemsize > 2 else logits.float()
