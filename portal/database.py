"""Handle a database that does not respond at the moment: locked by another writer, restarting, or out of connections.

That is temporary. HTTP requests are answered 503 with `Retry-After`, and tasks are retried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from celery import Task
from django.db import InterfaceError, OperationalError

RETRY_AFTER_S = 5
ERRORS = (OperationalError, InterfaceError)  # the second: PostgreSQL has closed the connection

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


def is_busy(error: BaseException | None) -> bool:
    """Return whether an exception was caused by a database that did not respond, however it was wrapped since.

    Django's session store, for one, turns a locked database into "the session was deleted".
    """
    return any(isinstance(cause, ERRORS) for cause in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


class RetriedTask(Task):
    """A task that is retried if the database did not respond: after 1, 2, 4, 8 and 16 s, each with random jitter.

    A tick whose time is over by then is dropped as it expires: the next one does its work.
    """

    autoretry_for = ERRORS
    max_retries = 5
    retry_backoff = 1
    retry_backoff_max = 30
    retry_jitter = True

    def on_retry(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        logger.warning("%s: the database did not answer and the task is retried: %s", self.name, exc)


def retried(work: Callable[[], _Result], *, waits_s: tuple[float, ...] = (0.5, 2.0)) -> _Result:
    """Run short work that must not be lost, such as recording that a message was sent; retry after each wait.

    Raises OperationalError or InterfaceError if the last attempt fails as well. Not for use in a transaction.
    """
    for wait_s in waits_s:
        try:
            return work()
        except ERRORS as error:
            logger.warning("the database did not answer, retrying in %g s: %s", wait_s, error)
            time.sleep(wait_s)
    return work()
