"""Run `training.launch.node_report` for launchers that were started before version 0.2. Remove in 0.3."""

import os
import sys

from training.launch.node_report import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
