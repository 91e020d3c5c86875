"""Wake the follower when Slurm reports a change by itself (`portal.wakes`): it runs sooner what a tick runs anyway."""

from __future__ import annotations

import hmac
import time
from hashlib import sha256

from django.conf import settings
from django.core.cache import cache

from portal.http.problems import Problem
from portal.wakes import FOLLOWER, mark

ECHO_KEY = "vigil:wake:echo"
# When to poll again: Slurm calls its hooks some moments before the job's new state can be read.
ECHOES_S = (0.3, 0.7)
MAX_WRONG_SECRETS = 30  # wrong secrets per minute and web process


def admit(authorization: str) -> None:
    """Raise Problem unless the caller presents VIGIL_PUSH_SECRET."""
    wanted = settings.VIGIL_PUSH_SECRET
    if not wanted:
        raise Problem(404, "The follower cannot be woken here: VIGIL_PUSH_SECRET is not set.", kind="push-off")
    scheme, _, secret = authorization.partition(" ")
    # Digests of equal length, whatever was sent, so that the time of the comparison reveals nothing.
    is_right = hmac.compare_digest(_digest(secret.strip()), _digest(wanted))
    if is_right and scheme.lower() == "bearer":
        return
    if _count_wrong_secrets() > MAX_WRONG_SECRETS:
        raise Problem(429, "Too many wrong secrets: try again in a minute.", headers={"Retry-After": "60"})
    headers = {"WWW-Authenticate": 'Bearer realm="Vigil"'}
    raise Problem(401, "The bearer token is not VIGIL_PUSH_SECRET.", kind="unauthorized", headers=headers)


def echo(number: int) -> None:
    """Have the follower poll again shortly: one series of echoes at a time, begun by the first wake."""
    if number < len(ECHOES_S) and (number > 0 or mark(ECHO_KEY, sum(ECHOES_S))):
        FOLLOWER.send(number + 1, countdown=ECHOES_S[number])


def _digest(text: str) -> bytes:
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def _count_wrong_secrets() -> int:
    key = f"push-guesses:{int(time.time() // 60)}"
    cache.add(key, 0, timeout=120)
    try:
        return cache.incr(key)
    except ValueError:  # evicted in between
        return 0
