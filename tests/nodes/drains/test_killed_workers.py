"""Workers are killed between an order and the scheduler's answer: it is carried out once, and audited once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stack import REPOSITORY

pytestmark = pytest.mark.slow
KILLED = [9, 9, 0, 0]


@pytest.fixture(scope="module")
def found(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("killed") / "home"
    shutil.copytree(prepared_home, home)
    environment = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")}
    environment |= {"VIGIL_HOME": str(home), "VIGIL_HEALTH": "act", "DJANGO_SETTINGS_MODULE": "portal.settings"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.nodes.drains.killed_workers"], cwd=REPOSITORY, env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


class TestKilledWorkers:
    """All acts happen in one process tree, as importing Django takes longer than each of them."""

    def test_a_drain_and_an_undrain_of_this_machine(self, found: dict[str, Any]) -> None:
        for action in ("drain", "undrain"):
            act = found["local"][action]
            assert act["signals"] == KILLED
            assert [call.split()[0] for call in act["calls"]] == [action], "the scheduler was called once"
        drained, undrained = found["local"]["drain"], found["local"]["undrain"]
        assert list(drained["out"].values()) == ["fan 3 (vigil: ops)"]
        assert undrained["out"] == {}
        assert [text.split()[0::2] for text in undrained["orders"]] == [["drain", "done"], ["undrain", "done"]]
        assert [text.split()[0] for text in undrained["audit"]] == ["drain", "undrain"]

    def test_a_drain_of_many_nodes(self, found: dict[str, Any]) -> None:
        act = found["cluster"]["bulk drain"]
        assert act["signals"] == KILLED
        assert sorted(act["calls"]) == ["drain dgx-01", "drain dgx-02", "drain dgx-03"]
        assert act["out"] == dict.fromkeys(("dgx-01", "dgx-02", "dgx-03"), "new switch (vigil: ops)")
        assert act["orders"][-3:] == [f"drain {name} done" for name in act["out"]]
        assert act["audit"][-3:] == [f"drain {name}" for name in act["out"]]

    def test_an_exchange_of_a_spare(self, found: dict[str, Any]) -> None:
        act = found["cluster"]["exchange"]
        assert act["signals"] == KILLED
        assert act["calls"] == ["undrain dgx-20"]
        assert "dgx-20" not in act["out"]
        assert act["out"]["dgx-10"].endswith("(vigil: off-bus)")
        assert act["audit"].count("spare.in_service dgx-20") == 1
        assert act["orders"].count("undrain dgx-20 done") == 1

    def test_a_return_to_service(self, found: dict[str, Any]) -> None:
        act = found["cluster"]["return"]
        assert act["signals"] == KILLED
        assert act["calls"][0] == "undrain dgx-10"
        assert act["calls"].count("undrain dgx-10") == 1
        assert act["orders"].count("undrain dgx-10 done") == 1
        assert act["audit"].count("undrain dgx-10") == 1
