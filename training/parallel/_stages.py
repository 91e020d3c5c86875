"""A rank's stages of a pipeline, and how micro-batches pass through all ranks' stages."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from training.data import Batch, Task
from training.step.arithmetic import MicroBatch, seed_model


def split_into_stages(model: nn.Module, numbers: Sequence[int], count: int) -> list[nn.Module]:
    """Return the stages with these numbers, of `count` in total.

    Blocks are divided evenly, the first stages get the rest.
    """
    blocks = len(model.blocks)  # type: ignore[arg-type]
    edges = [number * (blocks // count) + min(number, blocks % count) for number in range(count + 1)]
    stages = []
    for number in numbers:
        stage: Any = copy.deepcopy(model)
        stage.keep_blocks(range(edges[number], edges[number + 1]), first=number == 0, last=number == count - 1)
        stages.append(stage)
    return stages


class Pipeline(nn.Module):
    """A rank's stages of the model.

    Its parts are replaced in place by parallelisms that are applied after the split.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        numbers: Sequence[int],
        ranks: Sequence[int],
        *,
        group: dist.ProcessGroup,
        schedule: str,
    ) -> None:
        """`numbers`: this rank's stages; `ranks`: by stage, the rank in the group that has it."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._numbers, self._ranks, self._group = list(numbers), list(ranks), group
        self._count = len(ranks)
        self._schedule_class = get_schedule_class(schedule)
        self._schedules: dict[int, PipelineScheduleSingle | PipelineScheduleMulti] = {}
        self._task: Task | None = None
        self._micro_batches: Sequence[MicroBatch] = ()
        self._losses: list[Tensor] = []
        self._hooks: list[_Seeding] = []

    def forward_backward(self, task: Task, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Compute gradients in the parts' parameters.

        Return the mean loss of this pipeline's samples, on all of its ranks.
        """
        schedule = self._schedule(len(micro_batches), micro_batches[0].batch[0].device)
        self._task, self._micro_batches, self._losses = task, micro_batches, []
        for hook in self._hooks:
            hook.begin(micro_batches)
        own_rank = dist.get_rank(self._group)
        arguments = []
        if own_rank == self._ranks[0]:
            assert task.inputs is not None
            arguments = [torch.cat([task.inputs(micro.batch) for micro in micro_batches])]
        target = torch.arange(len(micro_batches)) if own_rank == self._ranks[-1] else None
        schedule.step(*arguments, target=target, return_outputs=False)
        loss = torch.stack(self._losses).sum() if self._losses else self._zero(micro_batches)
        return self._broadcast_from_last_stage(loss)

    @torch.no_grad()
    def score(self, task: Task, batch: Batch) -> dict[str, Tensor]:
        """Run the stages one after the other: validation is short, and its batches may have any size."""
        assert task.inputs is not None
        stream: Tensor | None = task.inputs(batch)
        for number in range(self._count):
            if number in self._numbers:
                assert stream is not None
                stream = self.parts[self._numbers.index(number)](stream)
            stream = self._send_to_next_stage(stream, number, batch[0].device)
        result: list[Any] = [None]
        if stream is not None:
            logits: Tensor = stream
            result = [{name: mean.float().cpu() for name, mean in task.score(lambda _: logits, batch).items()}]
        dist.broadcast_object_list(result, group=self._group, group_src=self._ranks[-1], device=torch.device("cpu"))
        means: dict[str, Tensor] = result[0]
        return means

    def _send_to_next_stage(self, stream: Tensor | None, number: int, device: torch.device) -> Tensor | None:
        """Send the stream from the rank of this stage to the next one's; return it there, else None."""
        sender, receiver = self._ranks[number], self._ranks[min(number + 1, self._count - 1)]
        own_rank = dist.get_rank(self._group)
        if sender == receiver or own_rank not in (sender, receiver):
            return stream if own_rank == sender else None
        if own_rank == sender:
            assert stream is not None
            shape = torch.tensor([stream.dim(), *stream.shape, _DTYPES.index(stream.dtype)])
            dist.send(torch.nn.functional.pad(shape, (0, 8 - len(shape))), group=self._group, group_dst=receiver)
            dist.send(stream.contiguous(), group=self._group, group_dst=receiver)
            return None
        description = torch.empty(8, dtype=torch.int64)
        dist.recv(description, group=self._group, group_src=sender)
        rank, *rest = description.tolist()
        received = torch.empty(rest[:rank], dtype=_DTYPES[rest[rank]], device=device)
        dist.recv(received, group=self._group, group_src=sender)
        return received

    def _schedule(self, micro_batches: int, device: torch.device) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """Return the schedule.

        `device`: of the micro-batches; with offload, parameters are elsewhere until they are gathered.
        """
        if micro_batches not in self._schedules:
            self._hooks = [_Seeding(number) for number in self._numbers]
            for hook, part in zip(self._hooks, self.parts, strict=True):
                part.register_forward_pre_hook(hook)
            stages = [
                PipelineStage(part, number, self._count, device, group=self._group)
                for part, number in zip(self.parts, self._numbers, strict=True)
            ]
            single = issubclass(self._schedule_class, PipelineScheduleSingle)
            self._schedules[micro_batches] = self._schedule_class(
                stages[0] if single else stages, micro_batches, loss_fn=self._loss, scale_grads=False
            )
        return self._schedules[micro_batches]

    def _loss(self, outputs: Tensor, number: Tensor) -> Tensor:
        """Return the weighted loss of one micro-batch, on the last stage."""
        assert self._task is not None
        micro = self._micro_batches[int(number)]
        loss = self._task.loss(lambda _: outputs, micro.batch)
        self._losses.append(loss.detach() * micro.share)
        return loss * micro.weight

    def _zero(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        return torch.zeros((), device=micro_batches[0].batch[0].device)

    def _broadcast_from_last_stage(self, loss: Tensor) -> Tensor:
        whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        whole = whole.contiguous()
        dist.broadcast(whole, group=self._group, group_src=self._ranks[-1])
        return whole


class _Seeding:
    """Seeds a stage's forward pass with the micro-batch's own seed, whatever order the schedule uses."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._seeds: Iterator[int] = iter(())

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._seeds = iter([micro.seed + self._number for micro in micro_batches])
        self._device = micro_batches[0].batch[0].device

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        seed = next(self._seeds, None)
        if seed is not None:
            seed_model(seed, self._device)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
