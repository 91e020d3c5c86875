"""Test that management commands report a home that they cannot use."""

import os
import subprocess
import sys
from pathlib import Path

from tests.stack import REPOSITORY


def test_a_home_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # not a folder: root may create folders wherever they fit
    home = tmp_path / "file" / "vigil"
    refused = subprocess.run(
        [sys.executable, "-m", "console.manage", "check"], cwd=REPOSITORY, capture_output=True, text=True, check=False,
        env={**os.environ, "VIGIL_HOME": str(home)},
    )  # fmt: skip
    assert refused.returncode == 1
    assert refused.stderr.splitlines() == [
        f"vigil: {home} cannot be used: Not a directory. Create VIGIL_HOME as a folder of this user, or set another."
    ]
