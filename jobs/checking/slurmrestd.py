"""slurmrestd: whether it is there, whom it believes, what it speaks, and what time it is for Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from jobs.checking.finding import Finding, bad, of_error, ok, warn
from jobs.checking.site import Site
from nodes.schedulers.base import SchedulerError
from nodes.schedulers.clock import offset_s
from nodes.schedulers.slurm.http import SlurmError, SlurmUnreachable
from nodes.schedulers.slurm.tokens import TokenSource
from nodes.schedulers.slurm.versions import COMPLETE_API, NEWEST, text_of

APART_S = 30  # clocks
FAR_APART_S = 300  # a token is good for 900 s


def reach(site: Site) -> Iterator[Finding]:
    title = "slurmrestd answers"
    try:
        served = site.rest.http.api
    except SchedulerError as error:
        yield of_error(
            title, error, "" if isinstance(error, SlurmUnreachable) else "Check VIGIL_SLURM_URL and slurmrestd's log."
        )
        return
    accounts = f", accounts in {served.version_of('slurmdb')}" if served.slurmdb else ""
    yield ok(title, f"{site.url} speaks {served.version_of('slurm')}{accounts}")
    parts = urlsplit(site.url)
    if parts.scheme == "http" and parts.hostname not in {"127.0.0.1", "::1", "localhost"}:
        remedy = "Put TLS before slurmrestd and write https://…, or let it listen on a unix socket."
        yield warn("The way to slurmrestd", "http over a network: tokens can be read on the way", remedy)
    elif parts.scheme == "https":
        yield ok("The way to slurmrestd", "https, its certificate verified")
    else:
        yield ok("The way to slurmrestd", "a unix socket" if parts.scheme == "unix" else "this machine's own")


def believed(site: Site) -> Iterator[Finding]:
    """Asks what only somebody who is believed gets answered: a ping is answered to everybody."""
    title = f"Slurm believes {site.user}"
    try:
        site.rest.clock()
    except SlurmError as error:
        remedy = "Is the key that of AuthAltParameters=jwt_key=… in slurm.conf? Do the clocks agree? Is slurmctld up?"
        yield of_error(title, error, remedy)
        return
    yield ok(title, f"a token of {site.user} was taken")


def speaks(site: Site) -> Iterator[Finding]:
    title, version = "Slurm's version", site.rest.version
    spoken = f"Slurm {site.release}, REST {site.rest.http.api.version_of('slurm')}"
    if site.rest.http.api.is_untested:
        remedy = f"Let slurmrestd serve {text_of(NEWEST)} as well (-d {text_of(NEWEST)}), or upgrade Vigil."
        detail = f"{spoken}, newer than any that Vigil was tested with: it reads, and submits and changes nothing"
        yield warn(title, detail, remedy)
        return
    if version >= COMPLETE_API:
        yield ok(title, f"{spoken}: nothing is lacking")
        return
    lacking = "has no words for draining nodes, nor for jobs on nodes by name"
    try:
        _ = site.conf
    except SchedulerError as error:
        remedy = "Install scontrol with this cluster's slurm.conf beside the worker, or Slurm 23.11."
        yield warn(title, f"{spoken}, which {lacking}; {str(error).partition('. ')[0]}", remedy)
        return
    yield ok(title, f"{spoken}, which {lacking}: scontrol does that, and takes our token")


class ForgedTokens:
    """Tokens with valid claims and an invalid signature."""

    def __init__(self, real: TokenSource) -> None:
        self.real = real

    def token_for(self, user: str) -> str:
        head, claims, signature = self.real.token_for(user).split(".")
        return f"{head}.{claims}.{'A' * len(signature)}"

    def forget(self, user: str) -> None:
        self.real.forget(user)


def rejects_forged_tokens(site: Site) -> Iterator[Finding]:
    title = "Slurm refuses a forged token"
    rest = site.rest_with(ForgedTokens(site.tokens))
    try:
        rest.clock()
    except SlurmUnreachable as error:
        yield of_error(title, error)
    except SchedulerError:
        yield ok(title, "refused")
    else:
        remedy = "Start slurmrestd with -a rest_auth/jwt alone: as it is, whoever reaches it may be anybody."
        yield bad(title, "taken: authentication is off", remedy)
    finally:
        rest.http.close()


def clocks(site: Site) -> Iterator[Finding]:
    title = "The clocks agree"
    offset = offset_s(site.rest.clock)
    if offset is None:
        yield warn(title, "Slurm does not say what time it is for it", "Let NTP set the clocks of both machines.")
        return
    apart = abs(offset)
    detail = f"{apart:.0f} s apart"
    remedy = "Let NTP (chrony, systemd-timesyncd) set the clocks of the portal's machine and of slurmctld's."
    if apart > FAR_APART_S:
        yield bad(title, detail, remedy)
    elif apart > APART_S:
        yield warn(title, detail, remedy)
    else:
        yield ok(title, detail)
