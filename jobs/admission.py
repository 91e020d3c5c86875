"""Who may submit what: every refusal that needs no scheduler, for submitting and for dry runs alike."""

from __future__ import annotations

from django.conf import settings

from jobs import upload
from jobs.errors import Problem, Refused, SpecError
from jobs.room import misfits
from jobs.spec import JobSpec
from portal.access import can
from portal.models import Project, User


def check(user: User, spec: JobSpec, *, code: bytes | None, dry: bool = False) -> Project:
    """The project to submit to, if nothing stops this person and this spec. `dry`: without looking into the code."""
    project = project_of(user, spec)
    check_trust(user, spec.kind)
    if problems := [*([] if dry and code is not None else _code_problems(spec, code)), *misfits(spec)]:
        raise SpecError(problems)
    return project


def project_of(user: User, spec: JobSpec) -> Project:
    """The project to submit to, or SpecError naming those that there are."""
    project = Project.objects.visible_to(user).filter(slug=spec.project).first()
    if project is not None and can(user, "submit", project):
        return project
    mine = ", ".join(Project.objects.visible_to(user).values_list("slug", flat=True)[:20])
    remedy = f"Choose one of {mine}." if mine else "You belong to none yet: ask a sysadmin to add you to one."
    raise SpecError.at("project", f'"{spec.project}" is not a project of yours. {remedy}')


def check_trust(user: User, kind: str) -> None:
    """The local scheduler runs everything as one Unix user: other people's code needs somebody's decision."""
    if settings.VIGIL_SCHEDULER != "local" or kind != "script" or user.is_sysadmin:
        return
    if settings.VIGIL_LOCAL_TRUST != "everyone" and not settings.VIGIL_LOCAL_USER:
        raise Refused(
            "Not submitted: jobs run as the portal's own Unix user here, so programs are taken from sysadmins only.",
            "A sysadmin can set VIGIL_LOCAL_USER to another Unix user for jobs, or VIGIL_LOCAL_TRUST=everyone.",
        )


def _code_problems(spec: JobSpec, code: bytes | None) -> list[Problem]:
    if spec.script is None:
        return [Problem("code", "Only a job of kind = script takes code. Leave it out.")] if code is not None else []
    if code is None:
        if spec.script.git:
            return []
        fix = (
            "The portal opens no folder of yours: send a tar.gz of it along, in the form under Code, over REST as the"
            " part named code. On the command line vigil submit packs and sends it. Or give git and ref."
        )
        return [Problem("script.directory", fix)]
    if spec.script.git:
        return [Problem("code", "The program comes from git; leave the upload out, or give directory instead.")]
    return upload.problems(code, entry=spec.script.entry)
