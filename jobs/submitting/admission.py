"""Decide who may submit what: every refusal that needs no scheduler, for submissions and dry runs alike."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django.conf import settings
from django.utils import timezone

from jobs import code_permission, environments
from jobs.disk import upload
from jobs.errors import Problem, Refused, SpecError
from jobs.following.submission import dependencies
from jobs.spec import JobSpec
from jobs.spec.slurm import MAX_BEGIN_DELAY
from jobs.submitting import names, scheduler_limits
from jobs.submitting.node_capacity import capacity_problems
from nodes.schedulers import choose
from portal.access import can
from portal.models import Project, User

PAST_TOLERANCE = timedelta(minutes=10)  # tolerance for a moment that passed while somebody wrote the spec


def check(
    user: User, spec: JobSpec, *, code: bytes | None, others: Sequence[JobSpec] = (), dry: bool = False
) -> Project:
    """Return the project to submit to, or raise if this person may not submit this spec.

    `others`: the other specs of a sweep. `dry`: do not open the code.
    """
    project = project_of(user, spec)
    for job_spec in (spec, *others):
        code_permission.check_program(user, job_spec)
    check_slurm_user(user)
    code_problems = [] if dry and code is not None else _code_problems((spec, *others), code)
    problems = site_problems(user, spec, project, others=others)
    if problems and not dry and names.refresh(problem.field for problem in problems):
        problems = site_problems(user, spec, project, others=others)
    if problems := [*code_problems, *problems]:
        raise SpecError(problems)
    return project


def site_problems(
    user: User, spec: JobSpec, project: Project | None, *, others: Sequence[JobSpec] = ()
) -> list[Problem]:
    """Return problems that the specification alone cannot show: resources, predecessors, the site's environment.

    `others`: the other specs of a sweep, which request the same resources and differ in what they train.
    """
    specs = (spec, *others)
    problems = list(
        dict.fromkeys(problem for job_spec in specs for problem in code_permission.problems(user, job_spec))
    )
    problems += [
        *capacity_problems(spec),
        *names.problems(spec),
        *_begin_problems(spec),
        *dependencies.problems(user, spec.after),
    ]
    if project is not None:
        fields = {problem.field for problem in problems}
        problems += [
            problem
            for problem in scheduler_limits.problems(user, spec, project, many=1 + len(others))
            if problem.field not in fields
        ]
        try:
            problems += environments.unsupported(environments.environment_of(spec, project))
        except SpecError as error:
            problems += error.problems
    return problems


def project_of(user: User, spec: JobSpec) -> Project:
    """Return the project to submit to, or raise SpecError that lists the possible ones."""
    project = Project.objects.visible_to(user).named(spec.project).first()
    if project is not None and can(user, "submit", project):
        return project
    slugs = ", ".join(Project.objects.visible_to(user).values_list("slug", flat=True)[:20])
    remedy = f"Choose one of {slugs}." if slugs else "You are in no project yet: ask a sysadmin to add you to one."
    raise SpecError.at("project", f'"{spec.project}" is not a project of yours. {remedy}')


def check_slurm_user(user: User, *, doing: str = "submitted") -> None:
    """Raise Refused if the person has no Slurm user: Slurm runs a job as its owner's own Unix user."""
    if choose.capabilities_of(settings.VIGIL_SCHEDULER).runs_as_owner and not user.slurm_user:
        raise Refused(
            f"Not {doing}: {user} has no Slurm user yet, so Slurm cannot run the job as its owner.",
            "A sysadmin can set it under People in the administration.",
        )


def _begin_problems(spec: JobSpec) -> list[Problem]:
    """Return the problems with `begin`: it has passed, or is too far ahead. "+2h" counts from now."""
    now = timezone.now()
    moment = spec.with_absolute_begin(now=now, zone=timezone.get_default_timezone()).resources.begin_at
    if moment is not None and moment < now - PAST_TOLERANCE:
        return [Problem("resources.begin", f"{spec.resources.begin} has passed. Remove begin, or set a later time.")]
    if moment is not None and moment > now + MAX_BEGIN_DELAY:
        return [Problem("resources.begin", f"{spec.resources.begin} is more than a year ahead. Set an earlier time.")]
    return []


def _code_problems(specs: Sequence[JobSpec], code: bytes | None) -> list[Problem]:
    """Return the problems with the code.

    `specs`: one, or all of a sweep, which share the code and may use other files of it.
    """
    code_spec = next((spec.code for spec in specs if spec.code is not None), None)
    if code_spec is None:
        none = "Only a job with [script], or a federated one with [client], takes code. Leave it out."
        return [Problem("code", none)] if code is not None else []
    if code is None:
        if code_spec.git:
            return []
        fix = (
            "The portal cannot read your folder: upload a tar.gz of it, in the form under Code, over REST as the"
            " part named code. On the command line vigil submit packs and sends it. Or give git and ref."
        )
        return [Problem(f"{code_spec.TABLE}.directory", fix)]
    if code_spec.git:
        return [Problem("code", "The code comes from git: leave out the upload, or set directory instead.")]
    entries = {field: entry for spec in specs for field, entry in spec.entries.items()}
    return upload.problems(code, entries=entries, programs={"script.entry"})
