"""How much memory a rank needs, estimated from the model's sizes, the layout and the settings; numbers alone, no torch.

What is counted: weights and gradients in float32, AdamW's two moments, what is gathered or cast for the arithmetic,
what the forward pass keeps for the backward pass (Korthikanti et al., 2022, arXiv 2205.05198, for SwiGLU and rotary
positions), and the logits with their gradient. The peak is at the loss, at the first block that goes backward, or at
the end of it. Tests compare it with measured peaks on CPUs, and with published ones of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.config.dims import Dims
from training.config.shape import Shape
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
    compile: bool = False
    """The loss, too, but in a pipeline."""
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
    """What the forward pass keeps of all blocks."""
    logits: int
    """They and what their gradient takes, while no block goes backward yet."""
    again: int = 0
    """Of one block, computed again in its backward pass."""
    unreduced: int = 0
    """Whole gradients that wait to be divided among shards."""
    exchange: int = 0
    """What replicas keep to become one model again."""
    last: int = 0
    """What is there when the activations have gone: one block's, or what zero1 sends its new weights in."""
    keeps_gradients: bool = True
    """They lie beside the activations; else they come as those go, and the peak is at one end or the other."""

    @property
    def total(self) -> int:
        """The most that is there at once: at the loss, at the first block backward, or at the last."""
        beside = self.gradients if self.keeps_gradients else 0
        loss = self.activations + self.logits + beside
        first = self.activations + self.again + self.unreduced + beside
        end = self.gradients + self.unreduced + self.last
        return self.weights + self.optimizer + self.exchange + self.gathered + max(loss, first, end)

    def __str__(self) -> str:
        """The total is less than the sum, for not all of it is there at once, see `total`."""
        parts = ("weights", "gradients", "optimizer", "exchange", "gathered", "activations", "logits")
        listed = ", ".join(f"{part} {size_text(size)}" for part in parts if (size := getattr(self, part)))
        moments = {
            "one block computed again": self.again,
            "gradients not yet divided": self.unreduced,
            "at the backward pass's end": self.last,
        }
        listed += "".join(f", {when} {size_text(size)}" for when, size in moments.items() if size)
        return f"{size_text(self.total)} at once, of {listed}"


def footprint(dims: Dims, shape: Shape, settings: Settings) -> Footprint:
    """Of the rank that needs most: a pipeline's first stage keeps most micro-batches, its last has the logits."""
    bytes_each = _bytes_each(settings)
    layers = -(-dims.layers // shape["pp"])
    ends = 2 if shape["pp"] == 1 and not dims.tied else 1
    block = dims.block_parameters // shape["tp"]
    parameters = layers * block + ends * dims.embedding_parameters // shape["tp"]
    parts = shape["shard"] * shape["cp"] if settings.parallelism == "fsdp" else 1
    mine = parameters // parts
    trained = 0 if dims.frozen else mine
    moments = trained // shape["dp"] if settings.parallelism == "zero1" else trained
    resident = 0 if settings.offload else FLOAT
    tokens = _tokens(dims, shape, settings)
    kept, again = _kept_and_again(dims, shape, settings)
    return Footprint(
        weights=mine * resident,
        gradients=trained * resident,
        optimizer=2 * moments * resident,
        gathered=_gathered(parameters, block, dims, shape, settings, bytes_each),
        activations=int(tokens * layers * kept * _in_flight(shape, settings)),
        again=int(tokens * again),
        unreduced=_unreduced(block, dims, shape, settings),
        logits=_logits(dims, shape, settings),
        exchange=trained * settings.exchange_bytes,
        last=max(
            int(tokens * _block(dims, shape, settings)),
            parameters * FLOAT if settings.parallelism == "zero1" else 0,
        ),
        # Buckets of ddp stay, and where there are several micro-batches the first one's gradients wait for the last's.
        # What goes of fsdp's activations is no room for gradients: a GPU's allocator finds it in pieces.
        keeps_gradients=settings.parallelism == "fsdp"
        or shape["pp"] > 1
        or settings.micro_batches > 1
        or shape["dp"] * shape["cp"] > 1,
    )


def _gathered(parameters: int, block: int, dims: Dims, shape: Shape, settings: Settings, bytes_each: int) -> int:
    ends = dims.embedding_parameters // shape["tp"] * (1 if dims.tied else 2)
    if settings.parallelism != "fsdp":
        return parameters * bytes_each if settings.dtype != "fp32" else 0
    if not settings.reshard:
        return parameters * bytes_each
    # The ends of the model stay gathered through the step; two blocks at a time.
    return (ends + 2 * block) * bytes_each


def _unreduced(block: int, dims: Dims, shape: Shape, settings: Settings) -> int:
    """Of one block at a time, and of both ends together; where blocks stay gathered the ends' go with the others'."""
    if settings.parallelism != "fsdp":
        return 0
    ends = dims.embedding_parameters // shape["tp"] * (1 if dims.tied else 2)
    return (max(block, ends) if settings.reshard else block) * FLOAT


def _kept_and_again(dims: Dims, shape: Shape, settings: Settings) -> tuple[float, float]:
    """A token's, of one block: what the forward pass keeps, and what comes again in the backward pass."""
    whole = _block(dims, shape, settings)
    if settings.recompute == "none":
        return whole, 0.0
    kept = _stream(dims, shape, settings) if settings.recompute == "full" else _products(dims, shape, settings)
    return kept, whole - kept if settings.recompute == "selective" else whole


def _bytes_each(settings: Settings) -> int:
    return FLOAT if settings.dtype == "fp32" else 2


def _casts(settings: Settings) -> bool:
    """Half precision comes from autocast, which leaves the stream and its norms in float32; fsdp casts the weights."""
    return settings.parallelism != "fsdp" and settings.dtype != "fp32"


def _tokens(dims: Dims, shape: Shape, settings: Settings) -> int:
    """Of one micro-batch on one rank."""
    return settings.micro_batch * dims.context // shape["cp"]


def _block(dims: Dims, shape: Shape, settings: Settings) -> float:
    """A token's, of one block: the stream and its norms, query, key and value as they are and turned, the network's."""
    bytes_each = _bytes_each(settings)
    attention = dims.head_width * (dims.heads + 2 * dims.kv_heads) / shape["tp"]
    turned = dims.head_width * (dims.heads + dims.kv_heads) / shape["tp"]
    mixed = dims.head_width * dims.heads / shape["tp"]
    network = 4 * dims.hidden / shape["tp"]
    normed = 2 * dims.width * bytes_each + (2 * dims.width * FLOAT if _casts(settings) else 0)
    gathered = 0.0
    if shape["tp"] > 1:  # what enters attention and network, brought together from parts of the sequence
        gathered = 2 * dims.width
    if shape["cp"] > 1:  # keys and values of the whole context, and again for each head
        gathered += 2 * dims.head_width * (dims.heads + dims.kv_heads) / shape["tp"] * shape["cp"]
    rest = bytes_each * (attention + mixed + network + gathered)
    return 4 * _stream(dims, shape, settings) + normed + rest + FLOAT * turned


def _products(dims: Dims, shape: Shape, settings: Settings) -> float:
    """All products of a block, and its attention's result, with its input."""
    attention = dims.head_width * (2 * dims.heads + 2 * dims.kv_heads) / shape["tp"]
    return _stream(dims, shape, settings) + _bytes_each(settings) * (
        attention + 2 * dims.hidden / shape["tp"] + 2 * dims.width
    )


def _stream(dims: Dims, shape: Shape, settings: Settings) -> float:
    """A token's place in the stream between blocks; sequence parallelism divides it."""
    return (FLOAT if _casts(settings) else _bytes_each(settings)) * dims.width / shape["tp"]


def _in_flight(shape: Shape, settings: Settings) -> float:
    """Micro-batches whose activations a first stage keeps at once."""
    if shape["pp"] == 1:
        return 1
    if settings.schedule in ("GPipe", "LoopedBFS"):
        return settings.micro_batches
    return min(settings.micro_batches, shape["pp"] * (1.0 if settings.schedule == "1F1B" else 1.5))


def _logits(dims: Dims, shape: Shape, settings: Settings) -> int:
    """As they come; in float32 normalised, and the gradients of both. A compiled loss writes nothing in float32.

    Those of half precision have gone by then, but what a GPU's allocator had for them is no room for larger ones.
    """
    tokens = _tokens(dims, shape, settings)
    parts = shape["tp"] if settings.loss_parallel else 1
    each = _bytes_each(settings)
    if settings.compile and shape["pp"] == 1:
        return tokens * dims.vocabulary // parts * 2 * each
    return tokens * dims.vocabulary // parts * (3 * FLOAT + (each if each < FLOAT else 0))
