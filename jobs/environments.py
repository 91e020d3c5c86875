"""Merge the Python environments of site, project and job into the one that a job runs with."""

from __future__ import annotations

from django.conf import settings

from jobs.errors import Problem, SpecError
from jobs.spec import Environment, JobSpec
from nodes.schedulers import choose
from portal.models import Project

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


def unsupported(environment: Environment) -> list[Problem]:
    """Return what this site cannot provide."""
    if environment.runs_in == "pyxis" and not choose.capabilities_of(settings.VIGIL_SCHEDULER).has_pyxis:
        fix = 'Jobs on this machine support only apptainer containers: write engine = "apptainer", or remove it.'
        return [Problem("environment.container", fix)]
    return []


def _parse(text: str, name: str) -> Environment:
    try:
        return Environment.parse_toml(text)
    except SpecError as error:
        raise SpecError.at("environment", f"{name} is invalid: {error}") from None
