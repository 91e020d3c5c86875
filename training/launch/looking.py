"""Deprecated name of `training.launch.node_report`: launchers that were started before an upgrade still run it."""

import os
import sys

from training.launch.node_report import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
