"""Every address of the site."""

from allauth.account import views as allauth
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.templatetags.static import static
from django.urls import include, path, re_path
from django.views.generic import RedirectView

import jobs.admin  # noqa: F401  (its records in the administration)
import nodes.admin  # noqa: F401
from jobs.api import asking
from jobs.api import attach as attach_api
from jobs.api import disk as disk_api
from jobs.api import environment as environment_api
from jobs.api import jobs as jobs_api
from jobs.api import logs as logs_api
from jobs.api import profiles as profiles_api
from jobs.api import queue as queue_api
from jobs.api import reports as reports_api
from jobs.api import series as series_api
from jobs.api import sweeps as sweeps_api
from jobs.api import wake as wake_api
from jobs.api import why as why_api
from nodes import api as nodes_api
from portal import dashboard, people, person, problems, shell
from portal.admin import site
from portal.api import make_api

api = make_api()
asking.install(api)
api.add_router("/v1", people.router)
api.add_router("/v1/jobs", jobs_api.router)
api.add_router("/v1/jobs", attach_api.router)
api.add_router("/v1/jobs", environment_api.router)
api.add_router("/v1/jobs", logs_api.router)
api.add_router("/v1/jobs", profiles_api.router)
api.add_router("/v1/jobs", series_api.router)
api.add_router("/v1/jobs", why_api.router)
api.add_router("/v1/sweeps", sweeps_api.router)
api.add_router("/v1/projects", disk_api.router)
api.add_router("/v1/spec", jobs_api.spec_router)
api.add_router("/v1", reports_api.router)
api.add_router("/v1/nodes", nodes_api.router)
api.add_router("/v1", nodes_api.cluster)
api.add_router("/v1", queue_api.router)
api.add_router("/v1/scheduler", wake_api.router)


def no_such_endpoint(request: HttpRequest, rest: str) -> HttpResponse:
    return problems.plain(404)


def alive(request: HttpRequest) -> HttpResponse:
    """That this process answers; whether everything works is `vigil check`'s business."""
    return HttpResponse("ok\n", content_type="text/plain")


def favicon(request: HttpRequest) -> HttpResponse:
    return redirect(static("favicon.svg"))


accounts = [
    path("login/", allauth.login, name="account_login"),
    path("logout/", allauth.logout, name="account_logout"),
    path("inactive/", allauth.account_inactive, name="account_inactive"),
    path("signup/", allauth.signup, name="account_signup"),  # says that it is closed
    path("reauthenticate/", allauth.reauthenticate, name="account_reauthenticate"),
    path("password/change/", allauth.password_change, name="account_change_password"),
    path("password/new/", person.set_password, name="set_password"),
    path("password/set/", RedirectView.as_view(pattern_name="set_password"), name="account_set_password"),
    path("link/<str:secret>/", person.login_link, name="login_link"),
]
urlpatterns = [
    path("", dashboard.home, name="home"),
    path("seen", dashboard.seen, name="seen"),
    path("theme", shell.theme, name="theme"),
    path("", include("jobs.urls")),
    path("accounts/", include(accounts)),
    path("me/", person.me, name="me"),
    path("me/tokens/", person.make_token, name="tokens"),
    path("me/tokens/<int:token_id>/revoke/", person.revoke_token, name="token_revoke"),
    path("api/", api.urls),
    re_path(r"^api/(?P<rest>.*)$", no_such_endpoint),
    path("favicon.ico", favicon),
    path("healthz", alive, name="alive"),
    path("admin/login/", RedirectView.as_view(pattern_name="account_login", query_string=True)),
    path("admin/", site.urls),
]
