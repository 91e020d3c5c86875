"""The unit in which a run counts its progress, by kind of job; code below the user interface calls it a step.

No torch.
"""

UNITS = {"federated": "round"}


def progress_unit(kind: str) -> str:
    """Return "step" or "round"."""
    return UNITS.get(kind, "step")
