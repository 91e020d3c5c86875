"""These tests start a whole Slurm: `make test-slurm` runs them, `make test` leaves them out."""

import os

collect_ignore_glob = [] if os.environ.get("TEST_SLURM") else ["test_*.py"]
