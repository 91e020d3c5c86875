"""Manage the agent's token: its own, or one obtained once for a secret that many nodes share."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from nodes.agent.reporting.posting import PortalResponse

SECRET_PREFIX = "vge_"
MAX_BYTES = 4096


class TokenUnavailable(Exception):
    """There is no token to report with; the message says what to do."""


class AgentTokens:
    """The content of VIGIL_AGENT_TOKEN_FILE, and the token obtained for it."""

    def __init__(self, token_file: Path, state: Path, node: str) -> None:
        self._file, self._token_path, self._node = token_file, state / "token", node
        self._refused = ""
        self._in_memory = ""

    def find(self) -> tuple[str, bool]:
        """Return (token, False), or (secret, True) if a token must be obtained first. Raises TokenUnavailable."""
        configured = self._read_configured()
        if not configured.startswith(SECRET_PREFIX):
            return configured, False
        stored = self._in_memory or self._read_stored()
        return (stored, False) if stored and stored != self._refused else (configured, True)

    def reject(self, token: str) -> None:
        """Note that the portal rejected this token; a shared secret then obtains another one."""
        self._refused = token
        self._in_memory = ""

    def check_room(self) -> None:
        """Raise TokenUnavailable if a token cannot be stored: a node is enrolled only once, so do not request it."""
        try:
            self._write("")
        except OSError as error:
            raise TokenUnavailable(
                f"{self._token_path} cannot be written ({error.strerror}), and a token would be lost. Free some space."
            ) from None

    def store(self, token: str) -> None:
        self._in_memory = token
        with suppress(OSError):
            self._write(token)

    def _read_configured(self) -> str:
        try:
            with open(self._file, "rb") as file:
                text = file.read(MAX_BYTES).decode("ascii").strip()
        except UnicodeDecodeError:
            text = ""
        except OSError as error:
            raise TokenUnavailable(
                f"VIGIL_AGENT_TOKEN_FILE: {self._file} cannot be read ({error.strerror})."
                " Write what `vigil agent enroll` printed into it, for the agent's user alone."
            ) from None
        if not text or not text.isprintable() or " " in text:
            raise TokenUnavailable(
                f"VIGIL_AGENT_TOKEN_FILE: {self._file} has no token. Write what `vigil agent enroll` printed into it."
            )
        return text

    def _read_stored(self) -> str:
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads(self._token_path.read_bytes()[:MAX_BYTES])
            if found.get("node") == self._node:
                return str(found.get("token") or "")
        return ""

    def _write(self, token: str) -> None:
        """Replace the token file atomically; an empty token only tests whether there is room."""
        temporary = self._token_path.with_name(".token")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, json.dumps({"node": self._node, "token": token or "x" * 100}).encode())
            os.fsync(file)
        finally:
            os.close(file)
        if token:
            os.replace(temporary, self._token_path)
        else:
            os.unlink(temporary)


def refusal(response: PortalResponse, node: str) -> str:
    """Explain a refused enrolment, and what to do."""
    if response.status == 409:
        return (
            f"{node} is already enrolled, and its token is not on this node. A sysadmin creates a new one with"
            f" `vigil agent enroll {node}`; write it into VIGIL_AGENT_TOKEN_FILE."
        )
    if response.status in {401, 403}:
        return (
            f"The portal rejects this enrolment secret ({response.status}): it is wrong, or was replaced."
            " Write the current one into VIGIL_AGENT_TOKEN_FILE."
        )
    if response.status == 404:
        return (
            f"The portal knows no node {node} (404). Set VIGIL_AGENT_NODE to its name there, and check VIGIL_AGENT_URL."
        )
    return f"The portal issued no token ({response.status}{': ' + response.detail if response.detail else ''})."
