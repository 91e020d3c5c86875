"""Write a burn-in's run directory, and build its request to the scheduler."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from jobs import environments
from jobs.disk import rundir, sharing
from jobs.disk.burnin_batch import BurnInBatch
from jobs.disk.job_batch import START
from nodes.burnin import plan
from nodes.cluster import sync
from nodes.models import BurnIn, Node
from nodes.schedulers.base import Submission

PROJECT = ".burnins"
"""The folder of burn-ins below VIGIL_RUNS; no project can have this name."""
SCRATCH = "/tmp"  # noqa: S108 (on each node)
GRACE_S = 30
MAX_CALL_DURATION = timedelta(seconds=30)
"""After which a submission has reached the scheduler or never will."""


def prepare(burn_in: BurnIn) -> Path:
    """Write what the batch script needs. Safe to repeat."""
    rundir.open_root()
    if not burn_in.directory:
        burn_in.directory = rundir.make(PROJECT, burn_in.pk)
        BurnIn.objects.filter(pk=burn_in.pk).update(directory=burn_in.directory)
    root = rundir.path_of(burn_in.directory)
    sharing.share(root, sync.unix_user(sync.service_user()))
    text = plan.plan_text(names(burn_in), burn_in.seconds, mounts=_mounts(), scratch=SCRATCH)
    rundir.write(root / "portal" / "plan.json", text)
    rundir.write(root / "portal" / "batch.sh", _batch(burn_in, root).text(), mode=0o750)
    return root


def submission(burn_in: BurnIn, root: Path, reservation: str) -> Submission:
    """Return the request for whole nodes, inside the reservation.

    Nodes with different numbers of GPUs are requested without any: `exclusive` brings all that each node has, and the
    batch script starts a step for each number.
    """
    nodes = list(Node.objects.filter(name__in=names(burn_in)))
    numbers = {node.gpus for node in nodes}
    return Submission(
        key=burn_in.key,
        name=f"vigil-burnin-{burn_in.pk}",
        user=sync.service_user(),
        script=str(root / "portal" / "batch.sh"),
        directory=str(root),
        output=str(root / "job" / "batch.log"),
        min_nodes=len(nodes),
        max_nodes=len(nodes),
        cpus_per_node=max(1, min((node.cpus for node in nodes), default=1)),
        gpus_per_node=numbers.pop() if len(numbers) == 1 else 0,
        time_limit_s=plan.time_limit_s(burn_in.seconds, len(nodes)),
        grace_s=GRACE_S,
        environment={"VIGIL_SUBMISSION": burn_in.key},
        partition=_partition(nodes),
        reservation=reservation,
        exclusive=True,
        required_nodes=tuple(node.name for node in nodes),
    )


def names(burn_in: BurnIn) -> list[str]:
    return list(burn_in.nodes.order_by("node").values_list("node", flat=True))


def claim(burn_in: BurnIn) -> bool:
    """Note that this worker submits the tests; return False while the call of another may still be on its way."""
    now = timezone.now()
    is_free = Q(submitting_at=None) | Q(submitting_at__lt=now - MAX_CALL_DURATION)
    rows = BurnIn.objects.filter(is_free, pk=burn_in.pk, state=BurnIn.BurnInState.STARTING, scheduler_id="")
    return bool(rows.update(submitting_at=now))


def _partition(nodes: list[Node]) -> str:
    """Return a partition that has all these nodes; "" for the scheduler's default."""
    common = set.intersection(*(set(node.partitions) for node in nodes)) if nodes else set()
    return min(common, default="")


def _mounts() -> list[str]:
    return [str(rundir.runs_root()), *map(str, settings.VIGIL_DATA_ROOTS)]


def _batch(burn_in: BurnIn, root: Path) -> BurnInBatch:
    environment = environments.site_environment()
    return BurnInBatch(
        run=root,
        start=START,
        lead=GRACE_S,
        python=environment.python or (environments.IN_CONDA if environment.conda else settings.VIGIL_JOB_PYTHON),
        modules=tuple(environment.modules or ()),
        conda=environment.conda or "",
        is_elastic=True,
        variables=environments.variables(environment),
        required_nodes=tuple(names(burn_in)),
        groups=tuple(plan.gpu_groups(_gpus(burn_in))),
    )


def _gpus(burn_in: BurnIn) -> dict[str, int]:
    return dict(Node.objects.filter(name__in=names(burn_in)).values_list("name", "gpus"))
