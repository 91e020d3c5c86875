"""What people ask of the portal in tests: a spec, a submission, a packed folder."""

from __future__ import annotations

from typing import Any

from jobs.models import Job
from jobs.spec import JobSpec, write_toml
from jobs.submitting.submit import submit
from portal.models import User
from tests.archives import folder as packed

__all__ = ["ask", "packed", "spec_of"]


def spec_of(**changes: Any) -> JobSpec:
    return JobSpec.parse({"name": "gpt", **changes})


def ask(user: User, spec: JobSpec | None = None, **options: Any) -> tuple[Job, bool]:
    spec = spec or spec_of()
    return submit(user, spec, spec_toml=write_toml(spec), **options)
