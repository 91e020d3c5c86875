"""What Python a job runs with and what is set around it: the site's, the project's and the job's own, put together."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from jobs.disk.batch import Batch
from jobs.disk.rundir import runs_root
from jobs.errors import Problem, SpecError
from jobs.spec import Environment, JobSpec
from nodes.schedulers import choose
from portal.models import Project

START = Path(settings.JOB_CODE) / "training" / "start.py"
IN_CONTAINER = "python3"  # where nobody says which
IN_CONDA = "python"


def of(spec: JobSpec, project: Project) -> Environment:
    """What holds for a job; SpecError where the site's or the project's text does not hold."""
    return spec.environment.over(of_project(project).over(of_site()))


def of_site() -> Environment:
    return _read(settings.VIGIL_JOB_ENVIRONMENT, "VIGIL_JOB_ENVIRONMENT")


def of_project(project: Project) -> Environment:
    return _read(project.job_environment, f"The environment of project {project}")


def variables(environment: Environment) -> dict[str, str]:
    """The variables of every rank: what the site says of its network, then what people say."""
    network = {
        "NCCL_SOCKET_IFNAME": settings.VIGIL_NCCL_INTERFACE,
        "GLOO_SOCKET_IFNAME": settings.VIGIL_GLOO_INTERFACE,
    }
    return {**{name: value for name, value in network.items() if value}, **(environment.env or {})}


def batch(spec: JobSpec, environment: Environment, root: Path, *, lead: int) -> Batch:
    """The batch script's parts."""
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
        goes_on=resources.goes_on,
        required_nodes=tuple(resources.require_nodes),
        excluded_nodes=tuple(resources.exclude_nodes),
    )


def misfits(environment: Environment) -> list[Problem]:
    """What this site cannot do."""
    if environment.runs_in == "pyxis" and not choose.capabilities_of(settings.VIGIL_SCHEDULER).has_pyxis:
        fix = 'Jobs on this machine have containers by apptainer only: write engine = "apptainer", or take it out.'
        return [Problem("environment.container", fix)]
    return []


def _mounts(environment: Environment) -> list[str]:
    """The folders inside a container: the run's and Vigil's at the same paths, then what people say."""
    ours = [str(runs_root()), str(START.parent.parent)]
    if odd := next((path for path in ours if set(path) & set(":,")), None):
        raise SpecError.at("environment.container", f"{odd} cannot be mounted: its path has a colon or a comma.")
    theirs = [mount if ":" in mount else f"{mount}:{mount}" for mount in environment.mounts or ()]
    return [f"{ours[0]}:{ours[0]}", f"{ours[1]}:{ours[1]}:ro", *theirs]


def _read(text: str, name: str) -> Environment:
    try:
        return Environment.parse_toml(text)
    except SpecError as error:
        raise SpecError.at("environment", f"{name} does not hold: {error}") from None
