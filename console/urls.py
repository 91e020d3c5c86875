"""Map every URL of the site."""

from allauth.account import views as allauth
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.templatetags.static import static
from django.urls import Resolver404, include, path, re_path, resolve
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import RedirectView

import jobs.admin  # noqa: F401  (its records in the administration)
import nodes.admin  # noqa: F401
from console.pages import metrics, readiness
from jobs.api import attach as attach_api
from jobs.api import jobs as jobs_api
from jobs.api import queue as queue_api
from jobs.api import reports as reports_api
from jobs.api import request as request_api
from jobs.api import sweeps as sweeps_api
from jobs.api import wake as wake_api
from jobs.api import why as why_api
from jobs.api.cluster_tests import acceptances as acceptances_api
from jobs.api.cluster_tests import burnins as burnins_api
from jobs.api.cluster_tests import gamedays as gamedays_api
from jobs.api.failures import catalogue as catalogue_api
from jobs.api.failures import incidents as incidents_api
from jobs.api.failures import postmortem as postmortem_api
from jobs.api.failures import reliability as reliability_api
from jobs.api.failures import runbooks as runbooks_api
from jobs.api.runs import cadence as cadence_api
from jobs.api.runs import checkpoints as checkpoints_api
from jobs.api.runs import environment as environment_api
from jobs.api.runs import logs as logs_api
from jobs.api.runs import profiles as profiles_api
from jobs.api.runs import rounds as rounds_api
from jobs.api.runs import series as series_api
from jobs.api.telemetry import all_gpus as all_gpus_api
from jobs.api.telemetry import gpus as gpus_api
from jobs.api.telemetry import machine_files as machine_files_api
from jobs.api.usage import disk as disk_api
from jobs.api.usage import waste as waste_api
from nodes.api import agents as agents_api
from nodes.api import drains as drains_api
from nodes.api import health as health_api
from nodes.api import health_rules as health_rules_api
from nodes.api import inventory as inventory_api
from nodes.api import maintenance as maintenance_api
from nodes.api import nodes as nodes_api
from nodes.api import racks as racks_api
from nodes.api import spares as spares_api
from portal.accounts import api as accounts_api
from portal.accounts import views
from portal.announcements import api as announcements_api
from portal.announcements.current import add_header
from portal.http import problems
from portal.http.api import make_api
from portal.notices import api as notices_api
from portal.notices import outbox_api
from portal.notices import views as channels
from portal.records import site

api = make_api()
api.add_decorator(add_header, mode="view")
request_api.install(api)
api.add_router("/v1", accounts_api.router)
api.add_router("/v1/announcements", announcements_api.router)
api.add_router("/v1/notices", notices_api.router)
api.add_router("/v1/outbox", outbox_api.router)
api.add_router("/v1/jobs", jobs_api.router)
api.add_router("/v1/jobs", attach_api.router)
api.add_router("/v1/jobs", cadence_api.router)
api.add_router("/v1/jobs", checkpoints_api.router)
api.add_router("/v1/jobs", environment_api.router)
api.add_router("/v1/jobs", gpus_api.router)
api.add_router("/v1/jobs", logs_api.router)
api.add_router("/v1/jobs", postmortem_api.router)
api.add_router("/v1/jobs", profiles_api.router)
api.add_router("/v1/jobs", rounds_api.router)
api.add_router("/v1/jobs", series_api.router)
api.add_router("/v1/jobs", why_api.router)
api.add_router("/v1/catalogue", catalogue_api.router)
api.add_router("/v1/runbooks", runbooks_api.router)
api.add_router("/v1/sweeps", sweeps_api.router)
api.add_router("/v1/projects", disk_api.router)
api.add_router("/v1/spec", jobs_api.spec_router)
api.add_router("/v1", reports_api.router)
api.add_router("/v1/nodes", nodes_api.router)
api.add_router("/v1/nodes", machine_files_api.router)
api.add_router("/v1/drains", drains_api.router)
api.add_router("/v1/health/rules", health_rules_api.router)
api.add_router("/v1/health", health_api.router)
api.add_router("/v1/spares", spares_api.router)
api.add_router("/v1/maintenance", maintenance_api.router)
api.add_router("/v1/policies", health_rules_api.policy_router)
api.add_router("/v1/burnins", burnins_api.router)
api.add_router("/v1/inventory", inventory_api.router)
api.add_router("/v1/gamedays", gamedays_api.router)
api.add_router("/v1/acceptances", acceptances_api.router)
api.add_router("/v1/agents", agents_api.router)
api.add_router("/v1/racks", racks_api.router)
api.add_router("/v1/gpus", all_gpus_api.router)
api.add_router("/v1", nodes_api.cluster)
api.add_router("/v1", incidents_api.router)
api.add_router("/v1", queue_api.router)
api.add_router("/v1", waste_api.router)
api.add_router("/v1", reliability_api.router)
api.add_router("/v1/scheduler", wake_api.router)


@csrf_exempt  # changes nothing; clients should learn about the wrong address, not a missing CSRF token
def no_such_endpoint(request: HttpRequest, rest: str) -> HttpResponse:
    """Answer unknown addresses below /api. A trailing slash redirects only a GET, as others would lose their body."""
    there = request.path_info.removesuffix("/")
    if there == request.path_info or not _is_endpoint(there):
        return problems.plain(404)
    if request.method in {"GET", "HEAD"}:
        query = request.META.get("QUERY_STRING", "")
        return redirect(f"{there}?{query}" if query else there, permanent=True)
    remedy = f"The API's addresses end without a slash: {request.method} {there}. Nothing was changed."
    return problems.Problem(404, remedy, kind="slash").response()


def _is_endpoint(path: str) -> bool:
    try:
        return resolve(path).func is not no_such_endpoint
    except Resolver404:
        return False


def alive(request: HttpRequest) -> HttpResponse:
    """Return 200 while this process answers; /readyz says whether everything works."""
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
    path("password/new/", views.set_password, name="set_password"),
    path("password/set/", RedirectView.as_view(pattern_name="set_password"), name="account_set_password"),
    path("link/<str:secret>/", views.login_link, name="login_link"),
]
urlpatterns = [
    path("", include("console.pages.urls")),
    path("", include("jobs.urls")),
    path("accounts/", include(accounts)),
    path("me/", views.me, name="me"),
    path("me/tokens/", views.make_token, name="tokens"),
    path("me/tokens/<int:token_id>/revoke/", views.revoke_token, name="token_revoke"),
    path("me/sent", channels.sent, name="sent"),
    path("outbox", channels.outbox, name="outbox"),
    path("outbox/<int:delivery_id>/resend", channels.resend, name="delivery_resend"),
    path("outbox/<int:delivery_id>/give-up", channels.give_up, name="delivery_give_up"),
    path("channels/new", channels.new, name="channel_new"),
    path("channels/<int:channel_id>", channels.channel_page, name="channel"),
    path("channels/<int:channel_id>/test", channels.send_test, name="channel_test"),
    path("channels/<int:channel_id>/secret", channels.new_secret, name="channel_secret"),
    path("channels/<int:channel_id>/remove", channels.remove, name="channel_remove"),
    path("", include("portal.http.signposts")),
    path("api/", api.urls),
    re_path(r"^api/(?P<rest>.*)$", no_such_endpoint),
    path("favicon.ico", favicon),
    path("healthz", alive, name="alive"),
    path("readyz", readiness.readyz, name="ready"),
    path("metrics", metrics.page, name="metrics"),
    path("admin/login/", RedirectView.as_view(pattern_name="account_login", query_string=True)),
    path("admin/", site.urls),
]

handler400 = "portal.http.errors.bad_request"
handler500 = "portal.http.errors.server_error"
