"""`python -P -m training.launch RUN_DIR`: one a node, started by batch.sh inside the allocation (protocols.md §1)."""

from training.launch.stop import Signals

# Before anything else is imported: a TERM that comes now must stop the attempt in good order, not just us.
SIGNALS = Signals()
if __name__ == "__main__":
    SIGNALS.install()

import os  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from contextlib import suppress  # noqa: E402
from pathlib import Path  # noqa: E402

from training.attempt.files import write_json  # noqa: E402
from training.launch import environment, script, snapshot  # noqa: E402
from training.launch.attempt import Attempt, take_attempt  # noqa: E402
from training.launch.launcher import Launcher  # noqa: E402
from training.launch.opening import open_up  # noqa: E402
from training.launch.outcome import Outcome  # noqa: E402
from training.launch.plan import BAD_PLAN, BadPlan, Plan, read_plan  # noqa: E402
from training.launch.ranks import become_subreaper  # noqa: E402
from training.launch.shipping import Shipping  # noqa: E402
from training.reporting.reporter import Reporter  # noqa: E402


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -P -m training.launch RUN_DIR", file=sys.stderr)
        return BAD_PLAN
    os.umask(0o027)
    become_subreaper()
    try:
        plan = read_plan(Path(arguments[0]).resolve())
        (plan.job_dir).mkdir(exist_ok=True)
        attempt = take_attempt(plan)
    except (BadPlan, OSError) as error:
        print(f"training.launch: {error}", file=sys.stderr)
        return BAD_PLAN
    try:
        return launch(plan, attempt)
    finally:
        open_up(plan.job_dir)


def launch(plan: Plan, attempt: Attempt) -> int:
    """The attempt on this node, from the code that is to run to the exit code."""
    log = open(attempt.folder / "logs" / f"launcher.{plan.node_rank}.log", "a", buffering=1)  # noqa: SIM115

    def say(line: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for file in (log, sys.stderr):
            with suppress(OSError):  # a full disk
                print(f"{stamp} {line}", file=file, flush=True)

    say(f"attempt {attempt.number} on {plan.node}, node {plan.node_rank} of {plan.nodes}, {plan.ranks_per_node} ranks")
    reporter = Reporter.open(
        attempt.folder, rank=-1 - plan.node_rank, incarnation=0, node=plan.node, restart_count=plan.restart_count
    )
    try:
        snapshot.ensure(plan, stopping=SIGNALS.is_asked)
        command = script.prepare(plan, attempt) if plan.script else environment.trainer(plan)
    except BadPlan as error:
        say(str(error))
        reporter.event("run.failed", error=str(error), exception="BadPlan")
        reporter.close()
        if plan.is_first:
            told = Outcome(BAD_PLAN, "failed", error=str(error)).told()
            write_json(attempt.folder / "result.json", told, durable=True)
        Shipping(plan, attempt).drain()
        return BAD_PLAN
    code = Launcher(plan, attempt, command=command, signals=SIGNALS, reporter=reporter, say=say).run()
    say(f"exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
