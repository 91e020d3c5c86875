"""Answer /readyz: whether the whole portal works; and provide the home page's banner with what does not.

/readyz is public, like /healthz: load balancers and orchestrators have no token. So it names checks and problems, but
no path, machine, address or person: those are on the banner and in `vigil check portal`, for sysadmins.
"""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_safe

from console.health import run
from console.health.finding import Finding
from portal.models import User

BANNER_S = 40.0  # the watcher of a web process makes a report every ten seconds


@require_safe
def readyz(request: HttpRequest) -> HttpResponse:
    """Answer 200 if everything works, else 503 and why; `?only=web` asks whether this process can serve.

    JSON, or lines of text where the request accepts text/plain.
    """
    report = run.serving_report() if request.GET.get("only") == "web" else run.current()
    errors, warnings, unchecked = report.errors, report.warnings, list(report.unchecked)
    response: HttpResponse
    if "text/plain" in request.headers.get("Accept", ""):
        lines = [
            "not ready" if errors else "ready",
            *(f"{finding.level}: {finding.title}" for finding in [*errors, *warnings, *unchecked]),
        ]
        response = HttpResponse("\n".join(lines) + "\n", content_type="text/plain; charset=utf-8")
    else:
        response = JsonResponse(
            {
                "ready": not errors, "errors": _public(errors), "warnings": _public(warnings),
                "unchecked": _public(unchecked),
            }
        )  # fmt: skip
    response.status_code = 503 if errors else 200
    response["Cache-Control"] = "no-store"
    response._has_been_logged = True  # type: ignore[attr-defined]  # else Django logs an error for each 503
    if errors:
        response["Retry-After"] = "10"
    return response


def _public(findings: list[Finding]) -> list[dict[str, str]]:
    return [{"check": finding.check, "code": finding.code, "message": finding.title} for finding in findings]


def banner(user: User) -> tuple[Finding, ...]:
    """Return what is wrong with the portal, for a sysadmin; the page never waits for the checks."""
    report = run.latest(BANNER_S) if user.is_sysadmin else None
    return report.findings if report else ()
