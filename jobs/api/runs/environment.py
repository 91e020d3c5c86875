"""REST: the environment that an attempt ran in."""

from dataclasses import asdict
from datetime import datetime
from typing import Any

from ninja import Router, Schema
from pydantic import Field

from jobs.api.request import job_of
from jobs.disk import provenance
from jobs.models import Attempt
from portal.http.api import ApiRequest
from portal.http.openapi import described
from portal.http.problems import Problem

router = Router(tags=["jobs"])


class GpuShape(Schema):
    name: str
    memory_gib: float | None


class ChangeShape(Schema):
    what: str = Field(description="What changed: a package's name, commit, driver, Python …")
    before: str = Field(description="Empty: it was added.")
    after: str = Field(description="Empty: it was removed.")


class EnvironmentShape(Schema):
    """An attempt's environment as captured by the launcher on the first node; text is empty if unknown."""

    attempt: int = Field(description="The attempt's number.")
    captured_at: datetime | None
    node: str
    python: str
    implementation: str
    executable: str
    torch: str
    torch_for: str = Field(description="Platform of the torch build, such as CPU or CUDA 12.8.")
    packages: dict[str, str] = Field(description="Name → version, for the ranks' interpreter.")
    packages_left_out: int = Field(description="Number of packages that were not stored.")
    os: str
    kernel: str
    machine: str
    cpu: str
    cpus: int | None = Field(description="Number of CPUs that the job could use.")
    memory_gib: float | None = Field(description="Memory of the node.")
    gpus: list[GpuShape]
    driver: str
    cuda: str = Field(description="Newest CUDA version that the driver supports.")
    vigil: str
    vigil_commit: str
    vigil_digest: str = Field(description="SHA-256 of the trainer's sources.")
    git: str
    ref: str
    commit: str = Field(
        description="Commit that `ref` was resolved to; for an uploaded directory, its checked-out commit."
    )
    dirty: bool = Field(description="The uploaded directory had uncommitted changes.")
    digest: str = Field(description="SHA-256 of the uploaded files.")
    config_hash: str
    variables: list[str] = Field(description="Names of the variables that the spec sets; values are not stored.")
    since: int | None = Field(description="The earlier attempt that `changes` compares with.")
    changes: list[ChangeShape]


@router.get(
    "/{int:job_id}/attempts/{int:number}/environment",
    response=EnvironmentShape,
    summary="An attempt's environment, and changes since the previous one",
    openapi_extra=described(
        errors={404: "No such job that you can see, no such attempt, or its launcher has reported nothing yet."}
    ),
)
def attempt_environment(request: ApiRequest, job_id: int, number: int) -> dict[str, Any]:
    """Return Python, packages, driver, GPUs and commits as captured by the attempt's first launcher."""
    job = job_of(request, job_id)
    attempt = Attempt.objects.filter(job=job, number=number).select_related("job").first()
    if attempt is None:
        raise Problem(404, f"#{job_id} has no attempt {number}.")
    ran = provenance.compare_with_earlier(attempt)
    if ran is None:
        when = "It is captured when its ranks have started." if attempt.is_alive else "Its launcher did not capture it."
        raise Problem(404, f"Attempt {number} of #{job_id} has no captured environment. {when}")
    shape = {**asdict(ran.environment), "since": ran.since, "changes": [asdict(change) for change in ran.changes]}
    return {"attempt": number, **shape}
