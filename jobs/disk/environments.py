"""Merge the Python environments of site, project and job into the one that a job runs with."""

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
IN_CONTAINER = "python3"  # the default
IN_CONDA = "python"


def environment_of(spec: JobSpec, project: Project) -> Environment:
    """Return a job's environment. Raise SpecError if the site's or the project's text is invalid."""
    return spec.environment.merged_over(project_environment(project).merged_over(site_environment()))


def site_environment() -> Environment:
    return _parse(settings.VIGIL_JOB_ENVIRONMENT, "VIGIL_JOB_ENVIRONMENT")


def project_environment(project: Project) -> Environment:
    return _parse(project.job_environment, f"The environment of project {project}")


def variables(environment: Environment) -> dict[str, str]:
    """Return the variables of every rank: the site's network settings, then what people set."""
    network = {
        "NCCL_SOCKET_IFNAME": settings.VIGIL_NCCL_INTERFACE,
        "GLOO_SOCKET_IFNAME": settings.VIGIL_GLOO_INTERFACE,
    }
    return {**{name: value for name, value in network.items() if value}, **(environment.env or {})}


def batch(spec: JobSpec, environment: Environment, root: Path, *, lead: int) -> Batch:
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


def unsupported(environment: Environment) -> list[Problem]:
    """Return what this site cannot provide."""
    if environment.runs_in == "pyxis" and not choose.capabilities_of(settings.VIGIL_SCHEDULER).has_pyxis:
        fix = 'Jobs on this machine support only apptainer containers: write engine = "apptainer", or remove it.'
        return [Problem("environment.container", fix)]
    return []


def _mounts(environment: Environment) -> list[str]:
    """Return the folders mounted in a container: the run's and Vigil's at their own paths, then what people add."""
    ours = [str(runs_root()), str(START.parent.parent)]
    if unmountable := next((path for path in ours if set(path) & set(":,")), None):
        raise SpecError.at(
            "environment.container", f"{unmountable} cannot be mounted: its path contains a colon or a comma."
        )
    theirs = [mount if ":" in mount else f"{mount}:{mount}" for mount in environment.mounts or ()]
    return [f"{ours[0]}:{ours[0]}", f"{ours[1]}:{ours[1]}:ro", *theirs]


def _parse(text: str, name: str) -> Environment:
    try:
        return Environment.parse_toml(text)
    except SpecError as error:
        raise SpecError.at("environment", f"{name} is invalid: {error}") from None
