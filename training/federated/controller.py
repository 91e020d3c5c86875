"""One round's exchange: the server asks those that take part, and has the sums of what they answer.

An algorithm that needs more than one answer a round (a line search) asks again. Everything here happens on all ranks
alike: each computes a share of the clients, and all of them end with the same sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from training.federated import client_failures, schedule, sums
from training.federated.client import Client
from training.federated.client_tasks import CLIENTS, SAMPLES, Question, Sent
from training.federated.client_work import Work, seeded
from training.federated.messages import Traffic
from training.federated.model import STATISTICS
from training.federated.pending_updates import Arrivals
from training.federated.schedule import Chunk, Ids
from training.federated.server import Round, Server
from training.federated.task_results import Answer, ClientOutcomes, Costs
from training.federated.transport.ranks import Ranks
from training.federated.update_combiner import Combining
from training.federation import random_streams
from training.federation.round_plan import Plan
from training.runtime.distributed import World
from training.runtime.seeds import derive_seed


class QuorumLost(RuntimeError):
    """Too few updates of a round count."""


@dataclass
class _Mine:
    """What this rank's clients have answered."""

    facts: list[ClientOutcomes] = field(default_factory=list)
    """By chunk."""
    sent: list[Mapping[str, Tensor]] = field(default_factory=list)
    """By chunk what was answered, where it is not added up."""
    rows: list[Tensor] = field(default_factory=list)
    """(clients, numbers): of those whose answers arrive later."""


class Controller:
    """Asks the clients of one round."""

    def __init__(
        self,
        server: Server,
        work: Work,
        exchange: Ranks,
        world: World,
        plan: Plan,
        *,
        combining: Combining | None = None,
        round_: int,
        beat: Callable[[], None],
    ) -> None:
        self.server, self.plan, self.round = server, plan, round_
        self.costs = Costs()
        self.facts = ClientOutcomes.joined(())
        """Of the question that trains."""
        self.arrivals = Arrivals.none()
        """Late answers to it of earlier rounds."""
        self.rejected: Ids = np.zeros(0, dtype=np.int64)
        """Whose updates the aggregation left out."""
        self._work, self._exchange, self._world, self._beat = work, exchange, world, beat
        self._combining = combining
        self._asked_so_far = 0
        self._chunks = self._cut()
        self._shares = schedule.shares(self._chunks, world.size)
        self._clients = [_clients_of([self._chunks[number] for number in share]) for share in self._shares]
        """The clients that every rank computes, in this order."""
        self._each = [len(clients) for clients in self._clients]
        """How many clients every rank computes."""
        self._has_borrowed = False

    def train(self, model: Tensor | None = None) -> Answer:
        """The algorithm's own question, with late answers of earlier rounds; whoever keeps something keeps it.

        `model`: what clients are sent instead of the server's. QuorumLost if too few answers count.
        """
        question = replace(self._work.training, model=model)
        self.arrivals = arrivals = self.server.pending.arriving(self.plan)
        if not self._chunks and not arrivals.chunks:
            raise QuorumLost("there was nobody to ask")
        answer, mine, facts = self._asked(question, arrivals)
        self.facts = facts
        if answer.selected < self._needed:
            raise QuorumLost(client_failures.missing(answer.selected, self._needed, facts, self.plan))
        if self._combining is not None:
            answer = self._combined(self._combining, question, answer, mine)
        began = time.perf_counter()
        self.server.kept.commit()
        self.costs.transfer_seconds += time.perf_counter() - began
        self._hold(mine, facts)
        return answer

    def train_round(self) -> Round:
        """The same, as an algorithm's `aggregate` sees it."""
        answer = self.train()
        if STATISTICS in answer.mean:
            self.server.statistics.copy_(answer.mean[STATISTICS])
        return self.server.round(self.round, answer)

    def ask(
        self,
        name: str,
        answer: Callable[[Client], Mapping[str, Tensor]],
        sent: Mapping[str, str],
        *,
        vectors: Mapping[str, Tensor],
        model: Tensor | None = None,
    ) -> Answer:
        """Another question, about everything that each of the same clients has; nothing of it is kept.

        `sent`: what each number of the answer is weighted by; `vectors`: what is sent with it; `model`: one that they
        have been sent already.
        """
        question = Question(name, answer, sent, vectors=vectors, is_whole=True, takes_steps=False, model=model)
        answered, _, facts = self._asked(question, Arrivals.none())
        self.facts.failed.update(facts.failed)
        if not answered.selected:  # sums of nothing are no answer
            raise QuorumLost(f"nobody answered {name!r}: {client_failures.missing(0, 1, facts, self.plan)}")
        return answered

    def draw(self) -> np.random.RandomState:
        """What the algorithm draws on the server's side in this round, the same on every rank."""
        return np.random.RandomState(derive_seed(self._work.seed, random_streams.SERVER, self.round) % 2**32)

    @property
    def _needed(self) -> int:
        """Updates without which the round is lost."""
        return max(1, self.plan.quorum)

    @property
    def model_bytes(self) -> int:
        """Of a message with the model."""
        down = self._work.messages_of(self._work.training, self.server).down
        return down.size(round_=self.round, client=None, samples=None)

    def samples_of(self, clients: Ids) -> Ids:
        return self._work.samples_of(clients)

    def _cut(self) -> list[Chunk]:
        samples = self._work.samples_of(self.plan.clients)
        widths = schedule.widths_of(samples, self._work.batch)
        return schedule.cut(
            self.plan.clients, self.plan.steps, widths, numbers=self._work.numbers, alone=bool(self._work.alone)
        )

    def _asked(self, question: Question, arrivals: Arrivals) -> tuple[Answer, _Mine, ClientOutcomes]:
        self._borrow()
        began = time.perf_counter()
        combining = self._combining if question.trains else None
        sizes = self._work.sizes_of(question, self.server) if combining is None else {}
        added = arrivals if combining is None else Arrivals.none()
        chunks = len(self._chunks) + added.chunks
        tree, mine = sums.Tree(chunks), _Mine()
        for number, sent in self._answers(question):
            tree.put_sum(number, self._parts(question, sizes, sent, mine), self._world.device)
            if combining is not None:
                mine.sent.append(combining.rows(len(sent.clients), question.folded(sent.values)))
            del sent  # a chunk's memory is there for the next one
        shares = self._shares
        if added.chunks:
            shares = [*shares[:-1], range(shares[-1].start, chunks)]
            if self._world.rank == self._world.size - 1:
                tree.put((chunks - 1, 1), added.summed(sizes, self._weights_of(question, added), self._world.device))
        computed = time.perf_counter()
        facts = self._exchange.facts(ClientOutcomes.joined(mine.facts))
        waited = time.perf_counter()
        total = self._exchange.total(tree, shares, chunks, sum(sizes.values()))
        taken_off = self._taken_off(question, sizes, added)
        found = ClientOutcomes.joined(facts)
        self.costs.compute_seconds += computed - began
        self.costs.wait_seconds += waited - computed
        self.costs.transfer_seconds += time.perf_counter() - waited
        self.costs.traffic += self._traffic(question, found)
        self._asked_so_far += 1
        # Ranks have computed other clients: what the server draws must not follow from what those drew.
        seeded(derive_seed(self._work.seed, random_streams.SERVER, self.round, self._asked_so_far), self._world.device)
        answer = self._answer(question, sums.split(total, sizes), found, arrivals)
        if taken_off is not None:
            answer.sum = sums.split(total + taken_off, sizes)
        return answer, mine, found

    def _answers(self, question: Question) -> Iterator[tuple[int, Sent]]:
        """Yield the answers of this rank's chunks, by the chunk's number."""
        attacking, numbers = self._work.attacking, self._shares[self._world.rank]
        if not (attacking.colludes and question.trains):
            yield from ((number, self._answer_of(number, question)) for number in numbers)
            return
        sent = [self._answer_of(number, question) for number in numbers]
        attacking.collude(sent, self._clients, self.round, self._exchange, self._world)
        yield from zip(numbers, sent, strict=True)

    def _answer_of(self, number: int, question: Question) -> Sent:
        self._beat()
        return self._work.run(self._chunks[number], self.round, question, self.server)

    def _taken_off(self, question: Question, sizes: Mapping[str, int], late: Arrivals) -> Tensor | None:
        """Return what the discount of late answers takes off the sums (numbers,), or None if there is no discount.

        The last rank computes it, like the late part of the sums, so that all ranks have the same bits.
        """
        if not late.chunks or bool((late.factors == 1).all()):
            return None
        last = self._world.size - 1
        like = {"late": sums.zeros(sum(sizes.values()), self._world.device)}
        mine = {}
        if self._world.rank == last:
            weights = self._weights_of(question, replace(late, factors=1 - late.factors))
            mine = {"late": late.summed(sizes, weights, self._world.device)[None]}
        return self._exchange.rows(mine, [0] * last + [1], like)["late"][0]

    def _traffic(self, question: Question, facts: ClientOutcomes) -> Traffic:
        """Those that are given up were asked to train, too; what is no number was sent all the same."""
        given_up = self.plan.too_slow if question.trains else self.plan.too_slow[:0]
        clients = np.concatenate([facts.clients, given_up])
        silent = [*facts.failed, *given_up.tolist()]
        messages = self._work.messages_of(question, self.server)
        samples = self._work.samples_of(clients)
        return messages.traffic(self.round, clients, samples, did_answer=~np.isin(clients, silent))

    def _answer(
        self, question: Question, total: Mapping[str, Tensor], facts: ClientOutcomes, arrivals: Arrivals
    ) -> Answer:
        counted = facts.is_fine & self.plan.is_now(facts.clients)
        own = self._work.samples_of(facts.clients)[counted]
        selected = int(counted.sum()) + len(arrivals.clients)
        samples = float(own.sum() + arrivals.samples.sum())
        weight = {SAMPLES: samples, CLIENTS: float(selected)}
        mean = {name: value / max(1.0, weight[question.weighted_by(name)]) for name, value in total.items()}
        discount = float(own.sum() + arrivals.samples @ arrivals.factors) / max(1.0, samples)
        if STATISTICS in mean and discount:
            mean[STATISTICS] = mean[STATISTICS] / discount  # a mean of them all, not a step that may be shorter
        return Answer(total, mean, facts, selected, samples, discount)

    def _combined(self, combining: Combining, question: Question, answer: Answer, mine: _Mine) -> Answer:
        """What an aggregation that is no sum makes of the same updates."""
        began = time.perf_counter()
        facts = answer.facts
        counts = facts.is_fine & self.plan.is_now(facts.clients)
        combined = combining.combine(
            question, mine.sent, self._each, clients=facts.clients, counts=counts, late=self.arrivals, round_=self.round
        )
        self.costs.transfer_seconds += time.perf_counter() - began
        if isinstance(combined, str):
            raise QuorumLost(combined)
        self.rejected = combined.left_out
        kept = np.setdiff1d(np.concatenate([facts.clients[counts], self.arrivals.clients]), combined.left_out)
        return Answer(
            combined.sum, combined.mean, facts, len(kept), float(self._work.samples_of(kept).sum()), discount=1.0
        )

    def _parts(self, question: Question, sizes: Mapping[str, int], sent: Sent, mine: _Mine) -> list[sums.Part]:
        """What of a chunk's answers is added up, without those that are no numbers or arrive later."""
        device = self._world.device
        fine = _are_numbers(sent)
        now = fine & torch.from_numpy(self.plan.is_now(sent.clients))
        samples = torch.from_numpy(self._work.samples_of(sent.clients)).double()
        folded = question.folded(sent.values)
        nothing = torch.zeros(1, 1, device=device)
        parts = []
        for name, size in sizes.items():
            value = folded[name] if folded else nothing.expand(len(sent.clients), size)  # all of them have failed
            rows = value if bool(now.all()) else torch.where(now[:, None].to(value.device), value, 0)
            weights = now * samples if question.weighted_by(name) == SAMPLES else now.double()
            parts.append((rows, weights.to(device)))
        failed = client_failures.passed_on(sent.failed, sum(len(part.failed) for part in mine.facts))
        seconds = dict(zip(sent.clients.tolist(), sent.seconds, strict=bool(sent.seconds)))
        losses = sent.losses.detach().double().cpu().numpy()
        mine.facts.append(ClientOutcomes(sent.clients, losses, fine.numpy(), failed, seconds))
        if sent.kept and question.trains:
            self._put(sent, fine, self._is_certain(mine))
        if not bool(now.all()) and folded:
            later = (fine & ~now).to(sent.losses.device)
            mine.rows.append(torch.cat(list(folded.values()), dim=1)[later])
        return parts

    def _is_certain(self, mine: _Mine) -> bool:
        """Return whether the round counts already, whatever the answers that are still to come."""
        if self._combining is not None:
            return False  # an aggregation may find too few to make anything of
        fine = sum(int((part.is_fine & self.plan.is_now(part.clients)).sum()) for part in mine.facts)
        return fine + len(self.arrivals.clients) >= self._needed

    def _put(self, sent: Sent, fine: Tensor, is_certain: bool) -> None:
        """Hand over what the clients keep; those whose update is no good keep what they had."""
        values: Mapping[str, Tensor] = sent.kept
        if not bool(fine.all()):
            before = self.server.kept.rows_of(sent.clients)
            values = {
                name: torch.where(fine.view(-1, *[1] * (value.ndim - 1)).to(value.device), value, before[name])
                for name, value in sent.kept.items()
            }
        self.server.kept.put(sent.clients, values, is_certain=is_certain)

    def _borrow(self) -> None:
        """Bring what clients keep to the ranks that compute them, once a round; it is there until the round ends."""
        if self._has_borrowed:
            return
        began = time.perf_counter()
        self.server.kept.borrow(self._clients)
        self._has_borrowed = True
        self.costs.transfer_seconds += time.perf_counter() - began

    def _hold(self, mine: _Mine, facts: ClientOutcomes) -> None:
        """Takes note of answers that arrive later, on every rank."""
        later = facts.is_fine & ~self.plan.is_now(facts.clients)
        self.server.pending.drop(self.plan.arriving)
        if not later.any():
            return
        ranks = np.repeat(np.arange(len(self._shares)), self._each)
        counts = np.bincount(ranks[later], minlength=len(self._shares)).tolist()
        own = {"rows": torch.cat(mine.rows)} if mine.rows else {}
        like = {
            "rows": self.server.weights.new_empty(sum(self._work.sizes_of(self._work.training, self.server).values()))
        }
        rows = self._exchange.rows(own, counts, like)["rows"]
        clients = facts.clients[later]
        self.server.pending.hold(
            clients, rows, started=self.round, arrives=self.plan.arrives(clients), losses=facts.losses[later]
        )

    def _weights_of(self, question: Question, arrivals: Arrivals) -> dict[str, Tensor]:
        samples = torch.from_numpy(arrivals.samples * arrivals.factors)
        ones = torch.from_numpy(arrivals.factors)
        return {
            name: samples if question.weighted_by(name) == SAMPLES else ones for name in [*question.sent, STATISTICS]
        }


def _clients_of(chunks: Sequence[Chunk]) -> Ids:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(chunk.clients for chunk in chunks)])


def _are_numbers(sent: Sent) -> Tensor:
    """(clients,): whether each one's answer is there, and made of numbers."""
    good = torch.isfinite(sent.losses) if sent.has_losses else torch.ones(len(sent.clients), dtype=torch.bool)
    good = good.to(sent.losses.device)
    for value in sent.values.values():
        rows = value.flatten(start_dim=1) if value.ndim > 1 else value[:, None]
        if rows.shape[1]:  # both ends take a NaN along, and unlike to look at each number they make no copies
            good &= torch.isfinite(rows.amax(dim=1)) & torch.isfinite(rows.amin(dim=1))
    return good.cpu() & ~torch.from_numpy(np.isin(sent.clients, list(sent.failed)))
