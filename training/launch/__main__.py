"""Launch one node's ranks: `python -P -m training.launch RUN_DIR` (protocols.md §1).

batch.sh starts it on every node.
"""

from training.launch.stop import Signals

# Installed before the other imports: a SIGTERM that arrives meanwhile must stop the whole attempt cleanly.
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
from training.launch.access import restore_access  # noqa: E402
from training.launch.attempt import Attempt, take_attempt  # noqa: E402
from training.launch.launcher import Launcher  # noqa: E402
from training.launch.outcome import Outcome  # noqa: E402
from training.launch.plan import BAD_PLAN, BadPlan, LaunchPlan, read_plan  # noqa: E402
from training.launch.ranks import become_subreaper  # noqa: E402
from training.launch.shipping import ShipperProcess  # noqa: E402
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
        restore_access(plan.job_dir)


def launch(plan: LaunchPlan, attempt: Attempt) -> int:
    """Run the attempt on this node, from fetching the code to the exit code, which is returned."""
    log_file = open(attempt.folder / "logs" / f"launcher.{plan.node_rank}.log", "a", buffering=1)  # noqa: SIM115

    def log(line: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for file in (log_file, sys.stderr):
            with suppress(OSError):  # a full disk
                print(f"{stamp} {line}", file=file, flush=True)

    log(f"attempt {attempt.number} on {plan.node}, node {plan.node_rank} of {plan.nodes}, {plan.ranks_per_node} ranks")
    reporter = Reporter(
        attempt.folder, rank=-1 - plan.node_rank, incarnation=0, node=plan.node, restart_count=plan.restart_count
    )
    try:
        snapshot.ensure_code(plan, stopping=SIGNALS.has_received)
        command = script.prepare(plan, attempt) if plan.script else environment.trainer(plan)
    except BadPlan as error:
        log(str(error))
        reporter.event("run.failed", error=str(error), exception="BadPlan")
        reporter.close()
        if plan.is_first:
            result = Outcome(BAD_PLAN, "failed", error=str(error)).to_dict()
            write_json(attempt.folder / "result.json", result, durable=True)
        ShipperProcess(plan, attempt).drain()
        return BAD_PLAN
    code = Launcher(plan, attempt, command=command, signals=SIGNALS, reporter=reporter, log=log).run()
    log(f"exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
