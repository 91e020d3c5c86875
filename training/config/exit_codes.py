"""Exit codes that batch scripts, launchers and the portal agree on."""

STOPPED = 75
"""Saved as requested, and resumable: the batch script asks Slurm to requeue the job (protocols.md §2)."""
