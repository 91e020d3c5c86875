"""Run tasks on the clients of one round, and sum what they send.

An algorithm that needs several exchanges in a round (a line search, say) runs several tasks. All ranks call the same
functions in the same order: each computes a share of the clients, and all of them end with the same sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from training.federated import client_failures, schedule, sums
from training.federated.client import Client
from training.federated.client_tasks import CLIENTS, SAMPLES, ClientTask, ClientUpdates
from training.federated.client_work import ClientWork, seed_generators
from training.federated.messages import Traffic
from training.federated.model import STATISTICS
from training.federated.pending_updates import ArrivingUpdates
from training.federated.schedule import ClientChunk, Ids
from training.federated.server import Server, ServerRound
from training.federated.task_results import ClientOutcomes, LocalResults, RoundCosts, TaskResult
from training.federated.transport.ranks import RankExchange
from training.federated.update_combiner import UpdateCombiner
from training.federation import random_streams
from training.federation.parts import TooFewUpdates
from training.federation.round_plan import RoundPlan
from training.runtime.distributed import World
from training.runtime.seeds import derive_seed


class QuorumLost(RuntimeError):
    """Raised when too few updates of a round count."""


class Controller:
    """Runs tasks on the clients of one round."""

    def __init__(
        self,
        server: Server,
        work: ClientWork,
        exchange: RankExchange,
        world: World,
        plan: RoundPlan,
        *,
        combining: UpdateCombiner | None = None,
        round_: int,
        beat: Callable[[], None],
    ) -> None:
        self.server, self.plan, self.round = server, plan, round_
        self.costs = RoundCosts()
        self.outcomes = ClientOutcomes.concatenate(())
        """Outcomes of the training task."""
        self.arrivals = ArrivingUpdates.empty()
        """Late updates of earlier rounds that count in this one."""
        self.rejected: Ids = np.zeros(0, dtype=np.int64)
        """Clients whose updates the aggregation rejected."""
        self._work, self._exchange, self._world, self._beat = work, exchange, world, beat
        self._combining = combining
        self._tasks_run = 0
        self._chunks = self._make_chunks()
        self._shares = schedule.shares(self._chunks, world.size)
        self._clients = [_clients_of([self._chunks[number] for number in share]) for share in self._shares]
        """The clients that each rank computes, in this order."""
        self._rank_counts = [len(clients) for clients in self._clients]
        """How many clients each rank computes."""
        self._has_borrowed = False

    def train(self, model: Tensor | None = None) -> TaskResult:
        """Run the algorithm's training task, add late updates of earlier rounds, and store the clients' new states.

        `model` (parameters,): what clients are sent instead of the server's model. QuorumLost if too few updates count.
        """
        task = replace(self._work.training_task, model=model)
        self.arrivals = arrivals = self.server.pending.arriving(self.plan)
        if not self._chunks and not arrivals.chunks:
            raise QuorumLost("no client was selected, and no late update has arrived")
        result, local, outcomes = self._run_task(task, arrivals)
        self.outcomes = outcomes
        if result.counted < self._needed:
            raise QuorumLost(
                client_failures.describe_missing_updates(result.counted, self._needed, outcomes, self.plan)
            )
        if self._combining is not None:
            result = self._combine(self._combining, task, result, local)
        began = time.perf_counter()
        self.server.client_state.commit()
        self.costs.transfer_seconds += time.perf_counter() - began
        self._record_late(local, outcomes)
        return result

    def train_round(self) -> ServerRound:
        """Run the training task and return the round as an algorithm's `aggregate` receives it."""
        result = self.train()
        if STATISTICS in result.mean:
            self.server.statistics.copy_(result.mean[STATISTICS])
        return self.server.round(self.round, result)

    def query(
        self,
        name: str,
        compute: Callable[[Client], Mapping[str, Tensor]],
        weighting: Mapping[str, str],
        *,
        vectors: Mapping[str, Tensor],
        model: Tensor | None = None,
    ) -> TaskResult:
        """Run another task on the same clients, over all samples of each; it does not change their state.

        `compute`: (client) → values by name. `weighting`: "samples" or "clients" by name. `vectors`: what is sent
        along, by name. `model` (parameters,): a model that the clients have received already. QuorumLost if no client
        answers.
        """
        task = ClientTask(
            name, compute, weighting, vectors=vectors, uses_all_samples=True, takes_steps=False, model=model
        )
        result, _, outcomes = self._run_task(task, ArrivingUpdates.empty())
        self.outcomes.failed.update(outcomes.failed)
        if not result.counted:  # the sums would be those of nothing
            raise QuorumLost(
                f"no client answered {name!r}: {client_failures.describe_missing_updates(0, 1, outcomes, self.plan)}"
            )
        return result

    def ask(
        self,
        name: str,
        answer: Callable[[Client], Mapping[str, Tensor]],
        sent: Mapping[str, str],
        *,
        vectors: Mapping[str, Tensor],
        model: Tensor | None = None,
    ) -> TaskResult:
        """Return query(name, answer, sent, …). Deprecated."""
        return self.query(name, answer, sent, vectors=vectors, model=model)

    def draw(self) -> np.random.RandomState:
        """Return `rng()`. Deprecated."""
        return self.rng()

    def rng(self) -> np.random.RandomState:
        """Return a generator for the algorithm's server side in this round, equal on every rank."""
        return np.random.RandomState(derive_seed(self._work.seed, random_streams.SERVER, self.round) % 2**32)

    @property
    def _needed(self) -> int:
        """Return the number of updates without which the round is lost."""
        return max(1, self.plan.quorum)

    @property
    def model_bytes(self) -> int:
        """Return the size of a message with the model, in bytes."""
        down = self._work.messages_of(self._work.training_task, self.server).down
        return down.size(round_=self.round, client=None, samples=None)

    def samples_of(self, clients: Ids) -> Ids:
        return self._work.samples_of(clients)

    def _make_chunks(self) -> list[ClientChunk]:
        samples = self._work.samples_of(self.plan.clients)
        widths = schedule.widths_of(samples, self._work.batch)
        return schedule.make_chunks(
            self.plan.clients,
            self.plan.steps,
            widths,
            parameters=self._work.parameters,
            is_unstacked=bool(self._work.unstacked_reason),
        )

    def _run_task(self, task: ClientTask, arrivals: ArrivingUpdates) -> tuple[TaskResult, LocalResults, ClientOutcomes]:
        self._borrow_state()
        began = time.perf_counter()
        combining = self._combining if task.is_training else None
        sizes = self._work.sizes_of(task, self.server) if combining is None else {}
        added = arrivals if combining is None else ArrivingUpdates.empty()
        chunks = len(self._chunks) + added.chunks
        tree, local = sums.Tree(chunks), LocalResults()
        for number, updates in self._local_updates(task):
            tree.put_sum(number, self._partial_sums(task, sizes, updates, local), self._world.device)
            if combining is not None:
                local.updates.append(combining.rows(len(updates.clients), task.summands(updates.values)))
            del updates  # so that the next chunk can use its memory
        shares = self._shares
        if added.chunks:
            shares = [*shares[:-1], range(shares[-1].start, chunks)]
            if self._world.rank == self._world.size - 1:
                tree.put((chunks - 1, 1), added.weighted_sum(sizes, self._weights_of(task, added), self._world.device))
        computed = time.perf_counter()
        outcomes_by_rank = self._exchange.gather_objects(ClientOutcomes.concatenate(local.outcomes))
        waited = time.perf_counter()
        total = self._exchange.tree_sum(tree, shares, chunks, sum(sizes.values()))
        discounted = self._discounted(task, sizes, added)
        outcomes = ClientOutcomes.concatenate(outcomes_by_rank)
        self.costs.compute_seconds += computed - began
        self.costs.wait_seconds += waited - computed
        self.costs.transfer_seconds += time.perf_counter() - waited
        self.costs.traffic += self._traffic(task, outcomes)
        self._tasks_run += 1
        # Ranks have computed different clients: the server's draws must not depend on what those have drawn.
        seed_generators(
            derive_seed(self._work.seed, random_streams.SERVER, self.round, self._tasks_run), self._world.device
        )
        result = self._result(task, sums.split(total, sizes), outcomes, arrivals)
        if discounted is not None:
            result.sum = sums.split(total + discounted, sizes)
        return result, local, outcomes

    def _local_updates(self, task: ClientTask) -> Iterator[tuple[int, ClientUpdates]]:
        """Yield the number of each of this rank's chunks with its updates."""
        attacking, chunk_numbers = self._work.attack, self._shares[self._world.rank]
        if not (attacking.colludes and task.is_training):
            yield from ((number, self._updates_of_chunk(number, task)) for number in chunk_numbers)
            return
        updates = [self._updates_of_chunk(number, task) for number in chunk_numbers]
        attacking.forge_colluding(updates, self._clients, self.round, self._exchange, self._world)
        yield from zip(chunk_numbers, updates, strict=True)

    def _updates_of_chunk(self, number: int, task: ClientTask) -> ClientUpdates:
        self._beat()
        return self._work.run(self._chunks[number], self.round, task, self.server)

    def _discounted(self, task: ClientTask, sizes: Mapping[str, int], late: ArrivingUpdates) -> Tensor | None:
        """Return what the discount of late updates takes off the sums (size,), or None if there is no discount.

        The last rank computes it, like the late part of the sums, so that all ranks have the same bits.
        """
        if not late.chunks or bool((late.factors == 1).all()):
            return None
        last = self._world.size - 1
        like = {"late": sums.zeros(sum(sizes.values()), self._world.device)}
        local = {}
        if self._world.rank == last:
            weights = self._weights_of(task, replace(late, factors=1 - late.factors))
            local = {"late": late.weighted_sum(sizes, weights, self._world.device)[None]}
        return self._exchange.gather_rows(local, [0] * last + [1], like)["late"][0]

    def _traffic(self, task: ClientTask, outcomes: ClientOutcomes) -> Traffic:
        """Return the bytes of a task. The model sent to clients that were given up, and non-finite updates, count."""
        given_up = self.plan.too_slow if task.is_training else self.plan.too_slow[:0]
        clients = np.concatenate([outcomes.clients, given_up])
        silent = [*outcomes.failed, *given_up.tolist()]
        messages = self._work.messages_of(task, self.server)
        samples = self._work.samples_of(clients)
        return messages.traffic(self.round, clients, samples, has_answered=~np.isin(clients, silent))

    def _result(
        self, task: ClientTask, total: Mapping[str, Tensor], outcomes: ClientOutcomes, arrivals: ArrivingUpdates
    ) -> TaskResult:
        is_counted = outcomes.is_finite & self.plan.counts_in_round(outcomes.clients)
        samples_now = self._work.samples_of(outcomes.clients)[is_counted]
        counted = int(is_counted.sum()) + len(arrivals.clients)
        samples = float(samples_now.sum() + arrivals.samples.sum())
        weight = {SAMPLES: samples, CLIENTS: float(counted)}
        mean = {name: value / max(1.0, weight[task.weights_of(name)]) for name, value in total.items()}
        discount = float(samples_now.sum() + arrivals.samples @ arrivals.factors) / max(1.0, samples)
        if STATISTICS in mean and discount:
            mean[STATISTICS] = mean[STATISTICS] / discount  # their mean, not a step that may be shorter
        return TaskResult(total, mean, outcomes, counted, samples, discount)

    def _combine(
        self, combining: UpdateCombiner, task: ClientTask, result: TaskResult, local: LocalResults
    ) -> TaskResult:
        """Replace the sums by what a robust aggregation makes of the same updates."""
        began = time.perf_counter()
        outcomes = result.outcomes
        counts = outcomes.is_finite & self.plan.counts_in_round(outcomes.clients)
        try:
            combined = combining.combine(
                task,
                local.updates,
                self._rank_counts,
                clients=outcomes.clients,
                counts=counts,
                late=self.arrivals,
                round_=self.round,
            )
        except TooFewUpdates as error:
            raise QuorumLost(str(error)) from None
        finally:
            self.costs.transfer_seconds += time.perf_counter() - began
        self.rejected = combined.left_out
        counted = np.setdiff1d(np.concatenate([outcomes.clients[counts], self.arrivals.clients]), combined.left_out)
        return TaskResult(
            combined.sum,
            combined.mean,
            outcomes,
            len(counted),
            float(self._work.samples_of(counted).sum()),
            discount=1.0,
        )

    def _partial_sums(
        self, task: ClientTask, sizes: Mapping[str, int], updates: ClientUpdates, local: LocalResults
    ) -> list[sums.Part]:
        """Compute weighted partial sums of this chunk's updates, dropping non-finite and late ones.

        Returns [(rows (clients, size), weights (clients,))], one pair for each name. Records the chunk's outcomes,
        late rows and new client states in `local`.
        """
        device = self._world.device
        is_finite = _all_finite(updates)
        counts_now = is_finite & torch.from_numpy(self.plan.counts_in_round(updates.clients))
        samples = torch.from_numpy(self._work.samples_of(updates.clients)).double()
        folded = task.summands(updates.values)
        nothing = torch.zeros(1, 1, device=device)
        parts = []
        for name, size in sizes.items():
            # Nothing is folded where all clients of the chunk have failed.
            value = folded[name] if folded else nothing.expand(len(updates.clients), size)
            rows = value if bool(counts_now.all()) else torch.where(counts_now[:, None].to(value.device), value, 0)
            weights = counts_now * samples if task.weights_of(name) == SAMPLES else counts_now.double()
            parts.append((rows, weights.to(device)))
        failed = client_failures.shorten_tracebacks(updates.failed, sum(len(part.failed) for part in local.outcomes))
        seconds = dict(zip(updates.clients.tolist(), updates.seconds, strict=bool(updates.seconds)))
        losses = updates.losses.detach().double().cpu().numpy()
        local.outcomes.append(ClientOutcomes(updates.clients, losses, is_finite.numpy(), failed, seconds))
        if updates.state and task.is_training:
            self._store_state(updates, is_finite, self._is_certain(local))
        if not bool(counts_now.all()) and folded:
            later = (is_finite & ~counts_now).to(updates.losses.device)
            local.late_rows.append(torch.cat(list(folded.values()), dim=1)[later])
        return parts

    def _is_certain(self, local: LocalResults) -> bool:
        """Return whether the round is certain to count, whatever the chunks bring that are still to come."""
        if self._combining is not None:
            return False  # an aggregation may still reject too many
        counted = sum(int((part.is_finite & self.plan.counts_in_round(part.clients)).sum()) for part in local.outcomes)
        return counted + len(self.arrivals.clients) >= self._needed

    def _store_state(self, updates: ClientUpdates, is_finite: Tensor, is_certain: bool) -> None:
        """Store the clients' new states; those with a failed or non-finite update keep their old one."""
        values: Mapping[str, Tensor] = updates.state
        if not bool(is_finite.all()):
            before = self.server.client_state.rows_of(updates.clients)
            values = {
                name: torch.where(is_finite.view(-1, *[1] * (value.ndim - 1)).to(value.device), value, before[name])
                for name, value in updates.state.items()
            }
        self.server.client_state.put(updates.clients, values, is_certain=is_certain)

    def _borrow_state(self) -> None:
        """Bring the clients' states to the ranks that compute them, once a round; they stay until the round ends."""
        if self._has_borrowed:
            return
        began = time.perf_counter()
        self.server.client_state.borrow(self._clients)
        self._has_borrowed = True
        self.costs.transfer_seconds += time.perf_counter() - began

    def _record_late(self, local: LocalResults, outcomes: ClientOutcomes) -> None:
        """Record updates that arrive in a later round, on every rank."""
        later = outcomes.is_finite & ~self.plan.counts_in_round(outcomes.clients)
        self.server.pending.remove(self.plan.arriving)
        if not later.any():
            return
        ranks = np.repeat(np.arange(len(self._shares)), self._rank_counts)
        counts = np.bincount(ranks[later], minlength=len(self._shares)).tolist()
        local_rows = {"rows": torch.cat(local.late_rows)} if local.late_rows else {}
        like = {
            "rows": self.server.weights.new_empty(
                sum(self._work.sizes_of(self._work.training_task, self.server).values())
            )
        }
        rows = self._exchange.gather_rows(local_rows, counts, like)["rows"]
        clients = outcomes.clients[later]
        self.server.pending.add(
            clients, rows, started=self.round, arrives=self.plan.arrival_times(clients), losses=outcomes.losses[later]
        )

    def _weights_of(self, task: ClientTask, arrivals: ArrivingUpdates) -> dict[str, Tensor]:
        samples = torch.from_numpy(arrivals.samples * arrivals.factors)
        ones = torch.from_numpy(arrivals.factors)
        return {name: samples if task.weights_of(name) == SAMPLES else ones for name in [*task.weighting, STATISTICS]}


def _clients_of(chunks: Sequence[ClientChunk]) -> Ids:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(chunk.clients for chunk in chunks)])


def _all_finite(updates: ClientUpdates) -> Tensor:
    """Return which clients (clients,) have sent an update, and a finite one."""
    is_finite = (
        torch.isfinite(updates.losses) if updates.has_losses else torch.ones(len(updates.clients), dtype=torch.bool)
    )
    is_finite = is_finite.to(updates.losses.device)
    for value in updates.values.values():
        rows = value.flatten(start_dim=1) if value.ndim > 1 else value[:, None]
        if rows.shape[1]:  # max and min pass NaN on, and unlike isfinite() of all values they allocate nothing
            is_finite &= torch.isfinite(rows.amax(dim=1)) & torch.isfinite(rows.amin(dim=1))
    return is_finite.cpu() & ~torch.from_numpy(np.isin(updates.clients, list(updates.failed)))
