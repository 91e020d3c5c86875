"""Check slurmrestd: reachable, tokens accepted and refused, its version, and the clocks."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from jobs.slurm_check.checked_site import CheckedSite
from jobs.slurm_check.finding import CheckFinding, failed, from_exception, ok, warn
from nodes.schedulers.base import SchedulerError
from nodes.schedulers.clock import offset_s
from nodes.schedulers.slurm.http import SlurmError, SlurmUnreachable
from nodes.schedulers.slurm.tokens import TokenSource
from nodes.schedulers.slurm.versions import COMPLETE_API, NEWEST, text_of

APART_S = 30  # clocks
FAR_APART_S = 300  # a token is good for 900 s


def reach(site: CheckedSite) -> Iterator[CheckFinding]:
    title = "slurmrestd responds"
    try:
        served = site.rest.http.api
    except SchedulerError as error:
        yield from_exception(
            title, error, "" if isinstance(error, SlurmUnreachable) else "Check VIGIL_SLURM_URL and slurmrestd's log."
        )
        return
    accounts = f", accounts in {served.version_of('slurmdb')}" if served.slurmdb else ""
    yield ok(title, f"{site.url} speaks {served.version_of('slurm')}{accounts}")
    parts = urlsplit(site.url)
    if parts.scheme == "http" and parts.hostname not in {"127.0.0.1", "::1", "localhost"}:
        remedy = "Put TLS before slurmrestd and write https://…, or let it listen on a unix socket."
        yield warn("Connection to slurmrestd", "http over a network: tokens can be read on the way", remedy)
    elif parts.scheme == "https":
        yield ok("Connection to slurmrestd", "https, its certificate verified")
    else:
        yield ok("Connection to slurmrestd", "a unix socket" if parts.scheme == "unix" else "this machine's own")


def accepts_token(site: CheckedSite) -> Iterator[CheckFinding]:
    """Check that a token is accepted, by a query that needs one: a ping is answered for everybody."""
    title = f"Slurm accepts tokens of {site.user}"
    try:
        site.rest.clock()
    except SlurmError as error:
        remedy = "Is the key that of AuthAltParameters=jwt_key=… in slurm.conf? Do the clocks agree? Is slurmctld up?"
        yield from_exception(title, error, remedy)
        return
    yield ok(title, f"a token of {site.user} was accepted")


def supports(site: CheckedSite) -> Iterator[CheckFinding]:
    title, version = "Slurm's version", site.rest.version
    versions = f"Slurm {site.release}, REST {site.rest.http.api.version_of('slurm')}"
    if site.rest.http.api.is_untested:
        remedy = f"Let slurmrestd serve {text_of(NEWEST)} as well (-d {text_of(NEWEST)}), or upgrade Vigil."
        detail = f"{versions}, newer than any version that Vigil was tested with: it only reads"
        yield warn(title, detail, remedy)
        return
    if version >= COMPLETE_API:
        lacking, newer = "cannot reserve nodes for burn-ins and maintenance", ""
    else:
        lacking, newer = "cannot drain or reserve nodes, nor run jobs on nodes by name", ", or use Slurm 23.11 or later"
    try:
        _ = site.conf
    except SchedulerError as error:
        remedy = f"Install scontrol with this cluster's slurm.conf on the worker's machine{newer}."
        yield warn(title, f"{versions}, which {lacking}; {str(error).partition('. ')[0]}", remedy)
        return
    yield ok(title, f"{versions}, which {lacking}: scontrol does that with our token")


class ForgedTokens:
    """Tokens with the same claims and an invalid signature."""

    def __init__(self, real: TokenSource) -> None:
        self.real = real

    def token_for(self, user: str) -> str:
        head, claims, signature = self.real.token_for(user).split(".")
        return f"{head}.{claims}.{'A' * len(signature)}"

    def forget(self, user: str) -> None:
        self.real.forget(user)


def refuses_forged_token(site: CheckedSite) -> Iterator[CheckFinding]:
    title = "Slurm refuses a forged token"
    rest = site.rest_with(ForgedTokens(site.tokens))
    try:
        rest.clock()
    except SlurmUnreachable as error:
        yield from_exception(title, error)
    except SchedulerError:
        yield ok(title, "refused")
    else:
        remedy = "Start slurmrestd with -a rest_auth/jwt alone: as it is, anybody who reaches it can act as any user."
        yield failed(title, "accepted: authentication is off", remedy)
    finally:
        rest.http.close()


def clocks(site: CheckedSite) -> Iterator[CheckFinding]:
    title = "The clocks agree"
    offset = offset_s(site.rest.clock)
    if offset is None:
        yield warn(title, "Slurm does not report its time", "Let NTP set the clocks of both machines.")
        return
    apart = abs(offset)
    detail = f"{apart:.0f} s apart"
    remedy = "Let NTP (chrony, systemd-timesyncd) set the clocks of the portal's machine and of slurmctld's."
    if apart > FAR_APART_S:
        yield failed(title, detail, remedy)
    elif apart > APART_S:
        yield warn(title, detail, remedy)
    else:
        yield ok(title, detail)
