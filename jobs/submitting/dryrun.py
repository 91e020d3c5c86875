"""Predict what a spec would do before anything is allocated: findings for the form, the API and `vigil submit --check`.

Nodes are those that the last tick stored: no scheduler is called inside a request.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from django.conf import settings
from django.db.models import Max
from django.utils import timezone
from numpy.typing import NDArray

from jobs import blamed_nodes
from jobs.disk.rundir import runs_root
from jobs.errors import JobError
from jobs.following.decisions import moves
from jobs.models import Attempt, Checkpoint, Job, Predecessor
from jobs.models.sweep import refusals_text
from jobs.spec import JobSpec, SweepSpec, restarts
from jobs.submitting import topology
from jobs.submitting.admission import check
from jobs.waiting import maintenance
from jobs.waiting.explain import WaitExplanation, WaitingJob, explain
from jobs.waiting.pending import names
from jobs.waiting.requests import request_of
from jobs.waiting.variants import as_options
from nodes.cluster import read
from nodes.scheduling.capacity import ClusterCapacity, survey
from portal.models import Project, User
from training.config import choices
from training.federation import config_checks, custom, data_division
from training.federation.config import FederationConfig
from training.federation.coverage_forecast import forecast
from training.federation.outline import DataOutline, outline
from vigil_core import formatting

MAX_AVOIDED = 5
MAX_WINDOWS = 3
NEWEST = 200
"""Number of a project's newest jobs that are searched for a similar one."""


@dataclass(frozen=True)
class DryRunFinding:
    """A result of a dry run."""

    level: Literal["ok", "info", "warn", "error"]
    title: str
    text: str
    split: DataOutline | None = None
    """For a federation: how the data would be divided among clients."""


def dry_run(user: User, spec: JobSpec, *, others: Sequence[JobSpec] = ()) -> list[DryRunFinding]:
    """Return what stops this spec, and what it would do. `others`: the other specs of a sweep."""
    spec = spec.with_absolute_begin(now=timezone.now(), zone=timezone.get_default_timezone())
    code = b"" if any(job_spec.code and job_spec.code.directory for job_spec in (spec, *others)) else None
    try:
        project = check(user, spec, code=code, others=others, dry=True)
    except JobError as error:
        return [DryRunFinding("error", "Specification", str(error))]
    start = [*_start(user, spec, project)]
    return [
        _specification(spec), *start, *_data(spec), *_code((spec, *others)), *_split(spec), *_disk(spec),
        *_topology(spec), *_maintenance(spec, start), if_it_fails(spec, project),
    ]  # fmt: skip


def sweep_run(user: User, sweep: SweepSpec) -> list[DryRunFinding]:
    """Return what stops this sweep, what its jobs are, then what the first of them would do."""
    findings = dry_run(user, sweep.first, others=sweep.others)
    if any(finding.level == "error" for finding in findings):
        return findings
    many, turns = len(sweep.points), sweep.at_once
    over = " × ".join(f"{len(values)} of {path}" for path, values in sweep.over.items())
    at_once = f", {turns:,} at once" if turns is not None and turns < many else ""
    jobs = f"{formatting.plural(many, 'job')}: {over}{at_once}. The following describes the first."
    without = refusals_text([(point.values, point.message) for point in sweep.refused], many + len(sweep.refused))
    warnings = [DryRunFinding("warn", "Sweep", without)] if without else []
    return [DryRunFinding("ok", "Sweep", jobs), *warnings, *findings]


def _specification(spec: JobSpec) -> DryRunFinding:
    ranks = f"{spec.world_size} rank{'s' * (spec.world_size > 1)}"
    what = _work_text(spec)
    limit = spec.resources.time_limit
    return DryRunFinding("ok", "Specification", f"Valid: {what} on {ranks}, {limit} at most per attempt.")


def _work_text(spec: JobSpec) -> str:
    if isinstance(spec.run, FederationConfig):
        return f"{_federation_text(spec.run)}, {formatting.plural(spec.run.clients, 'client')}"
    if spec.run is not None:
        return f"{spec.run.length:,} steps of {spec.run.recipe}"
    return spec.script.entry if spec.script else ""


def _federation_text(run: FederationConfig) -> str:
    """Return a text such as "30 rounds of fedavg on tabular".

    Custom parts are not called by their placeholder's name.
    """
    algorithm = "your own algorithm" if custom.ALGORITHM in run.custom else run.algorithm
    what = "your own clients" if custom.CLIENT in run.custom else run.recipe
    others = [part.field for part in run.custom if part not in {custom.ALGORITHM, custom.CLIENT}]
    yours = f" with your own {formatting.listed(others)}" if others else ""
    return f"{formatting.plural(run.rounds, 'round')} of {algorithm} on {what}{yours}"


def _start(user: User, spec: JobSpec, project: Project) -> Iterator[DryRunFinding]:
    """Yield whether it would start now, or what it would wait for, as `why` explains a waiting job."""
    there = read.read()
    if not there.nodes:
        yield DryRunFinding(
            "info", "Start", "The scheduler’s nodes have not been read yet; try again in a few seconds."
        )
        return
    if spec.resources.begin_at or spec.after:
        yield DryRunFinding("info", "Start", f"Waits until {_preconditions(spec)}.")
        return
    avoided = blamed_nodes.avoided_nodes(spec)
    if avoided:
        yield DryRunFinding("info", "Nodes", f"Avoids {_avoided_text(avoided)}.")
        spec = blamed_nodes.without_nodes(spec, avoided)
    request = request_of(spec, user=user.slurm_user or "", account=project.slurm_account)
    waiting = WaitingJob(
        spec=spec, request=request, names=names(user), you=user.slurm_user or "", maintenance=read.maintenance()
    )
    explanation = explain(waiting, there)
    being_submitted = _count_being_submitted(there)
    if not explanation.blocks and not being_submitted:
        on = explanation.starts_on[: 1 if there.simulates_nodes else spec.resources.least_allocated]
        yield DryRunFinding("ok", "Start", f"Starts now on {', '.join(on)}.")
        return
    waits = " ".join(block.text for block in explanation.blocks[:2])
    if being_submitted:
        jobs = f"{formatting.plural(being_submitted, 'job')} {'is' if being_submitted == 1 else 'are'}"
        waits += f" {jobs} being submitted before it."
    yield DryRunFinding("warn", "Start", f"Waits. {waits.strip()}{_alternative(explanation)}")


def _avoided_text(avoided: Mapping[str, str]) -> str:
    named = [f"{node} ({reason})" for node, reason in list(avoided.items())[:MAX_AVOIDED]]
    more = len(avoided) - len(named)
    return formatting.listed([*named, f"{more} more"] if more else named)


def if_it_fails(spec: JobSpec, project: Project) -> DryRunFinding:
    """Return what would follow a failure, by its cause: Vigil's defaults briefly, and rows that somebody changed."""
    allowed = spec.restart.max_restarts
    if not allowed:
        return DryRunFinding("info", "If it fails", "It is not restarted: restart.max_restarts is 0.")
    clauses = [clause[0].upper() + clause[1:] for clause in moves.summary()]
    text = f"{'. '.join(clauses)}. Most others: stops, as they would recur."
    overrides = moves.overrides(spec.model_dump(mode="json"), project)
    more = [f"{key}: {restarts.MOVES[move]}, set by {level}." for key, (move, level) in sorted(overrides.items())]
    at_most = f" At most {formatting.plural(allowed, 'restart')}."
    return DryRunFinding("info", "If it fails", f"{text}{at_most} {' '.join(more)}".strip())


def _maintenance(spec: JobSpec, start: Sequence[DryRunFinding]) -> list[DryRunFinding]:
    """Return the next windows that its time limit reaches into, unless its start names them already."""
    windows = read.maintenance()
    if not windows:
        return []
    request, there = request_of(spec), read.read()
    effects = maintenance.effects(request, survey(request, there), windows, there.now)
    texts = [effect.text for effect in effects if not any(effect.text in finding.text for finding in start)]
    return [DryRunFinding("warn", "Maintenance", text) for text in texts[:MAX_WINDOWS]]


def _topology(spec: JobSpec) -> list[DryRunFinding]:
    return [DryRunFinding("warn", "NVLink", text) for text in topology.warnings(spec)]


def _preconditions(spec: JobSpec) -> str:
    """Return what must happen before it can wait for resources at all."""
    begin = spec.resources.begin_at
    until = [formatting.clock(begin, timezone.now())] if begin else []
    return formatting.listed([*until, *(["the jobs before it have completed"] if spec.after else [])])


def _count_being_submitted(there: ClusterCapacity) -> int:
    """Return how many waiting jobs the stored queue does not have yet, without those that wait for other jobs."""
    queued = {job.scheduler_id for job in there.queue}
    waiting = Attempt.objects.alive().filter(state=Attempt.State.PENDING)
    waiting_for_others = Predecessor.objects.filter(met=False).values("job")
    ids = waiting.exclude(job__in=waiting_for_others).values_list("scheduler_id", flat=True)
    return sum(id not in queued and id.partition("_")[0] not in queued for id in ids)


def _alternative(found: WaitExplanation) -> str:
    """Return the best variant that would start now."""
    best = next((variant for variant in found.variants if variant.starts_now), None)
    if best is None:
        return ""
    changes = ", ".join(as_options(best.changes))
    return f" What would start now: {best.text[:1].lower()}{best.text[1:]} (`{changes}`)."


def _data(spec: JobSpec) -> Iterator[DryRunFinding]:
    if spec.run is not None:
        choice, given = choices.get("recipes", spec.run.recipe), spec.run.recipe_options()
        paths = [str(given[option.name]) for option in choice.options if option.is_path and option.name in given]
        named = [path for path in paths if path.startswith(("/", "~"))]
        # The text after the colon describes the default data.
        what = choice.description.partition(":")[0] if named else choice.description
        preparer = "the first run that needs it, then kept for later ones"
        text = f"{what.rstrip('.')}. Prepared by {'its first attempt, then kept' if choice.is_open else preparer}."
        if named:
            text += f" {' and '.join(named)}: opened inside the allocation, as the job's user."
        yield DryRunFinding("info", "Data", text)


def _code(specs: Sequence[JobSpec]) -> Iterator[DryRunFinding]:
    """Yield where the code comes from. `specs`: one, or all of a sweep."""
    code = next((spec.code for spec in specs if spec.code is not None), None)
    if code is None:
        return
    if code.git:
        text = f"{code.git} at {code.ref} is fetched inside the allocation, as the job."
    else:
        text = "The directory is sent on submit, 50 MB at most: `vigil submit` packs it, the form takes a tar.gz."
    files = list(dict.fromkeys(file for spec in specs for file in spec.entries.values()))
    needed = f" {formatting.listed(files)} must be in it." if files else ""
    yield DryRunFinding("info", "Code", f"{text}{needed}")


def _split(spec: JobSpec) -> Iterator[DryRunFinding]:
    """Yield how a federation's data would be divided, if it comes with the recipe; an empty client is refused."""
    if not isinstance(spec.run, FederationConfig):
        return
    if custom.SPLIT in spec.run.custom:
        who = formatting.plural(spec.run.clients, "client")
        text = f"The split is yours: divide() gives {who} their samples when the job starts. Its page then shows them."
        yield DryRunFinding("info", "Split", text)
        yield from _unpredictable_exclusions(spec.run)
        return
    labels = config_checks.shipped_labels(spec.run)
    if labels is None:
        over = f'"{spec.run.split}" over {formatting.plural(spec.run.clients, "client")}'
        text = f"{over}: once the data are read, the job's page shows how many samples each client has."
        yield DryRunFinding("info", "Split", text)
        return
    divided = data_division.divide(spec.run, labels)
    owners = divided.owners["validation"]
    clients, sizes = outline(divided), divided.sizes
    without_validation = spec.run.clients - len(np.unique(owners[owners >= 0]))
    text = (
        f"{formatting.plural(spec.run.clients, 'client')}: {sizes.min():,} to {sizes.max():,} samples each,"
        f" median {np.median(sizes):,.0f}."
    )
    if len(clients.labels) > 1:
        share = formatting.share(clients.spreads["commonest_share"]["median"])
        text += f" In the median client {share} of samples have the same label."
    if not without_validation:
        yield DryRunFinding("ok", "Split", text, clients)
    else:
        without = f"{formatting.plural(without_validation, 'client')} {'has' if without_validation == 1 else 'have'}"
        text += f" {without} no validation samples, and no accuracy of their own."
        yield DryRunFinding("warn", "Split", text, clients)
    yield from _excluded_clients(spec.run, sizes)


def _excluded_clients(run: FederationConfig, sizes: NDArray[np.int64]) -> Iterator[DryRunFinding]:
    """Yield which clients the pace is expected to leave out of all rounds, by the clock that the run will use."""
    if custom.SELECTION in run.custom:
        yield from _unpredictable_exclusions(run)
        return
    if run.pace == "rounds" or not len((expected := forecast(run, sizes)).excluded):
        return
    most = expected.excluded[np.argsort(-sizes[expected.excluded], kind="stable")]
    some = ", ".join(map(str, most[:8].tolist())) + (", …" if len(most) > 8 else "")
    share = formatting.share(float(sizes[most].sum()) / max(1, int(sizes.sum())))
    text = (
        f'"{run.pace}" is expected to leave {formatting.plural(len(most), "client")} of {run.clients:,} out of all '
        f"{formatting.plural(expected.rounds, 'round')} ({some}): {share} of samples never count. "
        f"Give them more time (a larger quantile), or use late updates."
    )
    if settings.VIGIL_FEDERATED_LEAST_SHARE:
        text += f" This site needs {formatting.share(settings.VIGIL_FEDERATED_LEAST_SHARE)} of them for it to complete."
    yield DryRunFinding("warn", "Pace", text)


def _unpredictable_exclusions(run: FederationConfig) -> Iterator[DryRunFinding]:
    """Yield that exclusions cannot be forecast, as they depend on files that only the job opens."""
    if run.pace != "rounds":
        yours = formatting.listed([part.field for part in run.custom if part in {custom.SELECTION, custom.SPLIT}])
        are = "are" if " and " in yours else "is"
        text = f'Which clients "{run.pace}" leaves out cannot be forecast: the {yours} {are} yours.'
        yield DryRunFinding("info", "Pace", f"{text} The job's page shows it from round 5 on.")


def _disk(spec: JobSpec) -> Iterator[DryRunFinding]:
    """Yield the free space, compared with what checkpoints of similar jobs took."""
    root = runs_root()
    try:
        free = shutil.disk_usage(root if root.is_dir() else root.parent).free
    except OSError:
        yield DryRunFinding("warn", "Disk", f"{root} cannot be read. Create it, or set VIGIL_RUNS.")
        return
    retained = spec.run.keep_checkpoints if spec.run else 1
    checkpoint_bytes = _checkpoint_bytes(spec)
    if checkpoint_bytes is None:
        yield DryRunFinding(
            "info", "Disk", f"{formatting.disk(free)} free for runs; the size of its checkpoints is not known yet."
        )
        return
    needed = checkpoint_bytes * (retained + 2)  # one being written, one it started from
    each = formatting.disk(checkpoint_bytes)
    text = f"About {formatting.disk(needed)} for checkpoints ({retained} of {each}); {formatting.disk(free)} free."
    yield DryRunFinding("ok" if needed < free else "error", "Disk", text)


def _checkpoint_bytes(spec: JobSpec) -> int | None:
    """Return the largest checkpoint of the newest similar job among its project's newest ones."""
    project = Project.objects.named(spec.project).first()  # by its number there is an index in this order
    newest = Job.objects.filter(project=project).order_by("-id").values_list("pk", flat=True)[:NEWEST]
    similar = Job.objects.filter(pk__in=list(newest), kind=spec.kind)
    if spec.run is not None:
        similar = similar.filter(spec__run__recipe=spec.run.recipe)
        for table, options in spec.run.options.items():
            similar = similar.filter(**{f"spec__run__{table}": options})
    newest_similar = similar.filter(checkpoints__isnull=False).order_by("-id").values_list("pk", flat=True).first()
    if newest_similar is None:
        return None
    largest: int | None = Checkpoint.objects.filter(job=newest_similar).aggregate(most=Max("bytes"))["most"]
    return largest
