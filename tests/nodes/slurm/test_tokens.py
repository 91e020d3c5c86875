"""Test tokens: their content, which owners of a key are trusted, and failures of a site's command."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nodes.schedulers.base import SchedulerError
from nodes.schedulers.slurm import tokens
from nodes.schedulers.slurm.tokens import CommandTokens, KeyFileTokens, checked_user, expiry_of
from tests.waiting import PATIENCE_S, until

KEY = bytes(range(32))
USERS = ["alice", "_svc", "a.b-c@lab.example", "X1"]
NO_USERS = [
    "", "1alice", "al ice", "alice\n", "alice\r\nX-SLURM-USER-NAME: root", "älice", "a" * 64, "alice;reboot", "{user}",
    "-alice", "alice\0",
]  # fmt: skip


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "jwt.key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


def opened(token: str, key: bytes = KEY) -> dict[str, Any]:
    """The claims of a token, verified by hand: HMAC-SHA256 as RFC 2104 spells it."""
    head, claims, signature = token.split(".")
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded) + f"{head}.{claims}".encode()).digest()
    outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded) + inner).digest()
    assert unpacked(signature) == outer
    assert json.loads(unpacked(head)) == {"alg": "HS256", "typ": "JWT"}
    found: dict[str, Any] = json.loads(unpacked(claims))
    return found


def unpacked(part: str) -> bytes:
    assert "=" not in part
    return base64.b64decode(part.replace("-", "+").replace("_", "/") + "=" * (-len(part) % 4), validate=True)


@pytest.mark.parametrize("user", USERS)
def test_a_token_of_the_key(key_file: Path, user: str) -> None:
    claims = opened(KeyFileTokens(key_file).token_for(user))
    now = time.time()
    assert set(claims) == {"exp", "iat", "sun"}
    assert claims["sun"] == user
    assert now - 2 <= claims["iat"] <= now
    assert claims["exp"] - claims["iat"] == 900


def test_clocks_ten_minutes_apart(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's clock may be ten minutes ahead; at more than fifteen the token counts as expired."""
    claims = opened(KeyFileTokens(key_file).token_for("alice"))
    assert claims["exp"] > time.time() + 600
    assert claims["exp"] < time.time() + 901


@pytest.mark.parametrize("user", NO_USERS)
def test_odd_names_are_refused(key_file: Path, user: str) -> None:
    for source in (KeyFileTokens(key_file), CommandTokens("echo a.b.c")):
        with pytest.raises(SchedulerError, match="is not a valid Slurm user name") as refused:
            source.token_for(user)
        assert refused.value.permanent
    with pytest.raises(SchedulerError):
        checked_user(user)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_modes_that_are_believed(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    assert opened(KeyFileTokens(key_file).token_for("alice"))


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o666, 0o604, 0o620, 0o601, 0o777])
def test_modes_that_are_too_open(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(SchedulerError, match=rf"mode {mode:04o}.*chmod 0600") as refused:
        KeyFileTokens(key_file).token_for("alice")
    assert str(key_file) not in str(refused.value), "people read it"
    assert not refused.value.permanent
    key_file.chmod(0o600)
    assert KeyFileTokens(key_file).token_for("alice")


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "empty", "short", "device", "dangling"])
def test_keys_that_are_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)  # nobody writes to it: who opens it plainly waits for ever
    elif kind in ("empty", "short"):
        path.write_bytes(b"x" * (15 if kind == "short" else 0))
        path.chmod(0o600)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "device":
        path = Path("/dev/zero")
    began = time.monotonic()
    with pytest.raises(SchedulerError) as refused:
        KeyFileTokens(path).token_for("alice")
    assert time.monotonic() - began < PATIENCE_S / 2
    payload = {
        "missing": "No such file",
        "folder": "Is a directory",
        "dangling": "No such file",
        "empty": "0 bytes",
        "short": "15 bytes",
    }
    assert payload.get(kind, "not a regular file") in str(refused.value)
    assert str(path) not in str(refused.value), "people read it"


def test_a_key_replaced_while_running(key_file: Path) -> None:
    keys = KeyFileTokens(key_file)
    keys.token_for("alice")
    other = key_file.with_name("new")
    other.write_bytes(KEY[::-1])
    other.chmod(0o600)
    other.replace(key_file)
    assert opened(keys.token_for("alice"), KEY[::-1])


def test_raw_bytes_are_the_key(key_file: Path) -> None:
    """A newline at the end, a NUL in the middle: all of it counts, as it does for Slurm."""
    odd = b"\0secret\xff\n" + KEY + b"\r\n"
    key_file.write_bytes(odd)
    assert opened(KeyFileTokens(key_file).token_for("alice"), odd)


def test_the_key_is_never_revealed(key_file: Path) -> None:
    key_file.write_bytes(b"top-secret-key!")
    key_file.chmod(0o600)
    with pytest.raises(SchedulerError) as refused:
        KeyFileTokens(key_file).token_for("alice")
    assert "top-secret" not in repr(refused.value) + repr(KeyFileTokens(key_file)) + repr(vars(KeyFileTokens(key_file)))


def made(exp: float | str) -> str:
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (
        b'{"alg":"HS256"}', f'{{"exp":{exp},"sun":"alice"}}'.encode(), b"signature"))  # fmt: skip


def broker(tmp_path: Path, code: str, *words: str) -> CommandTokens:
    """A site's command in Python that counts its calls in a file."""
    script = tmp_path / "broker.py"
    script.write_text(f"import sys, os, time\nopen({str(tmp_path / 'calls')!r}, 'a').write('x')\n{code}\n")
    return CommandTokens(" ".join([sys.executable, str(script), *words]))


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text())


@pytest.mark.parametrize("words", [(), ("--user={user}", "--more"), ("{user}",)])
def test_a_command_gets_the_user(tmp_path: Path, words: tuple[str, ...]) -> None:
    token = made(time.time() + 3600)
    ours = broker(tmp_path, f"print('hello', file=sys.stderr); print(sys.argv[1:]); print('SLURM_JWT={token}')", *words)
    assert ours.token_for("alice") == token
    text = [word.replace("{user}", "alice") for word in words] or ["alice"]
    check = broker(tmp_path, f"assert sys.argv[1:] == {text!r}; print('{token}')", *words)
    assert check.token_for("alice") == token


def test_a_command_s_token_is_cached_until_shortly_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    ours = broker(tmp_path, f"print('{made(now + 3600)}')")
    for _ in range(3):
        ours.token_for("alice")
    assert calls(tmp_path) == 1
    ours.token_for("bob")
    assert calls(tmp_path) == 2
    monkeypatch.setattr(time, "time", lambda: now + 3600 - 119)
    ours.token_for("alice")
    assert calls(tmp_path) == 3
    ours.forget("alice")
    ours.token_for("alice")
    assert calls(tmp_path) == 4


def test_a_token_near_its_end_is_used_and_requested_again(tmp_path: Path) -> None:
    ours = broker(tmp_path, f"print('{made(time.time() + 60)}')")
    assert ours.token_for("alice") == ours.token_for("alice")
    assert calls(tmp_path) == 2


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('not a token')", "is not a token"),
        ("", "is not a token"),
        ("print('a.b.c d')", "is not a token"),
        ("print('a.b.ü')", "is not a token"),
        ("os.write(1, b'\\xff\\xfe.\\x80.\\n')", "is not a token"),
        ("print('secret.secret.secret'); sys.exit(1)", "exited with code 1"),
        ("print('secret.secret.secret', flush=True); os.kill(os.getpid(), 9)", "exited with code -9"),
    ],
)
def test_commands_that_give_no_token(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(SchedulerError, match=message) as refused:
        broker(tmp_path, code).token_for("alice")
    assert "VIGIL_SLURM_TOKEN_COMMAND" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("code", ["time.sleep(60)", "os.system('sleep 60')", "os.fork() or time.sleep(60)"])
@pytest.mark.lengthy
def test_commands_that_hang_end_with_what_they_started(
    tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "COMMAND_TIMEOUT_S", 1.0)
    began = time.monotonic()
    with pytest.raises(SchedulerError, match="no token for alice within"):
        broker(tmp_path, f"open({str(tmp_path / 'group')!r}, 'w').write(str(os.getpgrp()))\n{code}\n").token_for(
            "alice"
        )
    assert time.monotonic() - began < 5
    group = int((tmp_path / "group").read_text())
    until(lambda: not lives(group), "its process group to end")


def lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("command", ["/nowhere/broker", "/dev/null", "/etc"])
def test_commands_that_cannot_be_run(command: str) -> None:
    with pytest.raises(SchedulerError, match="cannot be run"):
        CommandTokens(command).token_for("alice")


@pytest.mark.parametrize("command", ["", "  ", "broker 'alice"])
def test_commands_that_are_none(command: str) -> None:
    with pytest.raises(SchedulerError, match="VIGIL_SLURM_TOKEN_COMMAND") as refused:
        CommandTokens(command)
    assert refused.value.permanent


@pytest.mark.parametrize("exp", ["NaN", "null", '"soon"', "[]", "{}"])
def test_a_token_without_an_expiry_is_requested_again_soon(exp: str) -> None:
    assert time.time() < expiry_of(made(exp)) < time.time() + 600


@pytest.mark.parametrize(("exp", "end"), [("1e999", math.inf), ("-1e999", -math.inf)])
def test_an_end_without_end_is_believed(exp: str, end: float) -> None:
    assert expiry_of(made(exp)) == end


@pytest.mark.parametrize("token", ["a.b.c", "..", "a.e30.c", "a.W10.c", "a.MTI.c", "a.!!!!.c"])
def test_ends_of_tokens_that_are_none(token: str) -> None:
    assert expiry_of(token) > time.time()
