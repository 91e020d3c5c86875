"""A job's specification: one class for the form, the API and the CLI, with errors that name the field and the fix.

Nothing here imports Django: `vigil submit --set` changes a spec's text with it, and the portal checks it.
"""

from jobs.spec.environment import Environment
from jobs.spec.model import RUNS, JobSpec
from jobs.spec.sweep import SweepSpec, has_sweep, plain_toml
from jobs.spec.toml import MAX_BYTES, read_toml, set_values
from jobs.spec.values import STOP_SECONDS, limit_of, seconds_of
from jobs.spec.writing import write_toml

__all__ = [
    "MAX_BYTES", "RUNS", "STOP_SECONDS", "Environment", "JobSpec", "SweepSpec", "has_sweep", "limit_of", "plain_toml",
    "read_toml", "seconds_of", "set_values", "write_toml",
]  # fmt: skip
