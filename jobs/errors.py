"""Define what can be wrong with a request about a job: one small tree, each error with its remedy.

JobError
├── SpecError            a specification (or a step, or an upload) is wrong: 422, a list of fields with their fixes
├── Refused              the person may not do this here: 403, with the remedy
├── Conflict             not in this state: 409
├── IdempotencyConflict  the same key came with another body: 422
├── LogError             the requested log does not exist: 404
└── ProfileError         the requested profile does not exist, or cannot be made: 404
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A problem of a field, given by its dotted path ("run.global_batch"; "" for the whole), and the fix."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class JobError(Exception):
    """Base of all errors that a person can fix."""


class SpecError(JobError):
    """The specification is invalid; nothing was changed."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))

    @classmethod
    def at(cls, field: str, message: str) -> SpecError:
        return cls([Problem(field, message)])


class Refused(JobError):
    """The person may not do this, or not here."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        self.reason, self.remedy = reason, remedy
        super().__init__(f"{reason} {remedy}".strip())


class Conflict(JobError):
    """The job is not in a state in which this can be done."""


class IdempotencyConflict(JobError):
    """The key was used within the last 24 hours with another body."""

    def __init__(self) -> None:
        super().__init__(
            "This Idempotency-Key was used before with another body. Send the same body again, or use a new key."
        )


class LogError(JobError):
    """There is no such log."""


class ProfileError(JobError):
    """There is no such profile, or nothing that could be profiled."""
