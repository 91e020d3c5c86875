"""Run the launcher with fake ranks instead of the trainer: python fake_launch.py RUN_DIR 'options of fake_rank.py'."""

from __future__ import annotations

import sys
from pathlib import Path

from training.launch import __main__ as entry
from training.launch import environment, members
from training.launch.environment import RankCommand
from training.launch.plan import LaunchPlan

FAKE = Path(__file__).with_name("fake_rank.py")


def fake(plan: LaunchPlan) -> RankCommand:
    return RankCommand((sys.executable, "-P", str(FAKE), sys.argv[2]), plan.job_dir)


if __name__ == "__main__":
    entry.SIGNALS.install()
    environment.trainer = fake
    members.DEAD_SECONDS = 6.0  # long enough for a launcher on a busy machine, short enough to wait for
    sys.exit(entry.main(sys.argv[1:2]))
