"""Who may submit what: every refusal that needs no scheduler, for submitting and for dry runs alike."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django.conf import settings
from django.utils import timezone

from jobs.disk import environments, trust, upload
from jobs.errors import Problem, Refused, SpecError
from jobs.following import dependencies
from jobs.spec import JobSpec
from jobs.spec.slurm import AHEAD
from jobs.submitting import allowed, names
from jobs.submitting.room import misfits
from nodes.schedulers import choose
from portal.access import can
from portal.models import Project, User

LATE = timedelta(minutes=10)  # a moment that passed while somebody wrote the rest


def check(
    user: User, spec: JobSpec, *, code: bytes | None, alike: Sequence[JobSpec] = (), dry: bool = False
) -> Project:
    """The project to submit to, if nothing stops this person and this spec.

    `alike`: the others of a sweep. `dry`: without looking into the code.
    """
    project = project_of(user, spec)
    for one in (spec, *alike):
        trust.check_program(user, one)
    check_slurm_user(user)
    code_problems = [] if dry and code is not None else _code_problems((spec, *alike), code)
    problems = beside(user, spec, project, alike=alike)
    if problems and not dry and names.refresh(problem.field for problem in problems):
        problems = beside(user, spec, project, alike=alike)
    if problems := [*code_problems, *problems]:
        raise SpecError(problems)
    return project


def beside(user: User, spec: JobSpec, project: Project | None, *, alike: Sequence[JobSpec] = ()) -> list[Problem]:
    """What the specification itself cannot know: what there is, what it waits for, what the site runs jobs with.

    `alike`: the others of a sweep, which ask the scheduler for the same and differ in what they train.
    """
    found = list(dict.fromkeys(problem for one in (spec, *alike) for problem in trust.problems(user, one)))
    found += [*misfits(spec), *names.problems(spec), *_begin_problems(spec), *dependencies.problems(user, spec.after)]
    if project is not None:
        told = {problem.field for problem in found}
        found += [one for one in allowed.problems(user, spec, project, many=1 + len(alike)) if one.field not in told]
        try:
            found += environments.misfits(environments.of(spec, project))
        except SpecError as error:
            found += error.problems
    return found


def project_of(user: User, spec: JobSpec) -> Project:
    """The project to submit to, or SpecError naming those that there are."""
    project = Project.objects.visible_to(user).named(spec.project).first()
    if project is not None and can(user, "submit", project):
        return project
    mine = ", ".join(Project.objects.visible_to(user).values_list("slug", flat=True)[:20])
    remedy = f"Choose one of {mine}." if mine else "You belong to none yet: ask a sysadmin to add you to one."
    raise SpecError.at("project", f'"{spec.project}" is not a project of yours. {remedy}')


def check_slurm_user(user: User, *, doing: str = "submitted") -> None:
    """Slurm runs a job as its owner's own Unix user: whoever has none cannot submit."""
    if choose.capabilities_of(settings.VIGIL_SCHEDULER).runs_as_owner and not user.slurm_user:
        raise Refused(
            f"Not {doing}: {user} has no Slurm user yet, so Slurm would not know whose job it is.",
            "A sysadmin sets it under People in the administration.",
        )


def _begin_problems(spec: JobSpec) -> list[Problem]:
    """The problems with `begin`: a job of yesterday was meant for another day, and "+2h" is told from now."""
    now = timezone.now()
    moment = spec.settled(now=now, zone=timezone.get_default_timezone()).resources.begin_at
    if moment is not None and moment < now - LATE:
        return [Problem("resources.begin", f"{spec.resources.begin} has passed. Take begin out, or write a later one.")]
    if moment is not None and moment > now + AHEAD:
        return [Problem("resources.begin", f"{spec.resources.begin} is more than a year ahead. Write an earlier one.")]
    return []


def _code_problems(specs: Sequence[JobSpec], code: bytes | None) -> list[Problem]:
    """`specs`: one, or all of a sweep, which bring the same code, or none, and may want other files of it."""
    asked = next((spec.code for spec in specs if spec.code is not None), None)
    if asked is None:
        none = "Only a job with [script] takes code, or a federated one with [client]. Leave it out."
        return [Problem("code", none)] if code is not None else []
    if code is None:
        if asked.git:
            return []
        fix = (
            "The portal opens no folder of yours: send a tar.gz of it along, in the form under Code, over REST as the"
            " part named code. On the command line vigil submit packs and sends it. Or give git and ref."
        )
        return [Problem(f"{asked.TABLE}.directory", fix)]
    if asked.git:
        return [Problem("code", "The code comes from git; leave the upload out, or give directory instead.")]
    entries = {field: entry for spec in specs for field, entry in spec.entries.items()}
    return upload.problems(code, entries=entries, programs={"script.entry"})
