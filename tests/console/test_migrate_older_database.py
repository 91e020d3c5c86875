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

OLDER_ACCEPTANCE = """
import django; django.setup()
from nodes.models import Acceptance, BurnIn
clauses = [{"key": "ecc", "outcome": "not tried"}, {"key": "pairs", "outcome": "passed"}]
burn_in = BurnIn.objects.create(key="b", state="ended", seconds=1)
Acceptance.objects.create(
    burn_in=burn_in, expression="a", node_count=1, gpu_count=8, clauses=clauses, summary="1 passed, 1 not tried."
)
"""
NEWER_ACCEPTANCE = """
import django; django.setup()
from console.site import migrations
migrations.migrate_older_database()
from nodes.models import Acceptance
acceptance = Acceptance.objects.get()
print([clause["outcome"] for clause in acceptance.clauses], acceptance.summary)
"""
OLDER_PROCESS = """
import django; django.setup()
from django.db import connection
from django.db.migrations.loader import MigrationLoader
before = MigrationLoader(connection).project_state(("nodes", "0025_drains_before_burn_ins")).apps
burn_in = before.get_model("nodes", "BurnIn").objects.create(key="b", seconds=1)
print(before.get_model("nodes", "BurnInNode").objects.create(burn_in=burn_in, node="dgx-01").pk)
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


def test_clauses_that_were_not_tried_are_not_checked(prepared_home: Path, tmp_path: Path) -> None:
    home = shutil.copytree(prepared_home, tmp_path / "home")
    for arguments in (("-c", OLDER_ACCEPTANCE), ("-m", "console.manage", "migrate", "nodes", "0028", "--verbosity=0")):
        assert python(home, *arguments).communicate(timeout=300) == ("", None)
    found = python(home, "-c", NEWER_ACCEPTANCE).communicate(timeout=300)[0]
    assert found == "['not checked', 'passed'] 1 passed, 1 not checked.\n"


def test_a_process_from_before_the_migration_still_starts_burn_ins(prepared_home: Path, tmp_path: Path) -> None:
    home = shutil.copytree(prepared_home, tmp_path / "home")
    assert python(home, "-c", OLDER_PROCESS).communicate(timeout=60)[0] == "1\n"


def test_a_database_that_was_never_prepared_is_left_alone(tmp_path: Path) -> None:
    start = python(tmp_path, "-c", CATCH_UP)
    assert start.communicate(timeout=60)[0] == "False\n", "only a first start, which also checks the site, makes it"
