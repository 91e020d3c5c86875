"""Describe the environment that an attempt ran in."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.disk.captured import CapturedEnvironment, EnvironmentChange, EnvironmentDiff, cpu_of, gpus_of
from vigil_core import formatting

MAX_NAMED = 6  # changes named next to the attempt; its link shows all
SHORT_LENGTH = 12  # characters of a commit or digest
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, kw_only=True)
class AttemptEnvironment:
    """An attempt's environment as the page shows it."""

    sentence: str
    facts: list[tuple[str, str]]
    packages: dict[str, str]
    packages_left_out: int = 0
    same_as: int | None = None  # the earlier attempt with the same packages
    since: int | None = None
    changes: list[str] = field(default_factory=list)

    @property
    def named(self) -> str:
        """Return the changes that fit in the line next to the attempt."""
        more = len(self.changes) - MAX_NAMED
        named = ", ".join(self.changes[:MAX_NAMED])
        return f"{named} and {formatting.count(more)} more" if more > 0 else named

    @property
    def unnamed(self) -> list[str]:
        return self.changes[MAX_NAMED:]


def attempt_environments(found: dict[int, EnvironmentDiff]) -> dict[int, AttemptEnvironment]:
    """Return each attempt's environment, by attempt number as in jobs.disk.provenance."""
    return {number: _attempt_environment(ran, found) for number, ran in found.items()}


def _attempt_environment(ran: EnvironmentDiff, others: dict[int, EnvironmentDiff]) -> AttemptEnvironment:
    environment = ran.environment
    before = others[ran.since].environment if ran.since is not None else None
    same = bool(before and environment.packages and before.packages == environment.packages)
    return AttemptEnvironment(
        sentence=sentence(environment),
        facts=facts(environment),
        packages=environment.packages,
        packages_left_out=environment.packages_left_out,
        same_as=ran.since if same else None,
        since=ran.since,
        changes=[_change_text(change) for change in ran.changes],
    )


def sentence(environment: CapturedEnvironment) -> str:
    """Return a summary such as "Python 3.11.7, torch 2.13.0 (CPU), Linux 6.1.0; 212 packages"."""
    torch = environment.torch.partition("+")[0]
    parts = [
        f"Python {environment.python}" if environment.python else "",
        f"torch {torch}" + (f" ({environment.torch_for})" if environment.torch_for else "") if torch else "",
        f"driver {environment.driver}" if environment.driver else "",
        environment.kernel,
    ]
    text = ", ".join(part for part in parts if part) or "an unknown environment"
    count = len(environment.packages) + environment.packages_left_out
    return f"{text}; {formatting.plural(count, 'package')}" if count else text


def facts(environment: CapturedEnvironment) -> list[tuple[str, str]]:
    """Return (title, value) pairs of everything that is known, except the packages."""
    e = environment
    memory = formatting.memory(e.memory_gib * 1024**3) if e.memory_gib else ""
    rows = [
        ("Node", _joined(e.node, cpu_of(e), memory)),
        ("GPUs", gpus_of(e)),
        ("Driver", _joined(e.driver, f"supports CUDA {e.cuda}" if e.cuda else "")),
        ("System", _joined(e.os, e.kernel, e.machine)),
        ("Python", _joined(e.python, e.executable)),
        ("torch", _joined(e.torch, f"for {e.torch_for}" if e.torch_for else "")),
        ("Code", _code(e)),
        ("Vigil", _joined(e.vigil, f"commit {e.vigil_commit[:SHORT_LENGTH]}" if e.vigil_commit else "")),
        ("Configuration", e.config_hash),
        ("Variables set", ", ".join(e.variables)),
    ]
    return [(name, value) for name, value in rows if value]


def _code(e: CapturedEnvironment) -> str:
    commit = f"commit {e.commit[:SHORT_LENGTH]}" if e.commit else ""
    if e.git:
        return _joined(e.git, e.ref if e.ref != e.commit else "", commit)
    changed = " with uncommitted changes" if e.dirty else ""
    sent = f"sent from {commit}{changed}" if commit else "sent" if e.digest else ""
    return _joined(sent, f"digest {e.digest[:SHORT_LENGTH]}" if e.digest else "")


def _change_text(change: EnvironmentChange) -> str:
    before, after = (_short(text) for text in (change.before, change.after))
    if not before or not after:
        return f"{change.what} {after or before} {'added' if after else 'removed'}"
    return f"{change.what} {before} → {after}"


def _short(text: str) -> str:
    return text[:SHORT_LENGTH] if len(text) >= 40 and set(text) <= _HEX else text


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
