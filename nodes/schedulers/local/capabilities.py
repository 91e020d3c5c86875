"""The capabilities of the local scheduler."""

from __future__ import annotations

from nodes.schedulers.base import Capabilities

CAPABILITIES = Capabilities(
    label="The scheduler",
    has_arrays=False,
    is_remote=False,
    runs_jobs_here=True,
    runs_as_owner=False,
    has_slurm_options=False,
    has_pyxis=False,
    can_attach=False,
    numbers_whole_gpus=True,
)
