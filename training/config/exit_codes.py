"""Exit codes that batch scripts, launchers and the portal agree on."""

STOPPED = 75
"""Saved as it was asked to, and resumable: the batch script asks to be queued again (protocols.md §2)."""
