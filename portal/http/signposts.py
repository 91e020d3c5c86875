"""Redirect addresses that people type or guess. Only reads are redirected; posts are refused."""

from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe

# Temporary redirects: a browser caches a permanent one, even after a page of that name is added.
GUESSED_PATHS = {
    "account_login": ("login", "login/", "signin", "signin/", "sign-in"),
    "account_logout": ("logout", "logout/", "signout", "signout/", "sign-out"),
    "account_signup": ("signup", "signup/", "register", "register/"),
    "me": ("account", "profile", "tokens", "settings"),
    "home": ("home", "dashboard", "index.html"),
    "submit": ("jobs/new", "new"),
    "admin:index": ("records",),
    "ready": ("ready", "readyz/"),
    "docs": ("documentation", "help", "manual"),
    "api:openapi-view": ("api", "api/", "api/v1", "api/v1/", "api/docs/"),
    "api:openapi-json": ("openapi.json", "api/v1/openapi.json"),
}
DETAIL_ROUTES = {"job": "job/<int:job_id>", "sweep": "sweep/<int:sweep_id>", "node": "node/<str:name>"}


def _redirects(name: str, route: str) -> URLPattern:
    @csrf_exempt  # a POST should learn that nothing is accepted here, not that a token is missing
    @require_safe
    def redirect_read(request: HttpRequest, **named: int | str) -> HttpResponse:
        there = reverse(name, kwargs=named)
        query = request.META.get("QUERY_STRING", "")
        return HttpResponseRedirect(f"{there}?{query}" if query else there)

    return path(route, redirect_read)


urlpatterns = [
    *(_redirects(name, route) for name, routes in GUESSED_PATHS.items() for route in routes),
    *(_redirects(name, route) for name, route in DETAIL_ROUTES.items()),
]
