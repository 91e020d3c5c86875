"""A process that starts with newer code than its database applies the missing migrations, once, however many start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import REPOSITORY

pytestmark = pytest.mark.slow

CATCH_UP = """
import django; django.setup()
from django.db import connection
from django.db.migrations.recorder import MigrationRecorder
from console.site import migrations
migrations.migrate_older_database()
print(("nodes", "0023_indexes_of_findings_by_node") in MigrationRecorder(connection).applied_migrations())
"""


def python(home: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "VIGIL_HOME": str(home), "DJANGO_SETTINGS_MODULE": "portal.settings"}
    environment.pop("DATABASE_URL", None)
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
    )


def test_two_processes_bring_an_older_database_up_to_date(prepared_home: Path, tmp_path: Path) -> None:
    home = shutil.copytree(prepared_home, tmp_path / "home")
    back = python(home, "-m", "console.manage", "migrate", "nodes", "0022", "--verbosity=0")
    assert back.communicate(timeout=300) == ("", None)
    assert back.returncode == 0
    starts = [python(home, "-c", CATCH_UP) for _ in range(2)]
    assert [start.communicate(timeout=300)[0] for start in starts] == ["True\n"] * 2
    assert [start.returncode for start in starts] == [0, 0]


def test_a_database_that_was_never_prepared_is_left_alone(tmp_path: Path) -> None:
    start = python(tmp_path, "-c", CATCH_UP)
    assert start.communicate(timeout=60)[0] == "False\n", "only a first start, which also checks the site, makes it"
