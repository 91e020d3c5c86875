"""List which REST API version introduced what Vigil uses; docs/how-to/slurm.md describes it for people."""

from __future__ import annotations

Version = tuple[int, int, int]


def text_of(version: Version) -> str:
    return "v" + ".".join(map(str, version))


OLDEST: Version = (0, 0, 38)  # Slurm 22.05
NEWEST: Version = (0, 0, 45)  # Slurm 26.05, the newest that is tested; newer versions are only read
NEW_JOB_FORM: Version = (0, 0, 39)  # of submissions: numbers as {set, number}; #SBATCH lines of the script are read
NODES_BY_NAME: Version = (0, 0, 39)  # in submissions: required and excluded nodes; before, by scontrol
ACCOUNTS_BY_USER: Version = (0, 0, 39)  # accounting can be filtered by user
SCRIPT_IN_JOB: Version = (0, 0, 40)  # inside the submission's `job`, no longer next to it
CANCEL_BY_TASK: Version = (0, 0, 40)  # cancels "17_3", one array task; before, by scancel
RELEASE_BY_UPDATE: Version = (0, 0, 40)  # releases a hold by a job update; before, by scontrol
BATCH_SIGNALS: Version = (0, 0, 40)  # to the batch script alone; before, also to everything that it started
COMPLETE_API: Version = (0, 0, 40)  # Slurm 23.11; needs no Slurm commands on the worker's machine
