"""Ranks that exchange made-up gradients in every way, each compared with its definition; no run, no checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

STEPS = 5


def rank(folder: Path, world: int, rank: int, names: list[str]) -> None:
    """Run the functions of these names in a separate process; each writes its result to `name.world.rank.json`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"{world}"), world), rank=rank, world_size=world)
    for name in names:
        try:
            act: Callable[[], dict[str, Any]] = globals()[name]
            found = act()
        except BaseException:
            found = {"error": traceback.format_exc()}
        (folder / f"{name}.{world}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


class Side:
    """The model of a rank, its communication, and the local gradients of all ranks."""

    def __init__(
        self,
        name: str,
        bucket_mib: float = 25.0,
        steps: int = 1000,
        width: int = 40,
        is_deep: bool = False,
        group: Any = None,
        **options: Any,
    ) -> None:
        """`group`: of the ranks that exchange; None: all."""
        import torch
        import torch.distributed as dist
        from torch import nn

        from training import contracts
        from training.comm._exchange import Peers
        from training.config.shape import Shape
        from training.parallel._replicated import replicate

        torch.manual_seed(0)
        group = group or dist.group.WORLD
        self.world, self.rank = group.size(), group.rank()
        self.model = nn.Sequential(nn.Linear(width, 30), nn.Tanh(), nn.Linear(30, 20))
        if is_deep:  # two matrices of one shape, another between them
            self.model.extend([nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 30)])
        self.parameters = dict(self.model.named_parameters())
        peers = Peers(group=group, steps=steps, parameters=self.parameters, shape=Shape({"dp": self.world}))
        self.exchange = contracts.communication(name).exchange(peers, **options)
        self.called: nn.Module = self.model
        if not self.exchange.has_independent_replicas:
            self.called = replicate(self.model, group, bucket_mib=self.exchange.bucket_mib or bucket_mib)
        self.exchange.attach(self.called)
        self.backward(-1)
        self.exchange.begin()

    def backward(self, step: int) -> dict[str, Any]:
        """Return the gradients after the exchange."""
        self._loss(self.called, step, self.rank).backward()
        found = {name: parameter.grad.clone() for name, parameter in self.parameters.items()}
        self.model.zero_grad()
        return found

    def gradients_of(self, step: int, rank: int) -> dict[str, Any]:
        """Return the gradients of one rank before the exchange."""
        import torch

        loss = self._loss(self.model, step, rank)
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        return dict(zip(self.parameters, gradients, strict=True))

    def everybodys(self, step: int) -> list[dict[str, Any]]:
        return [self.gradients_of(step, rank) for rank in range(self.world)]

    def _loss(self, model: Any, step: int, rank: int) -> Any:
        import torch

        generator = torch.Generator().manual_seed(1000 * (step + 1) + rank)
        inputs = torch.randn(8, next(iter(self.parameters.values())).shape[1], generator=generator)
        return model(inputs).square().mean() + model(inputs * 2).sum() / 100


def flat(gradients: dict[str, Any]) -> Any:
    import torch

    return torch.cat([gradient.reshape(-1) for gradient in gradients.values()])


def apart(found: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


def halved() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {}
    for name, kind in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        side = Side(name)
        shorts = [flat(gradients).to(kind) / side.world for gradients in side.everybodys(0)]
        expected = shorts[0].clone()
        for short in shorts[1:]:
            expected += short
        got = flat(side.backward(0))
        found[name] = {"apart": apart(got, expected.float()), "bytes": side.exchange.sent_bytes(1)}
        found[name]["elements"] = got.numel()
        found[name]["plain"] = apart(got, sum(map(flat, side.everybodys(0))) / side.world)
        found[name]["digest"] = got.double().sum().item().hex()
    return found


def sparse() -> dict[str, Any]:
    """Check one bucket exactly against the definition, and that several lose nothing."""
    import torch

    side = Side("topk", density=0.05)
    stored = [torch.zeros_like(flat(side.gradients_of(0, 0))) for _ in range(side.world)]
    found: dict[str, Any] = {"equal": [], "digests": []}
    for step in range(STEPS):
        expected = torch.zeros_like(stored[0])
        for rank, gradients in enumerate(side.everybodys(step)):
            stored[rank] += flat(gradients)
            places = stored[rank].abs().topk(-(-len(expected) * 5 // 100)).indices
            expected[places] += stored[rank][places]
            stored[rank][places] = 0
        got = flat(side.backward(step))
        found["equal"].append(torch.equal(got, expected / side.world))
        found["digests"].append(got.double().sum().item().hex())
    found["bytes"], found["elements"] = side.exchange.sent_bytes(1) / STEPS, len(expected)
    found["kept"] = torch.equal(flat(side.exchange.state()["kept"][str(side.rank)]), stored[side.rank])
    found["lost"] = _lost()
    return found


def _lost() -> float:
    import torch
    import torch.distributed as dist

    side = Side("topk", bucket_mib=0.1, width=2000, density=0.01)
    total = torch.zeros_like(flat(side.gradients_of(0, 0)))
    sent = torch.zeros_like(total)
    for step in range(3):
        total += sum(map(flat, side.everybodys(step)))
        sent += flat(side.backward(step)) * side.world
    stored = flat(side.exchange.state()["kept"][str(side.rank)])
    dist.all_reduce(stored)
    return apart(sent + stored, total)


def low_rank() -> dict[str, Any]:
    """Check plain exchange at first, and then that each step follows from the factors and errors of the one before."""
    deep = _low_rank(Side("powersgd", rank=2, plain_steps=2, is_deep=True))
    return {**_low_rank(Side("powersgd", rank=2, plain_steps=2)), "deep": deep["definition"]}


def _low_rank(side: Side) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {"plain": [], "definition": [], "digests": [], "bytes": []}
    for step in range(STEPS):
        before = {key: _cloned(value) for key, value in side.exchange.state().items() if key != "steps"}
        got = side.backward(step)
        found["bytes"].append(side.exchange.sent_bytes(1))
        found["digests"].append(flat(got).double().sum().item().hex())
        mean = sum(map(flat, side.everybodys(step))) / side.world
        if step < 2:
            found["plain"].append(apart(flat(got), mean))
        if step < 3:  # its factors are begun with random numbers
            continue
        for name, factor in before["factors"].items():
            matrix = side.gradients_of(step, side.rank)[name] + before["errors"][str(side.rank)][name]
            right, _ = torch.linalg.qr(factor)
            left = matrix @ right
            dist.all_reduce(left)
            left, _ = torch.linalg.qr(left)
            right = matrix.T @ left
            dist.all_reduce(right)
            sent = left @ (right / side.world).T
            error = side.exchange.state()["errors"][str(side.rank)][name]
            found["definition"] += [apart(got[name], sent), apart(error, matrix - sent)]
        found["rank"] = int(torch.linalg.matrix_rank(got["0.weight"], rtol=1e-4))
    return found


def skipped() -> dict[str, Any]:
    """Return what is not sent yet after a step that counts, and after one that does not."""
    import torch

    found: dict[str, Any] = {}
    for name, options in (("topk", {"density": 0.05}), ("powersgd", {"rank": 2, "plain_steps": 0})):
        side = Side(name, **options)
        left = [torch.zeros_like(flat(side.gradients_of(0, 0)))]
        for step, is_skipped in enumerate((True, False, True, False)):
            side.backward(step)
            side.exchange.step(step + 1, torch.tensor(float(is_skipped)))
            stored = side.exchange.state()["kept" if name == "topk" else "errors"][str(side.rank)]
            left.append(flat({parameter: stored[parameter].clone() for parameter in side.parameters}))
        found[name] = [torch.equal(before, after) for before, after in pairwise(left)]
    return found


def fewer() -> dict[str, Any]:
    """Drop half of the ranks, and return by item whether the state of the others is unchanged."""
    import torch
    import torch.distributed as dist

    half = list(range(dist.get_world_size() // 2))
    found: dict[str, Any] = {}
    for name, options in (("topk", {"density": 0.05}), ("powersgd", {"rank": 2, "plain_steps": 0})):
        before, group = Side(name, **options), dist.new_group(half)
        for step in range(STEPS):
            before.backward(step)
        stored = dict(_leaves(before.exchange.state()))
        if before.rank not in half:
            continue
        exchange = Side(name, group=group, **options).exchange

        def read(state: dict[str, Any], stored: dict[str, Any] = stored) -> None:
            for path, tensor in _leaves(state["comm"]):
                tensor.copy_(stored[path])

        exchange.restore(read, {}, {})
        state = _leaves(exchange.state())
        found[name] = {
            ".".join(path): [torch.equal(tensor, stored[path]), bool(tensor.any())] for path, tensor in state
        }
    return found


def _leaves(state: dict[str, Any]) -> list[tuple[Any, Any]]:
    from training.checkpoint.staging import walk

    return list(walk(state))


def _cloned(value: Any) -> Any:
    return {key: _cloned(inner) for key, inner in value.items()} if isinstance(value, dict) else value.clone()


def replicas() -> dict[str, Any]:
    """Check that with H = 1 and SGD inside, the outer optimizer steps on the mean gradient."""
    import torch

    found: dict[str, Any] = {}
    cases = {
        "local SGD": ("local_sgd", {"every": 1}, 1.0, 0.0),
        "outer SGD": ("diloco", {"every": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0}, 1.0, 0.0),
        "Nesterov": ("diloco", {"every": 1, "outer_learning_rate": 0.7, "outer_momentum": 0.9}, 0.7, 0.9),
    }
    for case, (name, options, rate, momentum) in cases.items():
        side = Side(name, **options)
        twins = [torch.nn.Parameter(part.detach().clone()) for part in side.parameters.values()]
        optimizer = torch.optim.SGD(twins, lr=0.05 * rate, momentum=momentum, nesterov=momentum > 0)
        for step in range(STEPS):
            for twin, gradient in zip(twins, _means(side, step).values(), strict=True):
                twin.grad = gradient
            _inner_step(side, step)
            side.exchange.step(step + 1)
            optimizer.step()
        ours = flat({name: part.detach() for name, part in side.parameters.items()})
        found[case] = {"apart": apart(ours, torch.cat([twin.detach().view(-1) for twin in twins]))}
        found[case]["digest"] = ours.double().sum().item().hex()
    found["alone"] = _alone()
    return found


def _means(side: Side, step: int) -> dict[str, Any]:
    everybodys = side.everybodys(step)
    return {name: sum(gradients[name] for gradients in everybodys) / side.world for name in side.parameters}


def _inner_step(side: Side, step: int) -> None:
    import torch

    gradients = side.gradients_of(step, side.rank)
    with torch.no_grad():
        for name, part in side.parameters.items():
            part -= 0.05 * gradients[name]


def _alone() -> dict[str, Any]:
    """Check that replicas differ between exchanges, and are the mean of all at one and after the run's last step."""
    import torch

    side = Side("local_sgd", every=3, steps=5)
    sent, digests = [], []
    for step in range(5):
        _inner_step(side, step)
        side.exchange.step(step + 1)
        sent.append(side.exchange.sent_bytes(1))
        whole = torch.cat([part.detach().view(-1) for part in side.parameters.values()])
        digests.append(whole.double().sum().item().hex())
    return {"sent": sent, "digests": digests, "elements": whole.numel()}


def computed() -> dict[str, Any]:
    """Return the bytes of a step of two passes by the layout's formula, and as really passed to torch's collectives."""
    import torch.distributed as dist

    world = dist.get_world_size()
    cases: list[tuple[dict[str, int], dict[str, Any]]] = [
        ({"shard": world}, {"reshard": "always"}),
        ({"shard": world}, {"reshard": "never"}),
        ({"shard": world}, {"dtype": "bf16"}),
    ]
    if world > 2:
        cases.append(({"dp": 2, "shard": world // 2}, {}))
    found = {f"{sizes} {options}": _computed(sizes, options) for sizes, options in cases}
    return {**found, "frozen": _computed({"shard": world}, {}, frozen=("first.weight", "blocks.0.weight"))}


def _computed(sizes: dict[str, int], options: dict[str, Any], frozen: tuple[str, ...] = ()) -> dict[str, float]:
    import torch
    from torch import nn

    from training import contracts
    from training.comm._exchange import Peers
    from training.config.shape import Shape
    from training.parallel import fsdp
    from training.step import meshes

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.blocks = nn.ModuleDict({"0": nn.Linear(16, 12), "1": nn.Linear(12, 7)})  # 7 rows divide over nothing

        def forward(self, inputs: Any) -> Any:
            return self.blocks["1"](self.blocks["0"](self.first(inputs)))

    shape, model = Shape(sizes), Blocks()
    mesh = meshes.make(shape, torch.device("cpu"))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    parts = dict(model.named_parameters())
    peers = Peers(
        group=None,
        steps=1,
        parameters={name: part for name, part in parts.items() if name not in frozen},
        frozen={name: parts[name] for name in frozen},
        shape=shape,
        parallelism="fsdp",
        options=options,
    )
    expected = contracts.communication("plain").exchange(peers).sent_bytes(2)
    called = fsdp.apply(model, mesh, **options)
    with _counted() as counted:
        for last in (False, True):
            with contextlib.nullcontext() if last else fsdp.no_sync(called):
                called(torch.ones(4, 16)).sum().backward()
    return {"expected": expected or 0.0, "counted": counted[0]}


@contextlib.contextmanager
def _counted() -> Iterator[list[float]]:
    """Count the bytes of what FSDP2 passes to torch, by the formulas of rings."""
    import torch.distributed as dist

    counted, before = [0.0], (dist.all_gather_single, dist.reduce_scatter_single, dist.all_reduce)

    def gather(output: Any, input: Any, group: Any = None, **more: Any) -> Any:  # noqa: A002, as torch calls it
        counted[0] += (group.size() - 1) * input.nbytes
        return before[0](output, input, group, **more)

    def scatter(output: Any, input: Any, group: Any = None, **more: Any) -> Any:  # noqa: A002
        counted[0] += (group.size() - 1) * output.nbytes
        return before[1](output, input, group=group, **more)

    def reduce(tensor: Any, group: Any = None, **more: Any) -> Any:
        counted[0] += 2 * (group.size() - 1) / group.size() * tensor.nbytes
        return before[2](tensor, group=group, **more)

    dist.all_gather_single, dist.reduce_scatter_single, dist.all_reduce = gather, scatter, reduce
    yield counted
    dist.all_gather_single, dist.reduce_scatter_single, dist.all_reduce = before
