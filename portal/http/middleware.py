"""Provide the site's own middleware."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

from asgiref.sync import iscoroutinefunction
from csp.middleware import CSPMiddleware, PolicyParts
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.middleware.common import CommonMiddleware
from django.urls import is_valid_path
from django.utils.decorators import sync_and_async_middleware
from django.utils.http import escape_leading_slashes
from whitenoise.middleware import WhiteNoiseMiddleware

from portal.http import problems

# unfold evaluates expressions in the page and sets styles inline; only sysadmins reach it.
_RECORDS = {"script-src": ["'unsafe-eval'", "'unsafe-inline'"], "style-src": ["'unsafe-inline'"]}


class ContentSecurityPolicy(CSPMiddleware):
    """django-csp's middleware, with a slightly wider policy for /admin alone."""

    def get_policy_parts(
        self, request: HttpRequest, response: HttpResponseBase, report_only: bool = False
    ) -> PolicyParts:
        parts = super().get_policy_parts(request, response, report_only)
        if request.path_info.startswith("/admin/"):
            parts.update = {**(parts.update or {}), **_RECORDS}
        return parts


class Slashes(CommonMiddleware):
    """Redirect a page's address with a missing or surplus slash to the one that exists; nothing else.

    Only reads are redirected: a POST to a wrong address gets 404. Below /api, console.urls does the same.
    """

    def should_redirect_with_slash(self, request: HttpRequest) -> bool:
        path = request.path_info
        if request.method not in {"GET", "HEAD"} or path == "/api" or path.startswith("/api/"):
            return False
        if not path.endswith("/"):
            return super().should_redirect_with_slash(request)
        return not is_valid_path(path) and bool(is_valid_path(path[:-1]))

    def get_full_path_with_slash(self, request: HttpRequest) -> str:
        if not request.path_info.endswith("/"):
            return super().get_full_path_with_slash(request)
        path, mark, query = request.get_full_path().partition("?")
        return escape_leading_slashes(path.removesuffix("/")) + mark + query  # "//evil" would be another site


class StaticFiles(WhiteNoiseMiddleware):
    """whitenoise's middleware, sending each file in one piece: under ASGI Django reads it at once anyway, and warns."""

    @staticmethod
    def serve(static_file: Any, request: HttpRequest) -> HttpResponse:
        found = static_file.get_response(request.method, request.META)
        content = b""
        if found.file is not None:
            with found.file:
                content = found.file.read()
        response = HttpResponse(content, status=int(found.status))
        del response.headers["Content-Type"]
        for name, value in found.headers:
            response.headers[name] = value
        return response


@sync_and_async_middleware
def private(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase] | Callable[[HttpRequest], Awaitable[HttpResponseBase]]:
    """Forbid caching of responses by proxies and browsers: each is for one person at one moment.

    Static files are answered further out, and keep their own headers.
    """
    if iscoroutinefunction(get_response):

        async def answer_async(request: HttpRequest) -> HttpResponseBase:
            return _uncached(await get_response(request))

        return answer_async

    def answer(request: HttpRequest) -> HttpResponseBase:
        return _uncached(get_response(request))

    return answer


def _uncached(response: HttpResponseBase) -> HttpResponseBase:
    response.headers["Cache-Control"] = problems.PRIVATE
    return response


@sync_and_async_middleware
def problem_documents(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase] | Callable[[HttpRequest], Awaitable[HttpResponseBase]]:
    """Answer every error below /api/ with a problem document, even if the request never reached an endpoint."""
    if iscoroutinefunction(get_response):

        async def answer_async(request: HttpRequest) -> HttpResponseBase:
            return _problem_response(request, await get_response(request))

        return answer_async

    def answer(request: HttpRequest) -> HttpResponseBase:
        return _problem_response(request, get_response(request))

    return answer


def _problem_response(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    if not f"{request.path_info}/".startswith("/api/") or response.status_code < 400:
        return response
    if response.headers.get("Content-Type", "").startswith(problems.MEDIA_TYPE):
        return response
    if settings.DEBUG and response.status_code >= 500:
        return response  # Django's page with the traceback
    headers = {name: response.headers[name] for name in ("Allow", "Retry-After") if name in response.headers}
    problem: HttpResponse = problems.plain(response.status_code, headers)
    problem.cookies = cast(HttpResponse, response).cookies
    return problem
