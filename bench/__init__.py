"""Benchmarks: each module with a `main` measures one thing against its limits (docs/reference/benchmarks.md)."""

NOT_MEASURED = 77
"""The exit code of a bench where the machine lacks what it measures."""
