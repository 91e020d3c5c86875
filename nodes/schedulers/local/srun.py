"""Stand in for srun under the local scheduler: run one process per node and forward TERM and USR1.

It accepts the options that batch.sh uses, each of which describes what it does anyway, and refuses all others. Like
srun, it exits with the highest exit code of its processes.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":  # isolated mode leaves the path to us
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from nodes.schedulers.local import processes

OPTIONS = {"--ntasks-per-node=1", "--kill-on-bad-exit=0", "--no-kill", "--cpu-bind=none", "--export=ALL"}
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2, signal.SIGCONT)


def main(arguments: list[str]) -> int:
    options, command = split(arguments)
    count = os.environ.get("SLURM_NNODES", "1")
    supported = OPTIONS | {f"--nodes={count}", f"--ntasks={count}"}
    if unsupported := [option for option in options if option not in supported]:
        print(f"srun: the local scheduler does not support {unsupported[0]}", file=sys.stderr)
        return 2
    if not command:
        print("srun: no command given", file=sys.stderr)
        return 2
    processes.die_with_parent()
    # Blocked before the first start: a signal that arrives now is forwarded once all processes have started.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED_SIGNALS, signal.SIGCHLD})
    nodes = int(count)
    running = {start(command, node, nodes) for node in range(nodes)}
    worst = 0
    while running:
        number = signal.sigwait({*FORWARDED_SIGNALS, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            for pid in running:
                os.kill(pid, number)
        for pid, status in processes.reaped():
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            worst = max(worst, code if code >= 0 else 128 - code)
    return worst


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into srun's options and the command."""
    at = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), len(arguments))
    return arguments[:at], arguments[at:]


def start(command: list[str], node: int, nodes: int) -> int:
    """Start one process with the environment of an srun task; return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        processes.die_with_parent()
        if os.getppid() != parent:
            os._exit(137)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, programs rely on them
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, environment_of(node, nodes))
    except OSError as error:
        print(f"srun: {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def environment_of(node: int, nodes: int) -> dict[str, str]:
    names = os.environ["SLURM_JOB_NODELIST"].split(",")
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    share = len(gpus) // nodes
    return {
        **os.environ,
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": str(nodes),
        "SLURMD_NODENAME": names[node],
        "CUDA_VISIBLE_DEVICES": ",".join(gpus[node * share : (node + 1) * share]),
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
