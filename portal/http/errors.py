"""Answer exceptions that nobody caught, in any middleware, view or admin page.

Django calls these handlers for every such exception, in the API and elsewhere (console.urls names them).
"""

from __future__ import annotations

import logging
import sys

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.template import loader
from django.views import defaults

from portal import database

log = logging.getLogger(__name__)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponseBase:
    """Answer 400, or 503 if the database did not respond: Django reports a session that it cannot save as deleted."""
    return busy(request, exception) if database.is_busy(exception) else defaults.bad_request(request, exception)


def server_error(request: HttpRequest) -> HttpResponseBase:
    """Answer 500, or 503 if the database did not respond."""
    error = sys.exc_info()[1]
    return busy(request, error) if database.is_busy(error) else defaults.server_error(request)


def busy(request: HttpRequest, error: BaseException | None) -> HttpResponse:
    """Answer 503 with `Retry-After`. The page reads nothing from the database."""
    log.error("%s %s: the database did not answer: %s", request.method, request.path, error)
    page = loader.get_template("503.html").render()
    return HttpResponse(page, status=503, headers={"Retry-After": str(database.RETRY_AFTER_S)})
