"""Run one rank with `python -m training run.toml`, or another command such as `python -m training verify FOLDER…`.

    python -m training examples/language.toml                                     # one rank, in this process
    python -m torch.distributed.run --nproc-per-node 2 -m training run.toml       # two
    python -m training run.toml --resume step-200                                 # newest (default), none, or a name
    python -m training export runs/gpt/job/checkpoints/step-400 gpt.safetensors   # the weights alone, as one file
    python -m training export runs/gpt/job/checkpoints/step-400 --hf gpt          # a folder that transformers loads
    python -m training prepare run.toml                                           # its data alone, on any machine

Started by hand, a run stores everything in `runs/<name>` next to the TOML file, and resumes where it was stopped. Exit
codes: 0 completed (under Vigil's launcher: or stopped), 75 stopped with a checkpoint, 1 failed, 2 wrong usage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from training import commands, rank, run_file
from training.config.base import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in commands.COMMANDS:
        return commands.run(arguments[0], arguments[1:])
    options = rank.parse(arguments)
    try:
        run = run_file.load(options.run)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return rank.train(run, options)


if __name__ == "__main__":
    code = main()
    if sys.argv[1:2] and sys.argv[1] in commands.COMMANDS:
        sys.exit(code)
    rank.end(code)
