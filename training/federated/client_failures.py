"""Describe and report clients that fail, within bounds: dropped and quarantined clients, and lost rounds."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from training.reporting.reporter import AnyReporter

if TYPE_CHECKING:
    from training.federated.task_results import ClientOutcomes
    from training.federation.round_plan import RoundPlan

T = TypeVar("T")

MAX_EVENTS = 1_000
"""Events of one kind that one process sends at most. An attempt may send 50,000 events of 32 KiB in all."""
MAX_EVENTS_PER_ROUND = 5
MAX_TRACEBACKS = 8
"""Tracebacks that a rank sends for one task; of further clients it sends the line of the exception."""
FRAMES_CHARS, EXCEPTION_CHARS, LINE_CHARS = 2_400, 500, 300
_HEAD = "Traceback (most recent call last):"


class ClientsFailed(RuntimeError):
    """Raised when no client can do its work, with the traceback of the first."""

    def __init__(self, message: str, traceback: str) -> None:
        super().__init__(f"{message}:\n{traceback}")


# On the ranks that compute the clients.


def traceback_of(error: BaseException) -> str:
    """Return a client's traceback: of a long one the innermost frames, and always the exception."""
    exception = _encodable("".join(traceback.format_exception_only(error)).strip())
    frames = _encodable("".join(traceback.format_exception(error)).strip()).removesuffix(exception)
    if len(frames) > FRAMES_CHARS:
        _, _, rest = frames[-FRAMES_CHARS:].partition('\n  File "')
        frames = f'{_HEAD}\n  File "{rest}'
    return frames + exception[:EXCEPTION_CHARS]


def _encodable(text: str) -> str:
    """Escape lone surrogates, which names of files may contain and UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def shorten_tracebacks(failed: Mapping[int, str], already_sent: int) -> dict[int, str]:
    """Return the tracebacks to send to other ranks. `already_sent`: how many this rank has sent in this task."""
    return {
        client: text if already_sent + place < MAX_TRACEBACKS else exception_line(text)
        for place, (client, text) in enumerate(failed.items())
    }


def exception_line(text: str) -> str:
    """Return the line of a traceback with the exception."""
    lines = text.splitlines()
    last = max((place for place, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    found = (line for line in lines[last + 1 :] if line and not line[0].isspace())
    return next(found, text.strip())[:LINE_CHARS]


# As sentences.


def describe_missing_updates(counted: int, needed: int, outcomes: ClientOutcomes, plan: RoundPlan) -> str:
    """Return why a round has too few updates."""
    dropped = len(outcomes.failed)
    counts = {
        "dropped out": dropped,
        "sent non-finite updates": int((~outcomes.is_finite).sum()) - dropped,
        "will arrive later": int((outcomes.is_finite & ~plan.counts_in_round(outcomes.clients)).sum()),
        "were too slow": len(plan.too_slow),
    }
    contacted = len(outcomes.clients) + len(plan.too_slow)
    details = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    more = f", {details}" if details else ""
    return f"{counted:,} of the {needed:,} updates that it needs; {contacted:,} clients were selected{more}"


def all_raised(attempts: Sequence[ClientOutcomes]) -> bool:
    """Return whether every client of every attempt raised an exception."""
    return all(len(outcomes.failed) == len(outcomes.clients) > 0 for outcomes in attempts)


def none_finite(attempts: Sequence[ClientOutcomes]) -> bool:
    """Return whether all clients did their work, and none sent finite values."""
    return all(
        len(outcomes.clients) > 0 and not outcomes.is_finite.any() and not outcomes.failed for outcomes in attempts
    )


def first_failure(attempts: Sequence[ClientOutcomes]) -> tuple[int, str] | None:
    """Return the first client that failed, and its traceback."""
    return next((found for outcomes in attempts for found in outcomes.failed.items()), None)


def describe_lost_round(
    round_: int, attempts: Sequence[ClientOutcomes], why: str, *, clients: int, eligible: int
) -> str:
    """Return why a round that was lost in each attempt ends the run."""
    prefix = f"round {round_} was lost {len(attempts)} times: "
    if none_finite(attempts):
        return f"{prefix}none of the {len(attempts[-1].clients):,} updates was finite"
    if (first := first_failure(attempts)) is not None:
        why += f". Client {first[0]} was the first to drop out: {exception_line(first[1])}"
    left = f" {describe_quarantined(clients, eligible)}" if eligible < clients else ""
    return f"{prefix}{why.rstrip('.')}.{left}"


def describe_quarantined(clients: int, eligible: int) -> str:
    return f"{clients - eligible:,} of {clients:,} clients are no longer selected, as their updates were not finite."


class FailureReporter:
    """Reports failing clients from rank 0, in events and in the log, within the limits above."""

    def __init__(self, reporter: AnyReporter, names: Sequence[str] = ()) -> None:
        """`names`: the owner of each client's data; empty if it is not known."""
        self._reporter, self._names = reporter, names
        self._event_counts: Counter[str] = Counter()
        self._reported: set[tuple[int, str]] = set()

    def report(self, round_: int, failed: Mapping[int, str], broken: Iterable[int]) -> None:
        """Report the failures of one attempt at a round, each client once for each type of exception.

        `failed`: tracebacks by client. `broken`: clients with non-finite updates.
        """
        new = [
            (client, text) for client, text in failed.items() if (client, _exception_type(text)) not in self._reported
        ]
        for client, text in self._within_limits("client.dropped", new):
            self._reported.add((client, _exception_type(text)))
            self._reporter.event("client.dropped", step=round_, client=client, **self._name(client), traceback=text)
            _print_line(f"client {client} dropped out: {exception_line(text)} (in round {round_})")
        for client in self._within_limits("client.broken", list(broken)):
            self._reporter.event("client.broken", step=round_, client=client, **self._name(client))
            _print_line(f"client {client} sent an update that is not finite (in round {round_})")

    def report_quarantined(self, round_: int, clients: Sequence[int], updates: int) -> None:
        for client in self._within_limits("client.quarantined", clients, MAX_EVENTS):
            self._reporter.event(
                "client.quarantined", step=round_, client=client, **self._name(client), updates=updates
            )
            _print_line(f"client {client} is no longer selected: {updates} of its updates were not finite")

    def report_lost_attempt(self, round_: int, attempt: int, why: str) -> None:
        for _ in self._within_limits("round.lost", [round_]):
            self._reporter.event("round.lost", step=round_, attempt=attempt, why=why)
            _print_line(f"attempt {attempt} at round {round_} was lost: {why}")

    def _name(self, client: int) -> dict[str, str]:
        return {"name": self._names[client]} if client < len(self._names) and self._names[client] else {}

    def _within_limits(self, kind: str, found: Sequence[T], most: int = MAX_EVENTS_PER_ROUND) -> Sequence[T]:
        some = found[: min(most, MAX_EVENTS - self._event_counts[kind])]
        self._event_counts[kind] += len(some)
        return some


def _exception_type(text: str) -> str:
    return exception_line(text).partition(":")[0]


def _print_line(text: str) -> None:
    print(" ".join(text.split()), flush=True)
