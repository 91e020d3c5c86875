"""Create a believable demo lab: people, projects, nodes, jobs that ended well and badly, and a running one.

The past is reported through the intake that real jobs use; the running job is a real job of this machine's scheduler.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from console.demo import cluster, ends, failures, health, telemetry
from console.demo.federated import VALIDATED, FederatedIncarnation
from console.demo.reports import Incarnation, post_reports
from console.demo.scenarios import LIVE, NODES, PEOPLE, PROJECTS, STORIES, DemoAttempt, DemoJob
from jobs.models import Attempt, Checkpoint, Job, Tag
from jobs.spec import JobSpec
from jobs.submitting import submit
from nodes.schedulers import choose
from portal.models import Membership, Project, User

TAG = "demo"  # tag of everything that is made up


def make() -> list[str]:
    """Create what is missing and return a description of it. Safe to call at every start."""
    people = _people()
    cluster.make(NODES)
    sysadmin = User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()
    made = []
    existing = set(Job.objects.filter(tags__name=TAG).values_list("name", flat=True))
    for story in sorted(STORIES, key=lambda story: -story.attempts[0].hours_ago):
        if story.name not in existing:
            _create_job(story, people.get(story.owner) or sysadmin or next(iter(people.values())))
            made.append(story.name)
    created = Attempt.objects.filter(job__tags__name=TAG).exclude(ended_at=None).select_related("job__owner")
    telemetry.make(created)
    ends.make([story for story in STORIES if story.name in made], created)
    failures.make()
    health.make(sysadmin)
    if sysadmin is not None:
        made += [name for text in LIVE if (name := _start_job(sysadmin, text, existing))]
    return made


def _people() -> dict[str, User]:
    projects = {}
    for slug, title in PROJECTS.items():
        projects[slug], _ = Project.objects.get_or_create(slug=slug, defaults={"title": title})
    people = {}
    for username, (first, last, roles) in PEOPLE.items():
        user, made = User.objects.get_or_create(username=username, defaults={"first_name": first, "last_name": last})
        if made:  # they can only sign in by a link that a sysadmin creates
            user.set_unusable_password()
            user.save(update_fields=["password"])
        for slug, role in roles.items():
            Membership.objects.get_or_create(user=user, project=projects[slug], defaults={"role": role})
        people[username] = user
    return people


def _create_job(demo_job: DemoJob, owner: User) -> None:
    text = spec_text(demo_job)
    spec = JobSpec.parse_toml(text)
    with transaction.atomic():
        job = Job.objects.create(
            project=Project.objects.get(slug=demo_job.project), owner=owner, name=demo_job.name, kind=spec.kind,
            spec=spec.model_dump(mode="json"), spec_toml=text, notes=demo_job.notes,
        )  # fmt: skip
        Tag.objects.bulk_create([Tag(job=job, name=name) for name in (TAG, *demo_job.tags)])
        Job.objects.filter(pk=job.pk).update(created_at=_ago(demo_job.attempts[0]) - timedelta(seconds=3))
        for number, demo_attempt in enumerate(demo_job.attempts, 1):
            _create_attempt(job, demo_job, demo_attempt, number)
        _write_logs(job, demo_job)
    # Nothing is left to verify: the files of these checkpoints never existed.
    Checkpoint.objects.filter(job=job, state=Checkpoint.State.COMMITTED).update(state=Checkpoint.State.VERIFIED)


def _ago(demo_attempt: DemoAttempt) -> datetime:
    """Return the time at which the attempt was submitted."""
    return timezone.now() - timedelta(hours=demo_attempt.hours_ago)


def _create_attempt(job: Job, story: DemoJob, demo_attempt: DemoAttempt, number: int) -> None:
    submitted = _ago(demo_attempt)
    started = submitted + timedelta(minutes=demo_attempt.queued_minutes)
    start = Checkpoint.objects.filter(job=job, step=demo_attempt.steps[0][0]).order_by("-generation").first()
    attempt = Attempt.objects.create(
        job=job, number=number, state="running", steps=story.steps, resume_from=start,
        origin=Attempt.Origin.SUBMITTED if number == 1 else Attempt.Origin.RESTARTED,
    )  # fmt: skip
    kind = FederatedIncarnation if story.owners else Incarnation
    last = post_reports(attempt, story, demo_attempt, started.timestamp(), 10 * number, kind)
    ended = datetime.fromtimestamp(last, UTC) + timedelta(seconds=2)
    Attempt.objects.filter(pk=attempt.pk).update(
        state=demo_attempt.state, cause=demo_attempt.cause, reason=demo_attempt.reason, failure=demo_attempt.failure,
        decision=demo_attempt.decision, exit_code=demo_attempt.exit_code, signal=demo_attempt.signal,
        nodes=list(demo_attempt.nodes),
        scheduler_id=f"demo-{attempt.pk}", directory=f"attempt-{number}", token_digest="",
        created_at=submitted, submitted_at=submitted + timedelta(seconds=1), started_at=started, ended_at=ended,
        decided_at=ended, closed_at=ended, last_report_at=ended, pace_seconds=story.step_s, pace_steps=1.0,
        cancel_asked_at=ended - timedelta(seconds=40) if demo_attempt.cause == "cancelled" else None,
        cancel_asked_by=job.owner if demo_attempt.cause == "cancelled" else None,
    )  # fmt: skip
    Job.objects.filter(pk=job.pk).update(latest=attempt)


def _write_logs(job: Job, story: DemoJob) -> None:
    """Create a run directory with what its ranks would have printed."""
    relative = f"{story.project}/{job.pk}-{TAG}00"
    directory = Path(settings.VIGIL_RUNS) / relative
    old = os.umask(0o007)
    try:
        (directory / "portal").mkdir(parents=True, exist_ok=True)
        (directory / "portal" / "spec.toml").write_text(job.spec_toml)
        ended = dict(job.attempts.values_list("number", "ended_at"))
        for number, chapter in enumerate(story.attempts, 1):
            logs = directory / "job" / f"attempt-{number}" / "logs"
            logs.mkdir(parents=True, exist_ok=True)
            for incarnation, (first, last) in enumerate(chapter.steps):
                for rank in range(story.world):
                    text = _log(story, chapter, rank, first, last)
                    if incarnation == len(chapter.steps) - 1:
                        text += _final_output(chapter, rank, ended[number] or timezone.now())
                    (logs / f"{incarnation}.{rank}.log").write_text(text)
    finally:
        os.umask(old)
    Job.objects.filter(pk=job.pk).update(directory=relative)


def _log(story: DemoJob, demo_attempt: DemoAttempt, rank: int, first: int, last: int) -> str:
    lines = [f"rank {rank} of {story.world} on {story.node_of(rank, demo_attempt)}"]
    if first:
        lines.append(f"restored step-{first}")
    if story.owners:
        lines += [f"round {number}" for number in range(first + 1, last + 1)] if rank == 0 else []
    else:
        lines += [f"step {step} of {story.steps}" for step in range(first + 100, last + 1, 100)]
    return "\n".join(lines) + "\n"


def _final_output(demo_attempt: DemoAttempt, rank: int, ended: datetime) -> str:
    """Return what a rank printed last: the failing one its error, the others what followed from it."""
    is_first = demo_attempt.failure.get("rank") == rank
    if not (text := demo_attempt.log if is_first else demo_attempt.echo):
        return ""
    at = timezone.localtime(ended - timedelta(seconds=40 if is_first else 18 - rank * 0.02))
    what = "Traceback (most recent call last):\n" if is_first else ""
    return f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d} ERROR rank {rank}: the step failed\n{what}{text}\n"


def _start_job(user: User, text: str, existing: set[str]) -> str:
    cpus = len(os.sched_getaffinity(0))
    # Half of the machine at most: visitors want to use the other half.
    for name, number in (("{ranks}", min(2, max(1, cpus // 2))), ("{cpus}", cpus), ("{batch}", 16 * cpus)):
        text = text.replace(name, str(number))
    spec = JobSpec.parse_toml(text)
    if spec.name in existing or not choose.capabilities_of(settings.VIGIL_SCHEDULER).runs_jobs_here:
        return ""
    submit.submit(user, spec, spec_toml=text, key=f"{TAG}-{spec.name}")
    return spec.name


def spec_text(story: DemoJob) -> str:
    """Return the spec as the person would have written it."""
    tags = ", ".join(f'"{tag}"' for tag in (TAG, *story.tags))
    return f"""\
name = "{story.name}"
kind = "{"federated" if story.owners else "distributed"}"
project = "{story.project}"
tags = [{tags}]

[resources]
nodes = {story.nodes}
gpus_per_node = {story.gpus}
time_limit = "{story.time_limit}"

[restart]
max_restarts = 3

[run]
recipe = "{story.recipe}"
{_federated(story) if story.owners else _distributed(story)}checkpoint_every = {story.checkpoint_every}
{_SOURCE if story.owners else ""}"""


_SOURCE = """
[run.language]
source = "/data/packages"
"""


def _distributed(story: DemoJob) -> str:
    return f"steps = {story.steps}\nglobal_batch = {story.global_batch}\nwarmup_steps = 200\n"


def _federated(story: DemoJob) -> str:
    return f"""\
rounds = {story.steps}
clients = {len(story.owners)}
split = "column"
local_steps = 10
batch = 16
learning_rate = 0.3
pace = "deadline"
aggregation = "trimmed_mean"
validate_every = {VALIDATED}
"""
