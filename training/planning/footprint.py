"""How much memory a rank needs, estimated from the model's sizes, the layout and the settings; numbers alone, no torch.

What is counted: weights and gradients in float32, AdamW's two moments, what is gathered or cast for the arithmetic,
what the forward pass keeps for the backward pass (Korthikanti et al., 2022, arXiv 2205.05198, for SwiGLU and rotary
positions), and the logits with their gradient. A test compares it with measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.dims import Dims
from training.shape import Shape
from training.units import size_text

FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What of a run decides its memory beside the layout."""

    parallelism: str
    micro_batch: int
    micro_batches: int
    """A step, of one rank."""
    dtype: str = "fp32"
    recompute: str = "none"
    reshard: bool = True
    """fsdp lets a block's parameters go after the forward pass."""
    offload: bool = False
    loss_parallel: bool = True
    schedule: str | None = None
    exchange_bytes: int = 0
    """For each number that is trained, of what replicas keep to become one model again (training/comm)."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one rank, at the step's peak."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Parameters brought together or cast for the arithmetic."""
    activations: int
    logits: int
    exchange: int = 0
    """What replicas keep to become one model again."""
    last: int = 0
    """What is there when the activations have gone: one block's, or what zero1 sends its new weights in."""
    keeps_gradients: bool = True
    """They lie beside the activations; else they come as those go, and the peak is at one end or the other."""

    @property
    def total(self) -> int:
        """The most that is there at once."""
        forward = self.activations + self.logits
        end = self.gradients + self.last
        both = max(forward + self.gradients, end) if self.keeps_gradients else max(forward, end)
        return self.weights + self.optimizer + self.exchange + self.gathered + both

    def __str__(self) -> str:
        """The total is less than the sum where gradients come as activations go, see `total`."""
        parts = ("weights", "gradients", "optimizer", "exchange", "gathered", "activations", "logits")
        listed = ", ".join(f"{part} {size_text(size)}" for part in parts if (size := getattr(self, part)))
        if self.last:
            listed += f", at the backward pass's end {size_text(self.last)}"
        return f"{size_text(self.total)} at once, of {listed}"


def footprint(dims: Dims, shape: Shape, settings: Settings) -> Footprint:
    """Of the rank that needs most: a pipeline's first stage keeps most micro-batches, its last has the logits."""
    bytes_each = FLOAT if settings.dtype == "fp32" else 2
    layers = -(-dims.layers // shape["pp"])
    ends = 2 if shape["pp"] == 1 and not dims.tied else 1
    block = dims.block_parameters // shape["tp"]
    parameters = layers * block + ends * dims.embedding_parameters // shape["tp"]
    parts = shape["shard"] * shape["cp"] if settings.parallelism == "fsdp" else 1
    mine = parameters // parts
    trained = 0 if dims.frozen else mine
    moments = trained // shape["dp"] if settings.parallelism == "zero1" else trained
    resident = 0 if settings.offload else FLOAT
    return Footprint(
        weights=mine * resident,
        gradients=trained * resident,
        optimizer=2 * moments * resident,
        gathered=_gathered(parameters, block, dims, shape, settings, bytes_each),
        activations=_activations(dims, shape, settings, layers, bytes_each),
        logits=_logits(dims, shape, settings),
        exchange=trained * settings.exchange_bytes,
        last=max(
            int(_tokens(dims, shape, settings) * _block(dims, shape, bytes_each, casts=parts == 1)),
            parameters * FLOAT if settings.parallelism == "zero1" else 0,
        ),
        # Buckets of ddp stay, and where there are several micro-batches the first one's gradients wait for the last's.
        keeps_gradients=shape["pp"] > 1 or settings.micro_batches > 1 or parts < shape["dp"] * shape["cp"],
    )


def _gathered(parameters: int, block: int, dims: Dims, shape: Shape, settings: Settings, bytes_each: int) -> int:
    ends = dims.embedding_parameters // shape["tp"] * (1 if dims.tied else 2)
    if settings.parallelism != "fsdp":
        return parameters * bytes_each if settings.dtype != "fp32" else 0
    if not settings.reshard:
        return parameters * bytes_each + block * FLOAT
    # The ends of the model stay gathered through the step; two blocks at a time, and one block's unreduced gradient.
    return (ends + 2 * block) * bytes_each + max(block, ends) * FLOAT


def _activations(dims: Dims, shape: Shape, settings: Settings, layers: int, bytes_each: int) -> int:
    tokens = _tokens(dims, shape, settings)
    whole = _block(dims, shape, bytes_each, casts=settings.parallelism != "fsdp")
    kept = {"none": whole, "selective": _products(dims, shape, bytes_each), "full": _stream(dims, shape)}
    again = {"none": 0.0, "selective": whole - kept["selective"], "full": whole}[settings.recompute]
    return int(tokens * (layers * kept[settings.recompute] * _in_flight(shape, settings) + again))


def _tokens(dims: Dims, shape: Shape, settings: Settings) -> int:
    """Of one micro-batch on one rank."""
    return settings.micro_batch * dims.context // shape["cp"]


def _block(dims: Dims, shape: Shape, bytes_each: int, *, casts: bool) -> float:
    """A token's, of one block: the stream and its norms, query, key and value as they are and turned, the network's.

    `casts`: half precision comes from autocast, whose norms stay in float32.
    """
    attention = dims.head_width * (dims.heads + 2 * dims.kv_heads) / shape["tp"]
    turned = dims.head_width * (dims.heads + dims.kv_heads) / shape["tp"]
    mixed = dims.head_width * dims.heads / shape["tp"]
    network = 4 * dims.hidden / shape["tp"]
    normed = 2 * dims.width * bytes_each + (2 * dims.width * FLOAT if casts and bytes_each < FLOAT else 0)
    gathered = 0.0
    if shape["tp"] > 1:  # what enters attention and network, brought together from parts of the sequence
        gathered = 2 * dims.width
    if shape["cp"] > 1:  # keys and values of the whole context, and again for each head
        gathered += 2 * dims.head_width * (dims.heads + dims.kv_heads) / shape["tp"] * shape["cp"]
    rest = bytes_each * (attention + mixed + network + gathered)
    return 4 * _stream(dims, shape) + normed + rest + FLOAT * turned


def _products(dims: Dims, shape: Shape, bytes_each: int) -> float:
    attention = dims.head_width * (2 * dims.heads + 2 * dims.kv_heads) / shape["tp"]
    return _stream(dims, shape) + bytes_each * (attention + 2 * dims.hidden / shape["tp"] + 2 * dims.width)


def _stream(dims: Dims, shape: Shape) -> float:
    """A token's place in the stream between blocks, in float32; sequence parallelism divides it."""
    return FLOAT * dims.width / shape["tp"]


def _in_flight(shape: Shape, settings: Settings) -> float:
    """Micro-batches whose activations a first stage keeps at once."""
    if shape["pp"] == 1:
        return 1
    if settings.schedule in ("GPipe", "LoopedBFS"):
        return settings.micro_batches
    return min(settings.micro_batches, shape["pp"] * (1.0 if settings.schedule == "1F1B" else 1.5))


def _logits(dims: Dims, shape: Shape, settings: Settings) -> int:
    """As they come, normalised in float32, and their gradient."""
    tokens = _tokens(dims, shape, settings)
    parts = shape["tp"] if settings.loss_parallel else 1
    return tokens * dims.vocabulary // parts * (3 * FLOAT if settings.dtype == "fp32" else 2 + 2 * FLOAT + 2)
