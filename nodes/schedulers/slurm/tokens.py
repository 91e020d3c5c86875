"""Tokens that speak for one Slurm user: minted from the cluster's key, or asked of a command that a site provides.

Whoever holds the key is every user, so only the worker opens it, when it first asks Slurm something. Neither key nor
token is ever logged, stored, or put into an error; nor is the key's place, as reasons of jobs are shown to people.
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

LIFE_S = 900  # short, yet long enough for clocks that are some minutes apart
RENEW_S = 120  # before the end
BROKER_S = 10
TOO_OPEN = 0o037  # the group may read, nobody else may do anything
SHORTEST_KEY = 16  # bytes
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.@-]{0,62}\Z")


class Tokens(Protocol):
    def of(self, user: str) -> str:
        """A token of this Slurm user, good for some minutes; SchedulerError where there is none to be had."""
        ...

    def forget(self, user: str) -> None:
        """Slurm did not take it: the next one is made anew."""
        ...


class KeyFile:
    """HS256 over the raw bytes of slurmctld's jwt_hs256.key, with the claims exp, iat and sun (RFC 7519)."""

    def __init__(self, path: Path, *, life_s: int = LIFE_S) -> None:
        self.path, self.life_s = path, life_s

    def of(self, user: str) -> str:
        now = int(time.time())
        parts = [{"alg": "HS256", "typ": "JWT"}, {"exp": now + self.life_s, "iat": now, "sun": checked(user)}]
        text = b".".join(_base64url(json.dumps(part, separators=(",", ":")).encode()) for part in parts)
        return (text + b"." + _base64url(hmac.digest(self._key(), text, "sha256"))).decode()

    def forget(self, user: str) -> None:
        """Nothing is kept: the key may have been replaced, and is read each time."""

    def _key(self) -> bytes:
        try:
            # Not to wait for a writer, should it be a pipe.
            with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise SchedulerError("VIGIL_SLURM_KEY_FILE is not a regular file.")
                if found.st_mode & TOO_OPEN:
                    mode = stat.S_IMODE(found.st_mode)
                    raise SchedulerError(
                        f"The Slurm key (VIGIL_SLURM_KEY_FILE) is open to others (mode {mode:04o}):"
                        " who reads it is every user."
                        " Nothing is asked of Slurm until that is mended: chmod 0600, or 0640 where the worker reads it"
                        " through its group."
                    )
                key = file.read(65_536)
        except OSError as error:
            reason = error.strerror or str(error)
            raise SchedulerError(
                f"The Slurm key (VIGIL_SLURM_KEY_FILE) cannot be read: {reason}. Point that at a copy of"
                " slurmctld's jwt_hs256.key that the worker's Unix user may read, or set VIGIL_SLURM_TOKEN_COMMAND."
            ) from None
        if len(key) < SHORTEST_KEY:
            remedy = "Put a copy of slurmctld's jwt_hs256.key there."
            raise SchedulerError(f"The Slurm key (VIGIL_SLURM_KEY_FILE) holds {len(key)} bytes only. {remedy}")
        return key


class Broker:
    """A command of the site that prints a token for the user whose name it gets as `{user}`, or as last argument."""

    def __init__(self, command: str) -> None:
        try:
            self.command = shlex.split(command)
        except ValueError as error:
            raise SchedulerError(f"VIGIL_SLURM_TOKEN_COMMAND cannot be read: {error}.", permanent=True) from None
        if not self.command:
            raise SchedulerError(
                "VIGIL_SLURM_TOKEN_COMMAND is empty. Name a program that prints a token.", permanent=True
            )
        self._known: dict[str, tuple[str, float]] = {}

    def of(self, user: str) -> str:
        token, until = self._known.get(checked(user), ("", 0.0))
        if time.time() > until:
            token = self._ask(user)
            self._known[user] = token, expiry_of(token) - RENEW_S
        return token

    def forget(self, user: str) -> None:
        self._known.pop(user, None)

    def _ask(self, user: str) -> str:
        words = [word.replace("{user}", user) for word in self.command]
        if words == self.command:
            words.append(user)
        name = f"VIGIL_SLURM_TOKEN_COMMAND ({self.command[0]})"
        try:
            code, printed = _run(words)
        except (OSError, ValueError) as error:
            raise SchedulerError(f"{name} cannot be run: {error}") from None
        except subprocess.TimeoutExpired:
            raise SchedulerError(f"{name} gave no token for {user} within {BROKER_S} s.") from None
        if code:  # what it printed might hold a token
            raise SchedulerError(f"{name} gave no token for {user}: it ended with exit code {code}.")
        lines = printed.strip().splitlines()
        token = lines[-1].strip().removeprefix("SLURM_JWT=") if lines else ""
        if token.count(".") != 2 or not token.isascii() or any(letter.isspace() for letter in token):
            raise SchedulerError(f"What {name} printed for {user} is not a token.")
        return token


def _run(words: list[str]) -> tuple[int, str]:
    """Exit code and output of a command that has BROKER_S; then it ends, and whatever it started."""
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        encoding="utf-8", errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=BROKER_S)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, printed


def checked(user: str) -> str:
    """The name, if it is one that may stand in a token."""
    if not _USER.match(user):
        raise SchedulerError(f"{user!r} is not the name of a Slurm user.", permanent=True)
    return user


def expiry_of(token: str) -> float:
    """The end of a token's life, Unix seconds; soon where it does not say."""
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
