"""List the kinds of notices that people choose among. A kind that is not listed is always sent."""

from __future__ import annotations

from dataclasses import dataclass

DIGEST, TEST = "digest", "test"
"""Kinds of messages that are not notices: a digest of several, and a channel's test message."""


@dataclass(frozen=True, slots=True)
class NoticeKind:
    """A kind of notice: its title, and who may receive it."""

    code: str
    title: str
    is_for_sysadmins: bool = False
    is_for_projects: bool = False
    is_event: bool = False  # it has happened: only a changed verdict or age withdraws it


KINDS = (
    NoticeKind("incident", "A job failed: why, and what Vigil did", is_for_projects=True, is_event=True),
    NoticeKind(
        "federation.coverage",
        "Clients of a federation whose updates were never used",
        is_for_projects=True,
        is_event=True,
    ),
    NoticeKind("gpu.idle", "GPUs that are allocated but idle"),
    NoticeKind("channel", "Messages to another channel cannot be delivered"),
    NoticeKind("program.failing", "A program of yours that fails in the same way wherever it runs"),
    NoticeKind("job.held", "A job that Slurm could not launch and put on hold"),
    NoticeKind("incident.site", "A failure that sysadmins must act on", is_for_sysadmins=True, is_event=True),
    NoticeKind("hardware.state", "Nodes and GPUs that need a repair or a decision", is_for_sysadmins=True),
    NoticeKind("job.held.site", "Jobs that Slurm could not launch: a node to repair", is_for_sysadmins=True),
    NoticeKind("portal.health", "Problems with the portal itself", is_for_sysadmins=True),
    NoticeKind("gpu.unheld", "Processes on GPUs that are not allocated", is_for_sysadmins=True),
)

EVENTS = [kind.code for kind in KINDS if kind.is_event]


def choices(*, is_sysadmin: bool, of_project: bool) -> list[tuple[str, str]]:
    """Return the kinds that can be chosen for a channel of a project, or of a person."""
    if of_project:
        return [(kind.code, kind.title) for kind in KINDS if kind.is_for_projects]
    return [(kind.code, kind.title) for kind in KINDS if is_sysadmin or not kind.is_for_sysadmins]
