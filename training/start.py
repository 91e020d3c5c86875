"""`python start.py RUN_DIR`: the launcher, by whatever interpreter a job has. batch.sh runs it, as a file.

It needs nothing installed but NEEDS: this file's own checkout is where `training` is found, by the ranks, too.
Kept readable for old Pythons, so that they can say that they are too old.
"""

import os
import sys

LEAST = (3, 11)
NEEDS = "torch, numpy, psutil and pydantic"
BAD_PLAN = 2


def main() -> int:
    version = "%d.%d" % sys.version_info[:2]  # noqa: UP031
    if sys.version_info[:2] < LEAST:
        return _say("is Python %s; at least %d.%d is needed." % (version, *LEAST))  # noqa: UP031
    checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[0] = checkout  # instead of training/, whose files have names of their own
    theirs = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([checkout, theirs] if theirs else [checkout])
    import runpy

    try:
        runpy.run_module("training.launch", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        name = (error.name or str(error)).partition(".")[0]
        return _say(f"has no {name}. Install {NEEDS} there.")
    return 0


def _say(what: str) -> int:
    sentence = f"The job's Python, {sys.executable}, {what} Or name another under [environment].\n"
    sys.stderr.write(sentence)
    job = os.environ.get("VIGIL_SCHEDULER_ID") or os.environ.get("SLURM_JOB_ID", "")
    name = "{}.{}".format(job, os.environ.get("SLURM_RESTART_COUNT") or "0")
    told = os.path.join(sys.argv[1] if len(sys.argv) > 1 else "", "job", "told", name)
    if os.path.isdir(told):  # where the portal looks for what came before any launcher
        with open(os.path.join(told, "failed"), "w") as file:
            file.write(sentence)
    return BAD_PLAN


if __name__ == "__main__":
    sys.exit(main())
