"""Test the agent as one file, without the rest of Vigil."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nodes.agent.bundle import BundleError, write_bundle
from nodes.agent.version import VERSION
from tests.nodes.agent.running import ROOT, Running
from tests.nvml import uuid
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "vigil-agent.pyz"
    assert write_bundle(path) == path.stat().st_size
    return path


def python() -> str:
    """An interpreter with nothing but the standard library."""
    return str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")


class TestBundle:
    def test_it_holds_what_it_needs_and_no_more(self, bundle: Path) -> None:
        names = {name.split("/")[0] for name in zipfile.ZipFile(bundle).namelist()}
        assert names == {"__main__.py", "nodes", "gpus", "pynvml.py"}
        assert bundle.stat().st_size < 300_000

    def test_the_same_code_makes_the_same_file(self, bundle: Path, tmp_path: Path) -> None:
        write_bundle(tmp_path / "again.pyz")
        assert (tmp_path / "again.pyz").read_bytes() == bundle.read_bytes()

    def test_a_sample_by_it(self, bundle: Path, agent: Running, tmp_path: Path) -> None:
        done = subprocess.run(
            [python(), "-I", str(bundle), "--once", "--json"],
            cwd=tmp_path,
            env=agent.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        payload = json.loads(done.stdout)
        assert [gpu["uuid"] for gpu in payload["gpus"]] == [uuid(number) for number in range(8)]

    def test_it_runs_and_reads_gpus_in_a_child_process(self, bundle: Path, agent: Running, tmp_path: Path) -> None:
        agent.process = subprocess.Popen(
            [python(), str(bundle), "--period", "0.1"], cwd=tmp_path, env=agent.environment
        )
        until(lambda: any(len(batch["gpus"]) == 8 for batch in agent.portal.batches()))
        assert agent.end() < 10

    def test_a_bundle_that_cannot_be_written_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(BundleError, match="cannot be written"):
            write_bundle(tmp_path / "none" / "vigil-agent.pyz")


def test_it_has_the_version_of_its_portal() -> None:
    assert f'\nversion = "{VERSION}"\n' in (ROOT / "pyproject.toml").read_text()
