"""Clone a job: return its spec's text, pinned to the commit that its attempts ran."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jobs.disk import rundir
from jobs.errors import Conflict
from jobs.models import Job
from jobs.spec import set_values
from jobs.spec.code import ClientCode, Script
from vigil_core import untrusted

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class CodeSource:
    """The origin of a job's own code. The commit is what its repository, or its sender, states."""

    git: str = ""
    ref: str = ""
    directory: str = ""
    commit: str = ""
    dirty: bool = False  # sent with uncommitted changes
    digest: str = ""  # of the files sent


def source_of(job: Job) -> CodeSource | None:
    """Return where the job's code comes from, or None.

    For git with the commit fetched for all attempts, "" before that.
    """
    if not (table := _table_of(job)):
        return None
    code = job.spec[table]
    git, ref, directory = (str(code.get(name) or "") for name in ("git", "ref", "directory"))
    # The launcher writes what it fetched into the job's folder: any program may have changed it since.
    place = "job/code.json" if git else "portal/code.json"
    code = (rundir.read_json_under(rundir.path_of(job.directory), place, limit=65_536) if job.directory else None) or {}
    commit, digest = code.get("commit"), code.get("digest")
    return CodeSource(
        git=git,
        ref=ref,
        directory=directory,
        commit=commit if isinstance(commit, str) and untrusted.COMMIT.fullmatch(commit) else "",
        dirty=code.get("dirty") is True,
        digest=digest if isinstance(digest, str) and _DIGEST.fullmatch(digest) else "",
    )


def pinned_toml(job: Job) -> str:
    """Return the spec as it was written, comments included, with the commit in place of a ref that may have moved."""
    if job.is_attached:
        raise Conflict(
            f"sbatch started #{job.pk}, not Vigil: there is nothing to submit again. Its owner has the script."
        )
    source = source_of(job)
    if source is None or not source.git:
        return job.spec_toml
    if not source.commit:
        raise Conflict(f"#{job.pk} has not fetched its code yet, so its commit is unknown. Use its spec as written.")
    return set_values(job.spec_toml, {f"{_table_of(job)}.ref": source.commit})


def _table_of(job: Job) -> str:
    """Return the table of the specification that describes its code; "" if it has none."""
    kinds = {code.KIND: code.TABLE for code in (Script, ClientCode)}
    table = kinds.get(job.kind, "")
    return table if isinstance(job.spec.get(table), dict) else ""
