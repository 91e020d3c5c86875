"""What a spec would do, before anything is allocated: findings for the form, the API and `vigil submit --check`.

Nodes are those that the last tick wrote down: no scheduler is asked inside a request.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from django.conf import settings
from django.db.models import Max
from django.utils import timezone
from numpy.typing import NDArray

from jobs.disk.rundir import runs_root
from jobs.errors import JobError
from jobs.following import moves
from jobs.models import Attempt, Checkpoint, Job, Predecessor
from jobs.models.sweep import refusals_text
from jobs.spec import JobSpec, SweepSpec, restarts
from jobs.submitting.admission import check
from jobs.why.explain import Waiting, Why, explain
from jobs.why.pending import names
from jobs.why.requests import request_of
from jobs.why.variants import as_options
from nodes.cluster import read
from nodes.scheduling.capacity import Cluster
from portal.models import Project, User
from training.config import choices
from training.federation import config_checks, custom, data_division
from training.federation.config import FederationConfig
from training.federation.coverage_forecast import forecast
from training.federation.outline import DataOutline, outline
from vigil_core import formatting

NEWEST = 200
"""Jobs of a project among which one alike is looked for."""


@dataclass(frozen=True)
class Finding:
    """One thing that a dry run found."""

    level: Literal["ok", "info", "warn", "error"]
    title: str
    text: str
    split: DataOutline | None = None
    """Of a federation: who would have how much."""


def dry_run(user: User, spec: JobSpec, *, alike: Sequence[JobSpec] = ()) -> list[Finding]:
    """What stops this spec, and what it would do. `alike`: the others of a sweep."""
    spec = spec.settled(now=timezone.now(), zone=timezone.get_default_timezone())
    code = b"" if any(one.code and one.code.directory for one in (spec, *alike)) else None
    try:
        project = check(user, spec, code=code, alike=alike, dry=True)
    except JobError as error:
        return [Finding("error", "Specification", str(error))]
    return [
        _specification(spec), *_start(user, spec, project), *_data(spec), *_code((spec, *alike)), *_split(spec),
        *_disk(spec), if_it_fails(spec, project),
    ]  # fmt: skip


def sweep_run(user: User, sweep: SweepSpec) -> list[Finding]:
    """What stops this sweep, what its jobs are, then what the first of them would do."""
    found = dry_run(user, sweep.first, alike=sweep.others)
    if any(finding.level == "error" for finding in found):
        return found
    many, turns = len(sweep.points), sweep.at_once
    over = " × ".join(f"{len(values)} of {path}" for path, values in sweep.over.items())
    at_once = f", {turns:,} at once" if turns is not None and turns < many else ""
    jobs = f"{formatting.plural(many, 'job')}: {over}{at_once}. What follows is about the first."
    without = refusals_text([(point.values, point.message) for point in sweep.refused], many + len(sweep.refused))
    return [Finding("ok", "Sweep", jobs), *([Finding("warn", "Sweep", without)] if without else []), *found]


def _specification(spec: JobSpec) -> Finding:
    ranks = f"{spec.world_size} rank{'s' * (spec.world_size > 1)}"
    what = _what(spec)
    limit = spec.resources.time_limit
    return Finding("ok", "Specification", f"Holds: {what} on {ranks}, {limit} at most for each attempt.")


def _what(spec: JobSpec) -> str:
    if isinstance(spec.run, FederationConfig):
        return f"{_federation(spec.run)}, {formatting.plural(spec.run.clients, 'client')}"
    if spec.run is not None:
        return f"{spec.run.length:,} steps of {spec.run.recipe}"
    return spec.script.entry if spec.script else ""


def _federation(run: FederationConfig) -> str:
    """ "30 rounds of fedavg on tabular"; what is somebody's own is not called so."""
    algorithm = "your own algorithm" if custom.ALGORITHM in run.custom else run.algorithm
    what = "your own clients" if custom.CLIENT in run.custom else run.recipe
    others = [part.field for part in run.custom if part not in {custom.ALGORITHM, custom.CLIENT}]
    yours = f" with your own {formatting.listed(others)}" if others else ""
    return f"{formatting.plural(run.rounds, 'round')} of {algorithm} on {what}{yours}"


def _start(user: User, spec: JobSpec, project: Project) -> Iterator[Finding]:
    """Whether it would start now, or what it would wait for: as `why` tells it of a job that waits."""
    there = read.read()
    if not there.nodes:
        yield Finding("info", "Start", "The scheduler’s nodes have not been read yet; try again in a few seconds.")
        return
    if spec.resources.begin_at or spec.after:
        yield Finding("info", "Start", f"Waits until {_first(spec)}.")
        return
    request = request_of(spec, user=user.slurm_user or "", account=project.slurm_account)
    found = explain(Waiting(spec=spec, request=request, names=names(user), you=user.slurm_user or ""), there)
    unknown = _not_queued(there)
    if not found.blocks and not unknown:
        on = found.starts_on[: 1 if there.is_one_machine else spec.resources.least_allocated]
        yield Finding("ok", "Start", f"Starts now on {', '.join(on)}.")
        return
    waits = " ".join(block.text for block in found.blocks[:2])
    if unknown:
        waits += (
            f" {formatting.plural(unknown, 'job')} {'is' if unknown == 1 else 'are'} just being submitted before it."
        )
    yield Finding("warn", "Start", f"Waits. {waits.strip()}{_instead(found)}")


def if_it_fails(spec: JobSpec, project: Project) -> Finding:
    """What would follow its bad end, by what it is of: Vigil's rows in a few words, and those that somebody changed."""
    allowed = spec.restart.max_restarts
    if not allowed:
        return Finding("info", "If it fails", "It is not started anew: restart.max_restarts is 0.")
    told = f"{'; '.join(moves.summary())}; most else that it may die of would only happen again, so it stops."
    changed = moves.changed(spec.model_dump(mode="json"), project)
    more = [f"{key}: {restarts.MOVES[move]}, as {whose} says." for key, (move, whose) in sorted(changed.items())]
    at_most = f" {formatting.plural(allowed, 'restart')} at most."
    return Finding("info", "If it fails", f"{told[0].upper()}{told[1:]}{at_most} {' '.join(more)}".strip())


def _first(spec: JobSpec) -> str:
    """What has to come before it looks for room at all."""
    begin = spec.resources.begin_at
    until = [formatting.clock(begin, timezone.now())] if begin else []
    return formatting.listed([*until, *(["the jobs before it have completed"] if spec.after else [])])


def _not_queued(there: Cluster) -> int:
    """Jobs of Vigil that wait and that the queue, as last read, does not have yet. Nobody waits for those held here."""
    queued = {job.scheduler_id for job in there.queue}
    waiting = Attempt.objects.alive().filter(state=Attempt.State.PENDING)
    held = Predecessor.objects.filter(met=False).values("job")
    ids = waiting.exclude(job__in=held).values_list("scheduler_id", flat=True)
    return sum(known not in queued and known.partition("_")[0] not in queued for known in ids)


def _instead(found: Why) -> str:
    """The best of what would start now."""
    best = next((variant for variant in found.variants if variant.starts_now), None)
    if best is None:
        return ""
    changes = ", ".join(as_options(best.changes))
    return f" What would start now: {best.text[:1].lower()}{best.text[1:]} (`{changes}`)."


def _data(spec: JobSpec) -> Iterator[Finding]:
    if spec.run is not None:
        choice, given = choices.get("recipes", spec.run.recipe), spec.run.recipe_options()
        paths = [str(given[option.name]) for option in choice.options if option.is_path and option.name in given]
        named = [path for path in paths if path.startswith(("/", "~"))]
        # Behind the colon stands what it is trained on where nothing is named.
        what = choice.description.partition(":")[0] if named else choice.description
        whose = "the first run that needs it, then kept for later ones"
        text = f"{what.rstrip('.')}. Prepared by {'its first attempt, then kept' if choice.is_open else whose}."
        if named:
            text += f" {' and '.join(named)}: opened inside the allocation, as the job's user."
        yield Finding("info", "Data", text)


def _code(specs: Sequence[JobSpec]) -> Iterator[Finding]:
    """Where somebody's own code comes from. `specs`: one, or all of a sweep."""
    code = next((spec.code for spec in specs if spec.code is not None), None)
    if code is None:
        return
    if code.git:
        text = f"{code.git} at {code.ref} is fetched inside the allocation, as the job."
    else:
        text = "The directory is sent on submit, 50 MB at most: `vigil submit` packs it, the form takes a tar.gz."
    files = list(dict.fromkeys(file for spec in specs for file in spec.entries.values()))
    needed = f" {formatting.listed(files)} must be in it." if files else ""
    yield Finding("info", "Code", f"{text}{needed}")


def _split(spec: JobSpec) -> Iterator[Finding]:
    """Who would have how much of a federation's data, where they come with the recipe; an empty client is refused."""
    if not isinstance(spec.run, FederationConfig):
        return
    if custom.SPLIT in spec.run.custom:
        who = formatting.plural(spec.run.clients, "client")
        text = f"The split is yours: divide() gives {who} their samples when the job starts. Its page then shows them."
        yield Finding("info", "Split", text)
        yield from _unforeseen(spec.run)
        return
    labels = config_checks.shipped_labels(spec.run)
    if labels is None:
        over = f'"{spec.run.split}" over {formatting.plural(spec.run.clients, "client")}'
        text = f"{over}: the job's page shows who has how much once the data are there."
        yield Finding("info", "Split", text)
        return
    divided = data_division.divide(spec.run, labels)
    owners = divided.owners["validation"]
    found, sizes = outline(divided), divided.sizes
    unjudged = spec.run.clients - len(np.unique(owners[owners >= 0]))
    text = (
        f"{formatting.plural(spec.run.clients, 'client')}: {sizes.min():,} to {sizes.max():,} samples each,"
        f" median {np.median(sizes):,.0f}."
    )
    if len(found.labels) > 1:
        share = formatting.share(found.spreads["commonest_share"]["median"])
        text += f" In the median client {share} of samples have the same label."
    if not unjudged:
        yield Finding("ok", "Split", text, found)
    else:
        without = f"{formatting.plural(unjudged, 'client')} {'has' if unjudged == 1 else 'have'}"
        text += f" {without} no sample to be judged by, and no accuracy of their own."
        yield Finding("warn", "Split", text, found)
    yield from _left_behind(spec.run, sizes)


def _left_behind(run: FederationConfig, sizes: NDArray[np.int64]) -> Iterator[Finding]:
    """Yield which clients the pace is expected to leave out of all rounds, by the clock that the run will use."""
    if custom.SELECTION in run.custom:
        yield from _unforeseen(run)
        return
    if run.pace == "rounds" or not len((found := forecast(run, sizes)).excluded):
        return
    most = found.excluded[np.argsort(-sizes[found.excluded], kind="stable")]
    some = ", ".join(map(str, most[:8].tolist())) + (", …" if len(most) > 8 else "")
    share = formatting.share(float(sizes[most].sum()) / max(1, int(sizes.sum())))
    text = (
        f'"{run.pace}" is expected to leave {formatting.plural(len(most), "client")} of {run.clients:,} out of all '
        f"{formatting.plural(found.rounds, 'round')} ({some}): {share} of samples never count. "
        f"Give them more time (a larger quantile), or use late updates."
    )
    if settings.VIGIL_FEDERATED_LEAST_SHARE:
        text += f" This site needs {formatting.share(settings.VIGIL_FEDERATED_LEAST_SHARE)} of them for it to complete."
    yield Finding("warn", "Pace", text)


def _unforeseen(run: FederationConfig) -> Iterator[Finding]:
    """Yield that nobody can tell whom the pace leaves out: it goes by files that only the job opens."""
    if run.pace != "rounds":
        yours = formatting.listed([part.field for part in run.custom if part in {custom.SELECTION, custom.SPLIT}])
        text = (
            f'Whom "{run.pace}" leaves out cannot be forecast: the {yours} {"are" if " and " in yours else "is"} yours.'
        )
        yield Finding("info", "Pace", f"{text} The job's page tells from round 5 on.")


def _disk(spec: JobSpec) -> Iterator[Finding]:
    """Free space beside what the checkpoints of a job like this took."""
    root = runs_root()
    try:
        free = shutil.disk_usage(root if root.is_dir() else root.parent).free
    except OSError:
        yield Finding("warn", "Disk", f"{root} cannot be read. Make it, or set VIGIL_RUNS.")
        return
    kept = spec.run.keep_checkpoints if spec.run else 1
    one = _checkpoint_bytes(spec)
    if one is None:
        yield Finding(
            "info", "Disk", f"{free / 1e9:,.0f} GB free for runs; how large its checkpoints are is not known yet."
        )
        return
    needed = one * (kept + 2)  # one being written, one it started from
    each = formatting.disk(one)
    text = f"About {formatting.disk(needed)} for checkpoints ({kept} kept of {each}); {free / 1e9:,.0f} GB free."
    yield Finding("ok" if needed < free else "error", "Disk", text)


def _checkpoint_bytes(spec: JobSpec) -> int | None:
    """The largest checkpoint of the newest job with the same recipe and options, among its project's newest ones."""
    project = Project.objects.named(spec.project).first()  # by its number there is an index in this order
    newest = Job.objects.filter(project=project).order_by("-id").values_list("pk", flat=True)[:NEWEST]
    alike = Job.objects.filter(pk__in=list(newest), kind=spec.kind)
    if spec.run is not None:
        alike = alike.filter(spec__run__recipe=spec.run.recipe)
        for table, options in spec.run.options.items():
            alike = alike.filter(**{f"spec__run__{table}": options})
    like = alike.filter(checkpoints__isnull=False).order_by("-id").values_list("pk", flat=True).first()
    if like is None:
        return None
    found: int | None = Checkpoint.objects.filter(job=like).aggregate(most=Max("bytes"))["most"]
    return found
