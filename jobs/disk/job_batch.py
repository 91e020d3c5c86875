"""Fill in the batch script of a job from its specification and its environment."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from jobs.disk.batch import Batch
from jobs.disk.rundir import runs_root
from jobs.environments import IN_CONDA, IN_CONTAINER
from jobs.errors import SpecError
from jobs.spec import Environment, JobSpec

START = Path(settings.JOB_CODE) / "training" / "start.py"


def job_batch(spec: JobSpec, environment: Environment, root: Path, *, lead: int) -> Batch:
    """Return the values of the job's batch script."""
    resources = spec.resources
    default = IN_CONTAINER if environment.container else IN_CONDA if environment.conda else settings.VIGIL_JOB_PYTHON
    return Batch(
        run=root,
        start=START,
        lead=lead,
        python=environment.python or default,
        modules=tuple(environment.modules or ()),
        conda=environment.conda or "",
        container=environment.image,
        engine=environment.runs_in,
        mounts=tuple(_mounts(environment)) if environment.container else (),
        gpus=resources.gpus_per_node > 0,
        is_elastic=resources.is_elastic,
        required_nodes=tuple(resources.require_nodes),
        excluded_nodes=tuple(resources.exclude_nodes),
    )


def _mounts(environment: Environment) -> list[str]:
    """Return the folders mounted in a container: the run's and Vigil's at their own paths, then what people add."""
    ours = [str(runs_root()), str(START.parent.parent)]
    if unmountable := next((path for path in ours if set(path) & set(":,")), None):
        raise SpecError.at(
            "environment.container", f"{unmountable} cannot be mounted: its path contains a colon or a comma."
        )
    theirs = [mount if ":" in mount else f"{mount}:{mount}" for mount in environment.mounts or ()]
    return [f"{ours[0]}:{ours[0]}", f"{ours[1]}:{ours[1]}:ro", *theirs]
