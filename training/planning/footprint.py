"""Estimate how much memory a rank needs, from the model's sizes, the layout and the settings; numbers alone, no torch.

Counted are weights and gradients in float32, AdamW's two moments, parameters gathered or cast for the arithmetic, what
the forward pass stores for the backward pass (Korthikanti et al., 2022, arXiv 2205.05198, for SwiGLU and rotary
positions), and the logits with their gradient. The peak is at the loss, at the first block of the backward pass, or at
its end. Tests compare the estimate with measured peaks on CPUs, and with published ones of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.config.dims import Dims
from training.config.shape import Shape
from training.units import size_text

FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """The settings that affect a run's memory, apart from the layout."""

    parallelism: str
    micro_batch: int
    micro_batches: int
    """Per step, on one rank."""
    dtype: str = "fp32"
    recompute: str = "none"
    reshard: bool = True
    """Whether fsdp frees a block's parameters after the forward pass."""
    offload: bool = False
    loss_parallel: bool = True
    compile: bool = False
    """Includes the loss, except in a pipeline."""
    schedule: str | None = None
    exchange_bytes: int = 0
    """Bytes per trained number that replicas store for their exchange (training/comm)."""


@dataclass(frozen=True, kw_only=True)
class MemoryFootprint:
    """Bytes that one rank needs at the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Parameters gathered or cast for the arithmetic."""
    activations: int
    """Stored by the forward pass of all blocks."""
    logits: int
    """Logits and their gradient, before the backward pass of the first block."""
    recomputed: int = 0
    """Recomputed activations of one block, in its backward pass."""
    unreduced: int = 0
    """Whole gradients that wait to be divided among shards."""
    exchange: int = 0
    """Stored by replicas for their exchange."""
    final: int = 0
    """At the end of the backward pass: one block's activations, or the buffer in which zero1 sends new weights."""
    keeps_gradients: bool = True
    """Whether gradients exist together with all activations; else they replace them, and the peak is at either end."""

    @property
    def total(self) -> int:
        """The peak: at the loss, at the first block of the backward pass, or at its last."""
        gradients = self.gradients if self.keeps_gradients else 0
        loss = self.activations + self.logits + gradients
        first = self.activations + self.recomputed + self.unreduced + gradients
        end = self.gradients + self.unreduced + self.final
        return self.weights + self.optimizer + self.exchange + self.gathered + max(loss, first, end)

    def __str__(self) -> str:
        """The total is less than the sum of the parts, as not all of them exist at the same time; see `total`."""
        parts = ("weights", "gradients", "optimizer", "exchange", "gathered", "activations", "logits")
        parts_text = ", ".join(f"{part} {size_text(size)}" for part in parts if (size := getattr(self, part)))
        moments = {
            "one recomputed block": self.recomputed,
            "gradients not yet divided": self.unreduced,
            "at the backward pass's end": self.final,
        }
        parts_text += "".join(f", {when} {size_text(size)}" for when, size in moments.items() if size)
        return f"{size_text(self.total)} at once, of {parts_text}"


def footprint(dims: Dims, shape: Shape, settings: MemorySettings) -> MemoryFootprint:
    """Return the memory footprint of the rank that needs most.

    In a pipeline that is a rank of the first stage (most micro-batches) or of the last (logits).
    """
    bytes_each = _bytes_each(settings)
    layers = -(-dims.layers // shape["pp"])
    ends = 2 if shape["pp"] == 1 and not dims.tied else 1
    block = dims.block_parameters // shape["tp"]
    parameters = layers * block + ends * dims.embedding_parameters // shape["tp"]
    parts = shape["shard"] * shape["cp"] if settings.parallelism == "fsdp" else 1
    own = parameters // parts
    trained = 0 if dims.frozen else own
    moments = trained // shape["dp"] if settings.parallelism == "zero1" else trained
    resident = 0 if settings.offload else FLOAT
    tokens = _tokens(dims, shape, settings)
    stored, recomputed = _stored_and_recomputed(dims, shape, settings)
    return MemoryFootprint(
        weights=own * resident,
        gradients=trained * resident,
        optimizer=2 * moments * resident,
        gathered=_gathered(parameters, block, dims, shape, settings, bytes_each),
        activations=int(tokens * layers * stored * _in_flight(shape, settings)),
        recomputed=int(tokens * recomputed),
        unreduced=_unreduced(block, dims, shape, settings),
        logits=_logits(dims, shape, settings),
        exchange=trained * settings.exchange_bytes,
        final=max(
            int(tokens * _block(dims, shape, settings)),
            parameters * FLOAT if settings.parallelism == "zero1" else 0,
        ),
        # ddp's buckets stay allocated, and with several micro-batches the first one's gradients wait for the last's.
        # Freed activations of fsdp make no room for gradients: a GPU's allocator finds them fragmented.
        keeps_gradients=settings.parallelism == "fsdp"
        or shape["pp"] > 1
        or settings.micro_batches > 1
        or shape["dp"] * shape["cp"] > 1,
    )


def _gathered(parameters: int, block: int, dims: Dims, shape: Shape, settings: MemorySettings, bytes_each: int) -> int:
    ends = dims.embedding_parameters // shape["tp"] * (1 if dims.tied else 2)
    if settings.parallelism != "fsdp":
        return parameters * bytes_each if settings.dtype != "fp32" else 0
    if not settings.reshard:
        return parameters * bytes_each
    # The ends of the model stay gathered throughout the step; blocks two at a time.
    return (ends + 2 * block) * bytes_each


def _unreduced(block: int, dims: Dims, shape: Shape, settings: MemorySettings) -> int:
    """Return the size of one block's gradients, or both ends'.

    Where blocks stay gathered, the ends' go with the others'.
    """
    if settings.parallelism != "fsdp":
        return 0
    ends = dims.embedding_parameters // shape["tp"] * (1 if dims.tied else 2)
    return (max(block, ends) if settings.reshard else block) * FLOAT


def _stored_and_recomputed(dims: Dims, shape: Shape, settings: MemorySettings) -> tuple[float, float]:
    """Return bytes per token and block: stored by the forward pass, and recomputed in the backward pass."""
    whole = _block(dims, shape, settings)
    if settings.recompute == "none":
        return whole, 0.0
    stored = _stream(dims, shape, settings) if settings.recompute == "full" else _products(dims, shape, settings)
    return stored, whole - stored if settings.recompute == "selective" else whole


def _bytes_each(settings: MemorySettings) -> int:
    return FLOAT if settings.dtype == "fp32" else 2


def _casts(settings: MemorySettings) -> bool:
    """Return whether autocast is used, which leaves the residual stream and its norms in float32.

    fsdp casts the weights.
    """
    return settings.parallelism != "fsdp" and settings.dtype != "fp32"


def _tokens(dims: Dims, shape: Shape, settings: MemorySettings) -> int:
    """Return the tokens of one micro-batch on one rank."""
    return settings.micro_batch * dims.context // shape["cp"]


def _block(dims: Dims, shape: Shape, settings: MemorySettings) -> float:
    """Return bytes per token of one block's activations.

    The residual stream and its norms, query, key and value before and after rotation, and the feed-forward network's.
    """
    bytes_each = _bytes_each(settings)
    attention = dims.head_width * (dims.heads + 2 * dims.kv_heads) / shape["tp"]
    turned = dims.head_width * (dims.heads + dims.kv_heads) / shape["tp"]
    mixed = dims.head_width * dims.heads / shape["tp"]
    network = 4 * dims.hidden / shape["tp"]
    normed = 2 * dims.width * bytes_each + (2 * dims.width * FLOAT if _casts(settings) else 0)
    gathered = 0.0
    if shape["tp"] > 1:  # inputs of attention and network, gathered from parts of the sequence
        gathered = 2 * dims.width
    if shape["cp"] > 1:  # keys and values of the whole context, and a further copy for each head
        gathered += 2 * dims.head_width * (dims.heads + dims.kv_heads) / shape["tp"] * shape["cp"]
    rest = bytes_each * (attention + mixed + network + gathered)
    return 4 * _stream(dims, shape, settings) + normed + rest + FLOAT * turned


def _products(dims: Dims, shape: Shape, settings: MemorySettings) -> float:
    """Return bytes per token of a block's matrix products and attention output, with its input."""
    attention = dims.head_width * (2 * dims.heads + 2 * dims.kv_heads) / shape["tp"]
    return _stream(dims, shape, settings) + _bytes_each(settings) * (
        attention + 2 * dims.hidden / shape["tp"] + 2 * dims.width
    )


def _stream(dims: Dims, shape: Shape, settings: MemorySettings) -> float:
    """Return bytes per token of the residual stream between blocks; sequence parallelism divides it."""
    return (FLOAT if _casts(settings) else _bytes_each(settings)) * dims.width / shape["tp"]


def _in_flight(shape: Shape, settings: MemorySettings) -> float:
    """Return how many micro-batches' activations the first stage stores at once."""
    if shape["pp"] == 1:
        return 1
    if settings.schedule in ("GPipe", "LoopedBFS"):
        return settings.micro_batches
    return min(settings.micro_batches, shape["pp"] * (1.0 if settings.schedule == "1F1B" else 1.5))


def _logits(dims: Dims, shape: Shape, settings: MemorySettings) -> int:
    """Return the size of the logits, also normalised in float32, and of both gradients; compiled without float32.

    Logits in half precision are freed by then, but a GPU's allocator cannot reuse their memory for larger tensors.
    """
    tokens = _tokens(dims, shape, settings)
    parts = shape["tp"] if settings.loss_parallel else 1
    bytes_each = _bytes_each(settings)
    if settings.compile and shape["pp"] == 1:
        return tokens * dims.vocabulary // parts * 2 * bytes_each
    return tokens * dims.vocabulary // parts * (3 * FLOAT + (bytes_each if bytes_each < FLOAT else 0))
