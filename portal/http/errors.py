"""The answer to an exception that nobody caught, whichever middleware, view or admin page it comes from.

Django calls these for every such exception, outside of the API and in it (portal.urls names them).
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
    """400, unless it comes of a database that does not answer: a session that cannot be saved is called deleted."""
    return busy(request, exception) if database.is_busy(exception) else defaults.bad_request(request, exception)


def server_error(request: HttpRequest) -> HttpResponseBase:
    """500, unless the database does not answer."""
    error = sys.exc_info()[1]
    return busy(request, error) if database.is_busy(error) else defaults.server_error(request)


def busy(request: HttpRequest, error: BaseException | None) -> HttpResponse:
    """Ask to come again. The page reads nothing from the database."""
    log.error("%s %s: the database did not answer: %s", request.method, request.path, error)
    page = loader.get_template("503.html").render()
    return HttpResponse(page, status=503, headers={"Retry-After": str(database.RETRY_AFTER_S)})
