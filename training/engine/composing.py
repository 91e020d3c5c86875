"""Build a task's model as the run's parallelisms require: split, filled with weights, wrapped, and ready to be trained.

Parallelisms that split the model come first: pipeline stages, then tensor and context parallelism. Then come its
weights (after the last one if that works without weights, as fsdp does), recomputation and compilation of its blocks,
and finally the parallelism over which the batch is divided. training.contracts defines what each parallelism
provides.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from training import contracts
from training.comm._exchange import Exchange, Peers
from training.config import mesh, shape
from training.config.run_config import RunConfig
from training.config.shape import Shape
from training.contracts import Parallelism
from training.data import Batch, Task
from training.engine import blocks, initialization
from training.runtime.distributed import World
from training.step import arithmetic, meshes
from training.step.arithmetic import MicroBatch
from training.step.optimizer import AdamW, Optimizer, local
from training.step.timing import BACKWARD, BOTH, StepTimer

T = TypeVar("T")


class ComposedModel:
    """One rank's part of the model, composed by the run's parallelisms, and the functions that run it."""

    def __init__(self, task: Task, config: RunConfig, world: World) -> None:
        self.task, self._config = task, config
        self.shape: Shape = mesh.shape_of(config, world.size)
        self.mesh: DeviceMesh = meshes.make(self.shape, world.device)
        self.watch = StepTimer(world.device)
        self._parallelisms = {name: contracts.parallelism(name) for name in mesh.active_modules(config, self.shape)}
        """The parallelisms by name, in the order in which they are applied."""
        self._options = {name: self._options_of(name, parallelism) for name, parallelism in self._parallelisms.items()}
        self.parts: list[nn.Module] = [task.model]
        """The pieces of the model on this rank, under their own names: one, or the stages of a pipeline."""
        self._whole: nn.Module = task.model
        """The callable: the model as the last parallelism left it, or a pipeline."""
        self.exchange: Exchange
        """What its replicas exchange to stay identical."""
        self._frozen = {
            name
            for name, parameter in task.model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
        }
        self._tied = initialization.tied_parameters(task.model)
        has_buffers = next(task.model.buffers(), None) is not None
        self._buffer_ranks = meshes.along(self.mesh, "dp", "shard", "cp") if has_buffers else None
        """The ranks with the same buffers, if there are any."""
        self._apply(world.device)
        self._autocast = None if "dtype" in self._options[config.parallelism] else _AUTOCAST.get(config.dtype)
        self._distributed_parameters = [
            parameter for _, parameter in self.named_parameters() if hasattr(parameter, "placements")
        ]
        parallelisms = self._parallelisms.values()
        self._forward_backward = _first(
            (parallelism.forward_backward for parallelism in parallelisms), arithmetic.forward_backward
        )
        self._score = _first((parallelism.score for parallelism in parallelisms), _score)
        self._timed = task if self.has_pipeline else self.watch.timed(self._fused(task))

    def forward_backward(self, micro_batches: Sequence[MicroBatch], *, alone: bool = False) -> Tensor:
        """Leave the gradient of the global batch's mean loss in the parameters; return this rank's own loss, a scalar.

        `alone`: where every rank has the whole model (ddp), do not average the gradient with the others'.
        """
        whole: Any = self._whole
        unreduced = whole.no_sync() if alone and hasattr(whole, "no_sync") else contextlib.nullcontext()
        with self._contexts(), unreduced:
            loss = self._forward_backward(self._timed, self._whole, micro_batches, self._data.no_sync)
        for parameter in self._distributed_parameters:
            _lay_out_gradient(parameter)
        if not alone:
            self._share_buffers()
        loss = whole_of(loss)
        self.watch.mark(BOTH if self.has_pipeline else BACKWARD)
        return loss

    def score(self, batch: Batch) -> dict[str, Tensor]:
        """Return the task's means over this rank's part of a batch."""
        with self._contexts():
            return {name: whole_of(mean) for name, mean in self._score(self.task, self._whole, batch).items()}

    def divide(self, batch: Batch) -> Batch:
        """Return this rank's part of each sample."""
        for parallelism in self._parallelisms.values():
            batch = parallelism.divide(batch, self.mesh)
        return batch

    @property
    def token_coordinates(self) -> tuple[int, ...]:
        """This rank's coordinates among those that share its samples but not their tokens: part of its seeds."""
        splitting = [
            n for n, parallelism in self._parallelisms.items() if parallelism.splits_tokens(**self._options[n])
        ]
        axes = [axis for name in splitting for axis in shape.axes_of(name) if self.shape[axis] > 1]
        return tuple(self.mesh.get_local_rank(axis) for axis in axes)

    def optimizer(self) -> Optimizer:
        parameters, decay = self.named_parameters(), self._config.weight_decay
        if self._data.optimizer is None:
            return AdamW(parameters, weight_decay=decay)
        return self._data.optimizer(parameters, self.mesh, weight_decay=decay)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from part.named_parameters()

    def state(self) -> dict[str, Tensor]:
        """Return trained parameters and buffers by their names in the whole model.

        A checkpoint saves them, or is read into them. Frozen parameters are left out: they are read from their source.
        """
        return {name: value for name, value in self.all_state().items() if name not in self._frozen}

    def all_state(self) -> dict[str, Tensor]:
        """Return parameters and buffers by their names in the whole model, including frozen ones."""
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def buffers(self) -> list[Tensor]:
        return [buffer for part in self.parts for buffer in part.buffers()]

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)

    @property
    def has_pipeline(self) -> bool:
        return self.shape["pp"] > 1

    @property
    def micro_batch(self) -> int:
        """Default samples per forward pass: this rank's whole share, or what the pipeline needs."""
        share = self.shape.share
        cuts = [
            parallelism.micro_batches(share, self.shape, **self._options[name])
            for name, parallelism in self._parallelisms.items()
        ]
        return -(-share // max(cuts))

    # Building the model.

    @property
    def _data(self) -> Parallelism:
        """The parallelism over which the batch is divided."""
        return self._parallelisms[self._config.parallelism]

    def _options_of(self, name: str, parallelism: Parallelism) -> dict[str, Any]:
        options: dict[str, Any] = self._config.options_of(name)
        if "dtype" in inspect.signature(parallelism.apply).parameters and options.get("dtype") is None:
            options["dtype"] = "bf16" if self._config.dtype == "fp8" else self._config.dtype
        return options

    def _apply(self, device: torch.device) -> None:
        *others, data = self._parallelisms
        if self._config.dtype == "fp8":
            dims = self.task.dims
            tokens = dims.context // self.shape["cp"] if dims else 1
            blocks.to_fp8(self.task.model, self._config, device, tokens=tokens)
        is_empty = self.task.initialise is not None
        if not is_empty:
            self.task.model.to(device)
        for name in others:
            self._wrap(name)
        for part in self.parts:
            initialization.tie(part, self._tied)
        if is_empty and not self._data.WITHOUT_WEIGHTS:
            self._fill(device)
            is_empty = False
        for part in self.parts:
            blocks.prepare(part, self._config)
        self.exchange = self._make_exchange()
        if self.exchange.bucket_mib is not None:
            self._options[data]["bucket_mib"] = self.exchange.bucket_mib
        if not self.exchange.has_independent_replicas:
            self._wrap(data)
        self.exchange.attach(self._whole)
        if is_empty:
            self._fill(device)

    def _make_exchange(self) -> Exchange:
        replicas = meshes.along(self.mesh, "dp")
        whole = dict(self.named_parameters())
        parameters = {name: part for name, part in whole.items() if part.requires_grad}
        peers = Peers(
            group=replicas.get_group() if replicas else None,
            steps=self._config.steps,
            parameters=parameters,
            frozen={name: part for name, part in whole.items() if name not in parameters},
            buffers={n: b for n, b in self.state().items() if n not in parameters and b.is_floating_point()},
            shape=self.shape,
            parallelism=self._config.parallelism,
            options=self._options[self._config.parallelism],
        )
        name = self._config.communication
        return contracts.communication(name).exchange(peers, **self._config.options_of(name))

    def _wrap(self, name: str) -> None:
        """Apply one parallelism: to the model, or to each stage that the pipeline has made of it."""
        apply = self._parallelisms[name].apply
        stages = getattr(self._whole, "parts", None) if self.has_pipeline else None
        if stages is None:
            self._whole = apply(self._whole, self.mesh, **self._options[name])
            if name == "pipeline":
                self.parts = list(self._whole.parts)  # type: ignore[arg-type]
            return
        for index, stage in enumerate(stages):
            stages[index] = apply(stage, self.mesh, **self._options[name])

    def _fill(self, device: torch.device) -> None:
        """Allocate every parameter and set its weights.

        They are read from disk, or derived from the run's seed and the parameter's name.
        """
        for part in self.parts:
            initialization.allocate(part, "cpu" if self._options[self._config.parallelism].get("offload") else device)
            initialization.tie(part, self._tied)
            for name, parameter in part.named_parameters():
                whole = initialization.whole_parameter(self.task, self._config.seed, name, parameter, device)
                with torch.no_grad():
                    local(parameter).copy_(part_of(whole, parameter))

    # Running the model.

    def _share_buffers(self) -> None:
        """Copy running means and the like from the first replica, as torch's ddp does before a pass.

        Here it happens after the pass, so that what is saved, validated or compared between steps is the same on any
        rank.
        """
        if self._buffer_ranks is None or self.exchange.has_independent_replicas:
            return
        for buffer in self.buffers():
            dist.broadcast(local(buffer), group=self._buffer_ranks.get_group(), group_src=0)

    def _fused(self, task: Task) -> Task:
        return blocks.fuse_loss(task) if self._config.compile and task.inputs is not None else task

    def _contexts(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        if self._autocast is not None:
            stack.enter_context(torch.autocast(self.mesh.device_type, self._autocast))
        for name, parallelism in self._parallelisms.items():
            stack.enter_context(parallelism.step_context(**self._options[name]))
        return stack


_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def whole_of(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _lay_out_gradient(parameter: Any) -> None:
    """Lay out a gradient like its parameter.

    Tensor parallelism leaves some gradients as partial sums, and that of a split embedding whole.
    """
    gradient = parameter.grad
    if gradient is not None and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, laid out like `like`."""
    if not hasattr(like, "placements"):
        return whole
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, like.device_mesh, like.placements)  # type: ignore[attr-defined]
    return whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


def _first(functions: Iterable[Callable[..., T] | None], default: Callable[..., T]) -> Callable[..., T]:
    return next((function for function in functions if function is not None), default)


def _score(task: Task, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return task.score(model, batch)
