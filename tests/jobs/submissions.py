"""Requests for tests: a spec, a submission, a packed folder."""

from __future__ import annotations

from typing import Any

from jobs.models import Job
from jobs.spec import JobSpec, write_toml
from jobs.submitting.submit import submit
from portal.models import User
from tests.archives import folder as packed

__all__ = ["ENTRIES", "coded", "its_code", "packed", "spec_of", "submit_spec", "text_of"]
ENTRIES = {"script": "train.py", "client": "client.py"}
"""The file that custom code has to have, by the table of the spec that needs it."""


def spec_of(**changes: Any) -> JobSpec:
    return JobSpec.parse({"name": "gpt", **changes})


def coded(table: str, **options: Any) -> JobSpec:
    """Return a spec that brings code, as a directory by default."""
    return JobSpec.parse_toml(text_of(table, **options))


def text_of(table: str, **options: Any) -> str:
    kind = {"script": "script", "client": "federated"}[table]
    lines = [f'{name} = "{value}"' for name, value in (options or {"directory": "."}).items()]
    return "\n".join([f'name = "mine"\nkind = "{kind}"\n[{table}]', *lines, ""])


def its_code(table: str) -> bytes:
    return packed(**{ENTRIES[table].replace(".", "_"): "print(1)"})


def submit_spec(user: User, spec: JobSpec | None = None, **options: Any) -> tuple[Job, bool]:
    spec = spec or spec_of()
    return submit(user, spec, spec_toml=write_toml(spec), **options)
