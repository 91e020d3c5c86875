"""The capabilities of Slurm, for pages too: importing them must not import httpx."""

from __future__ import annotations

from nodes.schedulers.base import Capabilities

CAPABILITIES = Capabilities(
    label="Slurm",
    has_arrays=True,
    is_remote=True,
    runs_jobs_here=False,
    runs_as_owner=True,
    has_slurm_options=True,
    has_pyxis=True,
    can_attach=True,
    numbers_whole_gpus=False,
)
