"""Wake the follower when Slurm reports a change by itself. It only runs sooner what a tick runs anyway.

However many requests come, one wake is on its way at a time, and no two begin within SPACING_S. A wake that begins
makes room for the next one before it polls, so a change after that poll is seen by another. Redis stores these marks,
which expire by themselves: without Redis, or with a lost task, the tick of every two seconds goes on.
"""

from __future__ import annotations

import hmac
import logging
import time
from hashlib import sha256

import redis
from django.conf import settings
from django.core.cache import cache

from jobs.queueing import queue
from portal.http.problems import Problem
from portal.publish import connection

logger = logging.getLogger(__name__)

PENDING_KEY, BEGUN_KEY, ECHO_KEY = "vigil:wake", "vigil:wake:begun", "vigil:wake:echo"
LOST_S = 5  # a wake that has not begun by then counts as lost
SPACING_S = 0.25
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


def request() -> bool:
    """Have the follower run a tick at once. Return whether one will run, be it by an earlier request."""
    try:
        with connection().pipeline(transaction=False) as pipe:
            pipe.set(PENDING_KEY, 1, nx=True, ex=LOST_S)
            pipe.exists(BEGUN_KEY)
            is_first, is_soon = pipe.execute()
    except (redis.RedisError, OSError) as error:
        logger.warning("the follower is not woken, its next tick runs anyway: %s", error)
        return False
    if is_first:
        queue("jobs.tasks.wake", countdown=SPACING_S if is_soon else None)
    return True


def begin() -> None:
    """Note that the follower polls from now on: later changes need another wake."""
    _mark(BEGUN_KEY, SPACING_S)
    try:
        connection().delete(PENDING_KEY)
    except (redis.RedisError, OSError):
        logger.warning("Redis does not respond: the next wake may be %s s late", LOST_S)


def echo(number: int) -> None:
    """Have the follower poll again shortly: one series of echoes at a time, begun by the first wake."""
    if number < len(ECHOES_S) and (number > 0 or _mark(ECHO_KEY, sum(ECHOES_S))):
        queue("jobs.tasks.wake", number + 1, countdown=ECHOES_S[number])


def _mark(name: str, seconds: float) -> bool:
    """Set a mark that expires by itself. Return whether it was not set before."""
    try:
        return bool(connection().set(name, 1, nx=True, px=int(seconds * 1000)))
    except (redis.RedisError, OSError):
        return False


def _digest(text: str) -> bytes:
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def _count_wrong_secrets() -> int:
    key = f"push-guesses:{int(time.time() // 60)}"
    cache.add(key, 0, timeout=120)
    try:
        return cache.incr(key)
    except ValueError:  # evicted in between
        return 0
