"""Obtain tokens for Slurm users: minted from the cluster's key, or printed by a site's command.

Whoever has the key can act as any user, so only the worker opens it, at its first request to Slurm. Neither key nor
token is ever logged, stored, or put into an error; nor is the key's path, because job reasons are shown to people.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from nodes.schedulers.base import SchedulerError

LIFE_S = 900  # short, yet long enough for clocks that differ by some minutes
RENEW_S = 120  # before expiry
COMMAND_TIMEOUT_S = 10
TOO_OPEN = 0o037  # the group may read, nobody else may do anything
MIN_KEY_BYTES = 16
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]{0,62}\Z")


class TokenSource(Protocol):
    """A source of tokens for Slurm users."""

    def token_for(self, user: str) -> str:
        """Return a token for this Slurm user, valid for some minutes; raise SchedulerError if there is none."""
        ...

    def forget(self, user: str) -> None:
        """Drop a token that Slurm rejected, so that the next one is new."""
        ...


class KeyFileTokens:
    """Sign tokens with slurmctld's jwt_hs256.key: HS256 over its raw bytes, claims exp, iat and sun (RFC 7519)."""

    def __init__(self, path: Path, *, life_s: int = LIFE_S) -> None:
        self.path, self.life_s = path, life_s

    def token_for(self, user: str) -> str:
        now = int(time.time())
        parts = [{"alg": "HS256", "typ": "JWT"}, {"exp": now + self.life_s, "iat": now, "sun": checked_user(user)}]
        text = b".".join(_base64url(json.dumps(part, separators=(",", ":")).encode()) for part in parts)
        return (text + b"." + _base64url(hmac.digest(self._key(), text, "sha256"))).decode()

    def forget(self, user: str) -> None:
        """Do nothing: no token is cached, and the key is read each time because it may have been replaced."""

    def _key(self) -> bytes:
        try:
            # O_NONBLOCK: do not wait for a writer if it is a pipe.
            with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise SchedulerError("VIGIL_SLURM_KEY_FILE is not a regular file.")
                if found.st_mode & TOO_OPEN:
                    mode = stat.S_IMODE(found.st_mode)
                    raise SchedulerError(
                        f"The Slurm key (VIGIL_SLURM_KEY_FILE) is readable by others (mode {mode:04o}):"
                        " whoever reads it can act as any user."
                        " Vigil makes no request to Slurm until it is fixed: chmod 0600, or 0640 if the worker reads it"
                        " through its group."
                    )
                key = file.read(65_536)
        except OSError as error:
            reason = error.strerror or str(error)
            raise SchedulerError(
                f"The Slurm key (VIGIL_SLURM_KEY_FILE) cannot be read: {reason}. Point it at a copy of"
                " slurmctld's jwt_hs256.key that the worker's Unix user may read, or set VIGIL_SLURM_TOKEN_COMMAND."
            ) from None
        if len(key) < MIN_KEY_BYTES:
            remedy = "Put a copy of slurmctld's jwt_hs256.key there."
            raise SchedulerError(f"The Slurm key (VIGIL_SLURM_KEY_FILE) is only {len(key)} bytes long. {remedy}")
        return key


class CommandTokens:
    """Get tokens from a site's command, which gets the user's name as `{user}` or as last argument."""

    def __init__(self, command: str) -> None:
        try:
            self.command = shlex.split(command)
        except ValueError as error:
            raise SchedulerError(f"VIGIL_SLURM_TOKEN_COMMAND cannot be read: {error}.", permanent=True) from None
        if not self.command:
            raise SchedulerError(
                "VIGIL_SLURM_TOKEN_COMMAND is empty. Name a program that prints a token.", permanent=True
            )
        self._cached: dict[str, tuple[str, float]] = {}

    def token_for(self, user: str) -> str:
        token, until = self._cached.get(checked_user(user), ("", 0.0))
        if time.time() > until:
            token = self._request(user)
            self._cached[user] = token, expiry_of(token) - RENEW_S
        return token

    def forget(self, user: str) -> None:
        self._cached.pop(user, None)

    def _request(self, user: str) -> str:
        words = [word.replace("{user}", user) for word in self.command]
        if words == self.command:
            words.append(user)
        name = f"VIGIL_SLURM_TOKEN_COMMAND ({self.command[0]})"
        try:
            code, printed = _run(words)
        except (OSError, ValueError) as error:
            raise SchedulerError(f"{name} cannot be run: {error}") from None
        except subprocess.TimeoutExpired:
            raise SchedulerError(f"{name} gave no token for {user} within {COMMAND_TIMEOUT_S} s.") from None
        if code:  # its output might contain a token
            raise SchedulerError(f"{name} gave no token for {user}: it exited with code {code}.")
        lines = printed.strip().splitlines()
        token = lines[-1].strip().removeprefix("SLURM_JWT=") if lines else ""
        if token.count(".") != 2 or not token.isascii() or any(letter.isspace() for letter in token):
            raise SchedulerError(f"{name} printed something for {user} that is not a token.")
        return token


def _run(words: list[str]) -> tuple[int, str]:
    """Run a command and return (exit code, output); after COMMAND_TIMEOUT_S kill it and whatever it started."""
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        encoding="utf-8", errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, printed


def checked_user(user: str) -> str:
    """Return the name if it may appear in a token; else raise SchedulerError."""
    if not _USER.match(user):
        raise SchedulerError(f"{user!r} is not a valid Slurm user name.", permanent=True)
    return user


def expiry_of(token: str) -> float:
    """Return when a token expires, in Unix seconds; soon if it does not say."""
    middle = token.split(".")[1]
    try:
        claims = json.loads(urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))
        if (end := float(claims["exp"])) == end:  # JSON may say NaN
            return end
        raise ValueError("no time")
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return time.time() + RENEW_S + 60


def _base64url(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")
