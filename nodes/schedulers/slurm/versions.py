"""What Slurm's REST API can from which version on, as far as Vigil minds; `docs/slurm.md` tells it to people."""

from __future__ import annotations

Version = tuple[int, int, int]


def text_of(version: Version) -> str:
    return "v" + ".".join(map(str, version))


OLDEST: Version = (0, 0, 38)  # Slurm 22.05
NEWEST: Version = (0, 0, 45)  # Slurm 26.05, the newest that the tests run on; what is newer is only read
NEW_FORM: Version = (0, 0, 39)  # of submissions: numbers as {set, number}; #SBATCH lines of the script are read
NODES_BY_NAME: Version = (0, 0, 39)  # a submission says which it wants, or not; before, scontrol does
ACCOUNTS_BY_USER: Version = (0, 0, 39)  # may be asked for one person's jobs alone
SCRIPT_IN_JOB: Version = (0, 0, 40)  # part of the submission's `job`, not beside it
BY_TASK: Version = (0, 0, 40)  # cancels "17_3", one of an array; before, scancel does
RELEASES: Version = (0, 0, 40)  # ends a hold by an update of the job; before, scontrol does
BATCH_SIGNALS: Version = (0, 0, 40)  # to the batch script alone; before, to everything that it started, too
NOTHING_LACKING: Version = (0, 0, 40)  # Slurm 23.11; needs none of Slurm's commands beside the worker
