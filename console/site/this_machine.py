"""Enrol the agent of the machine that `vigil up` runs on."""

from __future__ import annotations

import os
from pathlib import Path

from django.conf import settings

from nodes.models import Agent
from nodes.schedulers.local.shim import node_names
from nodes.telemetry.enrolment import enroll_here
from portal.models import digest


def enrol() -> None:
    """Store a valid token in a file that only we can read; a token that is still valid stays."""
    if not settings.VIGIL_AGENT:
        return
    node, path = node_names(1)[0], settings.VIGIL_AGENT_HOME / "token"
    if not Agent.objects.filter(node=node, token_digest=digest(_read(path))).exists():
        _write(path, enroll_here(node))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _write(path: Path, token: str) -> None:
    """Write the token file atomically."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(token + "\n")
    temporary.replace(path)
