"""How clients fail, in words and within bounds: who dropped out, who is not asked any more, what a round lacked."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from training.reporting.reporter import AnyReporter

if TYPE_CHECKING:
    from training.federated.task_results import ClientOutcomes
    from training.federation.round_plan import Plan

T = TypeVar("T")

TOLD = 1_000
"""Events of a kind that one process tells at most; 50,000 of 32 KiB are all that an attempt has."""
TOLD_A_ROUND = 5
KEPT = 8
"""Tracebacks that a rank passes on of one question; of further clients it is the last line."""
FRAMES_LETTERS, RAISED_LETTERS, LINE_LETTERS = 2_400, 500, 300
_HEAD = "Traceback (most recent call last):"


class ClientsFailed(RuntimeError):
    """No client could do its work; the traceback of the first says why."""

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(f"{message}:\n{traceback}")


# On the ranks that compute them.


def traceback_of(error: BaseException) -> str:
    """A client's own; of a long one the innermost frames, and always what was raised."""
    raised = _encodable("".join(traceback.format_exception_only(error)).strip())
    frames = _encodable("".join(traceback.format_exception(error)).strip()).removesuffix(raised)
    if len(frames) > FRAMES_LETTERS:
        _, _, rest = frames[-FRAMES_LETTERS:].partition('\n  File "')
        frames = f'{_HEAD}\n  File "{rest}'
    return frames + raised[:RAISED_LETTERS]


def _encodable(text: str) -> str:
    """Half of a surrogate pair, as names of files may have, can be written nowhere."""
    return text.encode(errors="backslashreplace").decode()


def passed_on(failed: Mapping[int, str], before: int) -> dict[int, str]:
    """What a rank tells the others of those that failed: `before` so many of them it has told of already."""
    return {
        client: text if before + place < KEPT else raised_in(text)
        for place, (client, text) in enumerate(failed.items())
    }


def raised_in(text: str) -> str:
    """The line of a traceback that says what was raised."""
    lines = text.splitlines()
    last = max((place for place, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    found = (line for line in lines[last + 1 :] if line and not line[0].isspace())
    return next(found, text.strip())[:LINE_LETTERS]


# In words.


def missing(selected: int, needed: int, facts: ClientOutcomes, plan: Plan) -> str:
    """Why a round has too few updates."""
    dropped = len(facts.failed)
    counts = {
        "dropped out": dropped,
        "sent no numbers": int((~facts.is_fine).sum()) - dropped,
        "arrive later": int((facts.is_fine & ~plan.is_now(facts.clients)).sum()),
        "were too slow": len(plan.too_slow),
    }
    asked = len(facts.clients) + len(plan.too_slow)
    went = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"{selected:,} of the {needed:,} updates that it takes; {asked:,} clients were asked{went and f', {went}'}"


def all_raised(tries: Sequence[ClientOutcomes]) -> bool:
    """Whether each client that was asked ended with an exception."""
    return all(len(facts.failed) == len(facts.clients) > 0 for facts in tries)


def no_numbers(tries: Sequence[ClientOutcomes]) -> bool:
    """Whether all did their work, and none came to numbers."""
    return all(len(facts.clients) > 0 and not facts.is_fine.any() and not facts.failed for facts in tries)


def first_of(tries: Sequence[ClientOutcomes]) -> tuple[int, str] | None:
    """The first client that failed, and its traceback."""
    return next((found for facts in tries for found in facts.failed.items()), None)


def lost(round_: int, tries: Sequence[ClientOutcomes], why: str, *, clients: int, eligible: int) -> str:
    """Why a round that was lost each time ends the run."""
    said = f"round {round_} was lost {len(tries)} times: "
    if no_numbers(tries):
        return f"{said}none of the {len(tries[-1].clients):,} updates was made of numbers"
    if (first := first_of(tries)) is not None:
        why += f". Client {first[0]} was the first to drop out: {raised_in(first[1])}"
    left = f" {left_out(clients, eligible)}" if eligible < clients else ""
    return f"{said}{why.rstrip('.')}.{left}"


def left_out(clients: int, eligible: int) -> str:
    return (
        f"{clients - eligible:,} of {clients:,} clients are not asked any more, as their updates were not made of "
        "numbers."
    )


class Failures:
    """On rank 0: tells of clients that fail, in events and in the log, as often as helps anybody."""

    def __init__(self, reporter: AnyReporter, names: Sequence[str] = ()) -> None:
        """`names`: by client whose data it has, where anybody knows."""
        self._reporter, self._names = reporter, names
        self._told: Counter[str] = Counter()
        self._known: set[tuple[int, str]] = set()

    def tell(self, round_: int, failed: Mapping[int, str], broken: Iterable[int]) -> None:
        """Of a round, or of a try of it. `failed`: client → its traceback, once a client and kind of error."""
        new = [(client, text) for client, text in failed.items() if (client, _kind(text)) not in self._known]
        for client, text in self._some("client.dropped", new):
            self._known.add((client, _kind(text)))
            self._reporter.event("client.dropped", step=round_, client=client, **self._name(client), traceback=text)
            _say(f"client {client} dropped out: {raised_in(text)} (in round {round_})")
        for client in self._some("client.broken", list(broken)):
            self._reporter.event("client.broken", step=round_, client=client, **self._name(client))
            _say(f"client {client} sent an update that is not made of numbers (in round {round_})")

    def tell_quarantined(self, round_: int, clients: Sequence[int], updates: int) -> None:
        for client in self._some("client.quarantined", clients, TOLD):
            self._reporter.event(
                "client.quarantined", step=round_, client=client, **self._name(client), updates=updates
            )
            _say(f"client {client} is not asked any more: {updates} of its updates were not made of numbers")

    def tell_lost(self, round_: int, attempt: int, why: str) -> None:
        for _ in self._some("round.lost", [round_]):
            self._reporter.event("round.lost", step=round_, attempt=attempt, why=why)
            _say(f"try {attempt} of round {round_} is lost: {why}")

    def _name(self, client: int) -> dict[str, str]:
        return {"name": self._names[client]} if client < len(self._names) and self._names[client] else {}

    def _some(self, kind: str, found: Sequence[T], most: int = TOLD_A_ROUND) -> Sequence[T]:
        some = found[: min(most, TOLD - self._told[kind])]
        self._told[kind] += len(some)
        return some


def _kind(text: str) -> str:
    return raised_in(text).partition(":")[0]


def _say(text: str) -> None:
    print(" ".join(text.split()), flush=True)
