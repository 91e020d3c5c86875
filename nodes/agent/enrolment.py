"""The token that an agent reports with: its own, or the one that it gets once for a secret that many share."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from nodes.agent.posting import Answer

SECRET_PREFIX = "vge_"
MOST_BYTES = 4096


class NoToken(Exception):
    """There is no token to report with; the message says what to do."""


class Tokens:
    """What VIGIL_AGENT_TOKEN_FILE holds, and what was got for it."""

    def __init__(self, token_file: Path, state: Path, node: str) -> None:
        self._file, self._kept, self._node = token_file, state / "token", node
        self._refused = ""
        self._in_memory = ""

    def find(self) -> tuple[str, bool]:
        """The token, and whether it is a secret that one has yet to be got for. Raises NoToken."""
        said = self._said()
        if not said.startswith(SECRET_PREFIX):
            return said, False
        kept = self._in_memory or self._read_kept()
        return (kept, False) if kept and kept != self._refused else (said, True)

    def refuse(self, token: str) -> None:
        """The portal does not know it: a secret gets another, if it may."""
        self._refused = token
        self._in_memory = ""

    def check_room(self) -> None:
        """A name is enrolled once, so where its token cannot be kept it is not asked for. Raises NoToken."""
        try:
            self._write("")
        except OSError as error:
            raise NoToken(
                f"{self._kept} can't be written ({error.strerror}), and a token would be lost. Make room for it."
            ) from None

    def keep(self, token: str) -> None:
        self._in_memory = token
        with suppress(OSError):
            self._write(token)

    def _said(self) -> str:
        try:
            with open(self._file, "rb") as file:
                text = file.read(MOST_BYTES).decode("ascii").strip()
        except UnicodeDecodeError:
            text = ""
        except OSError as error:
            raise NoToken(
                f"VIGIL_AGENT_TOKEN_FILE: {self._file} can't be read ({error.strerror})."
                " Write what `vigil agent enroll` printed into it, for the agent's user alone."
            ) from None
        if not text or not text.isprintable() or " " in text:
            raise NoToken(
                f"VIGIL_AGENT_TOKEN_FILE: {self._file} holds no token. Write what `vigil agent enroll` printed into it."
            )
        return text

    def _read_kept(self) -> str:
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads(self._kept.read_bytes()[:MOST_BYTES])
            if found.get("node") == self._node:
                return str(found.get("token") or "")
        return ""

    def _write(self, token: str) -> None:
        """Whole or not at all; the empty one only tries whether there is room."""
        temporary = self._kept.with_name(".token")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, json.dumps({"node": self._node, "token": token or "x" * 100}).encode())
            os.fsync(file)
        finally:
            os.close(file)
        if token:
            os.replace(temporary, self._kept)
        else:
            os.unlink(temporary)


def refusal(answer: Answer, node: str) -> str:
    """What a refused enrolment means, and what to do."""
    if answer.status == 409:
        return (
            f"{node} is enrolled already, and its token is not here. A sysadmin makes a new one with"
            f" `vigil agent enroll {node}`; write it into VIGIL_AGENT_TOKEN_FILE."
        )
    if answer.status in {401, 403}:
        return (
            f"The portal does not take this enrolment secret ({answer.status}): it is wrong, or was replaced."
            " Write the one that counts into VIGIL_AGENT_TOKEN_FILE."
        )
    if answer.status == 404:
        return (
            f"The portal knows no node {node} (404). Set VIGIL_AGENT_NODE to its name there,"
            " and see that VIGIL_AGENT_URL is right."
        )
    return f"The portal gave no token ({answer.status}{': ' + answer.detail if answer.detail else ''})."
