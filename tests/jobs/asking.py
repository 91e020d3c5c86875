"""What people ask of the portal in tests: a spec, a submission, a packed folder."""

from __future__ import annotations

import io
import tarfile
from typing import Any

from jobs.models import Job
from jobs.spec import JobSpec, write_toml
from jobs.submitting.submit import submit
from portal.models import User


def spec_of(**changes: Any) -> JobSpec:
    return JobSpec.parse({"name": "gpt", **changes})


def ask(user: User, spec: JobSpec | None = None, **options: Any) -> tuple[Job, bool]:
    spec = spec or spec_of()
    return submit(user, spec, spec_toml=write_toml(spec), **options)


def packed(**files: str) -> bytes:
    """A tar.gz; names with a slash as `src__model.py`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py"))
            member.size, member.mode = len(text), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()
