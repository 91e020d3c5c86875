"""Test `vigil check slurm` on real clusters: no findings on a good one, and every breakable part by name."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.people import ALICE, BOB, PORTAL, People
from tests.slurm.portal import Portal
from tests.slurm.room import as_user
from tests.slurm.tls import tls_before
from tests.stack import REPOSITORY
from tests.waiting import until

pytestmark = pytest.mark.sampled(2)

# Of these clusters, on purpose: they are quick, and live on one machine without GPUs.
EXPECTED = {
    "VIGIL_RUNS: file system", "Vigil's own folder", "Partition debug: GPU", "MinJobAge", "ProctrackType", "KillWait",
    "Prolog",  # held_launches needs a Slurm that holds what its prolog refused
}  # fmt: skip


class Checked:
    """The output of a run of the command."""

    def __init__(self, code: int, report: dict[str, Any], progress: str) -> None:
        self.code, self.progress, self.is_ok = code, progress, report["ok"]
        self.findings: list[dict[str, str]] = report["findings"]

    def at(self, level: str) -> dict[str, str]:
        """Return the findings at this level, by title."""
        return {finding["title"]: finding["detail"] for finding in self.findings if finding["level"] == level}

    def remedy(self, title: str) -> str:
        return next(
            finding["remedy"] for finding in self.findings if finding["title"] == title and finding["level"] != "ok"
        )


def check(portal: Portal, *words: str, **environment: str) -> Checked:
    """Run the command as the portal's Unix user, where Slurm's commands are."""
    done = subprocess.run(
        portal.command("-m", "vigil_cli.main", "check", "slurm", "--json", *words), capture_output=True, text=True,
        check=False, env={**portal.environment, "VIGIL_PORT": str(portal.port), **environment}, timeout=200,
    )  # fmt: skip
    assert done.stdout, done.stderr
    key = portal.key.read_bytes().hex()
    assert "eyJ" not in done.stdout + done.stderr
    assert key not in done.stdout + done.stderr
    return Checked(done.returncode, json.loads(done.stdout), done.stderr)


def checked(portal: Portal, **environment: str) -> Checked:
    return check(portal, "--no-jobs", **environment)


def left_behind(portal: Portal) -> list[Path]:
    """Return what checks left behind, except the folders of projects, which jobs would have made as well."""
    return [*portal.runs.glob("*/*"), *portal.runs.glob(".trash/*")]


@pytest.mark.sampled(1)  # always
def test_all_is_well(portal: Portal) -> None:
    found = check(portal, "--partition=debug")
    assert found.at("error") == {}, found.progress
    assert found.at("skip") == {}
    assert set(found.at("warn")) <= EXPECTED
    assert (found.code, found.is_ok) == (0, True)
    well = found.at("ok")
    assert f"job of {ALICE} ran on dgx" in well["Partition debug"]
    assert "reaches" in well["Partition debug: reports"]
    assert BOB in well["Access by others is refused"]
    assert well["Nodes"] == "4 with 32 × h100"
    assert left_behind(portal) == []


def test_a_job_as_somebody_of_our_choice(portal: Portal) -> None:
    assert f"job of {BOB} ran" in check(portal, "--partition=debug", "--user=bob").at("ok")["Partition debug"]


def test_missing_settings(portal: Portal) -> None:
    found = checked(portal, VIGIL_SLURM_URL="", VIGIL_SLURM_KEY_FILE="")
    assert set(found.at("error")) == {"Address of slurmrestd", "Source of tokens"}
    assert found.code == 1
    assert "VIGIL_RUNS" in found.at("ok"), "the rest is checked all the same"


def test_another_key(portal: Portal) -> None:
    key = portal.key.read_bytes()
    portal.key.write_bytes(secrets.token_bytes(32))
    try:
        found = checked(portal)
    finally:
        portal.key.write_bytes(key)
    assert set(found.at("error")) == {f"Slurm accepts tokens of {PORTAL}"}
    assert "jwt_key" in found.remedy(f"Slurm accepts tokens of {PORTAL}")


def test_a_key_that_everybody_reads(portal: Portal) -> None:
    portal.key.chmod(0o644)
    try:
        found = checked(portal)
    finally:
        portal.key.chmod(0o600)
    assert "mode 0644" in found.at("error")["The key"]
    assert "chmod 0600" in found.remedy("The key")


def test_a_key_that_is_not_ours_to_read(portal: Portal) -> None:
    os.chown(portal.key, 0, 0)
    try:
        found = checked(portal)
    finally:
        os.chown(portal.key, portal.people.portal.uid, portal.people.portal.gid)
    assert "Permission denied" in found.at("error")["The key"]


def test_slurmrestd_down(portal: Portal, slurm: Cluster) -> None:
    with slurm.without("slurmrestd"):
        found = checked(portal)
    assert set(found.at("error")) == {"slurmrestd responds"}
    assert {"VIGIL_RUNS", "AuthAltTypes", "The key"} <= set(found.at("ok"))


def test_slurmctld_down(portal: Portal, slurm: Cluster) -> None:
    with slurm.without("slurmctld"):
        found = checked(portal)
    assert f"Slurm accepts tokens of {PORTAL}" in found.at("error")


def test_slurmdbd_down(portal: Portal, slurm: Cluster) -> None:
    with slurm.without("slurmdbd"):
        found = checked(portal)
    # 24.11 reports no partitions meanwhile.
    assert (
        {"Accounting responds (slurmdbd)"} <= set(found.at("error")) <= {"Accounting responds (slurmdbd)", "Partitions"}
    )
    assert "slurmdbd" in found.remedy("Accounting responds (slurmdbd)")
    assert {"Rights", "Projects"} <= set(found.at("skip"))


def test_a_slurmrestd_that_believes_everybody(portal: Portal, slurm: Cluster, release: str) -> None:
    """rest_auth/local: whoever may open the socket is the user who runs slurmrestd."""
    people, folder = People(), Path(tempfile.mkdtemp(prefix="vigil-rest-"))
    os.chown(folder, people.portal.uid, people.portal.gid)
    assert slurm.room
    process = subprocess.Popen(
        slurm.room.enter(*as_user(PORTAL, "slurmrestd", "-a", "rest_auth/local", f"unix:{folder}/socket")),
        env=slurm._inside, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        slurm.wait_for((folder / "socket").is_socket, "it to listen")
        found = checked(portal, VIGIL_SLURM_URL=f"unix:{folder}/socket")
    finally:
        process.kill()
        process.wait()
    assert found.at("error") == {"Slurm refuses a forged token": "accepted: authentication is off"}


def test_the_unix_socket(portal: Portal, slurm: Cluster) -> None:
    found = checked(portal, VIGIL_SLURM_URL=f"unix:{slurm.socket}")
    assert found.at("error") == {}
    assert found.at("ok")["Connection to slurmrestd"] == "a unix socket"


def test_a_proxy_with_a_certificate(portal: Portal, slurm: Cluster) -> None:
    folder = Path(tempfile.mkdtemp(prefix="vigil-tls-"))
    folder.chmod(0o755)
    try:
        with tls_before(slurm.layout.port_of("slurmrestd"), folder) as url:
            found = checked(portal, VIGIL_SLURM_URL=url, VIGIL_SLURM_CA_FILE=str(folder / "proxy.pem"))
            strange = checked(portal, VIGIL_SLURM_URL=url)
    finally:
        shutil.rmtree(folder)
    assert found.at("error") == {}
    assert found.at("ok")["Connection to slurmrestd"] == "https, its certificate verified"
    assert "CERTIFICATE_VERIFY_FAILED" in strange.at("error")["slurmrestd responds"]


@contextmanager
def somebody(portal: Portal, slurm_user: str, **project: str) -> Iterator[None]:
    """Create one more person in the project vision, and one more project."""
    program = (
        "import django, json, sys; django.setup(); from portal.models import *; user, project = sys.argv[1:]\n"
        "known = User.objects.filter(username='dora')\n"
        "known.delete(); Project.objects.filter(slug='more').delete()\n"
        "if user:\n"
        "    made = User.objects.create(username='dora', slurm_user=user)\n"
        "    Membership.objects.create(user=made, project=Project.objects.get(slug='vision'))\n"
        "if project: Project.objects.create(slug='more', slurm_account=project)\n"
    )

    def set_account(user: str, account: str) -> None:
        environment = {**portal.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
        command = portal.command("-c", program, user, account)
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)

    set_account(slurm_user, project.get("account", ""))
    try:
        yield
    finally:
        set_account("", "")


def test_a_person_without_an_association(portal: Portal) -> None:
    with somebody(portal, "daemon"):
        found = checked(portal)
    assert "no association" in found.at("error")["Person daemon"]
    assert found.remedy("Person daemon") == "sacctmgr add user daemon account=vision"
    assert "not in vigil-runs" in found.at("error")["VIGIL_RUNS: group"]


def test_a_person_whom_this_machine_does_not_know(portal: Portal) -> None:
    with somebody(portal, "nobodyhere"):
        found = checked(portal)
    texts = [finding["detail"] for finding in found.findings if finding["title"] == "Person nobodyhere"]
    assert any("no such Unix user" in detail for detail in texts)


def test_a_project_with_an_account_that_slurm_lacks(portal: Portal) -> None:
    with somebody(portal, "", account="chess"):
        found = checked(portal)
    assert found.at("error") == {"Accounts of projects": "project more has chess, which Slurm does not know"}


def test_a_portal_that_may_not_drain(portal: Portal) -> None:
    found = checked(portal, VIGIL_SLURM_USER=ALICE)
    assert "drain" in found.at("warn")[f"{ALICE} may drain nodes"]
    assert found.at("ok")[f"{ALICE} sees everybody's jobs"] == "PrivateData=none"


def test_private_data(portal: Portal, slurm: Cluster) -> None:
    """Slurm hides other people's jobs from everybody but operators and administrators."""
    conf, before = slurm.layout.slurm_conf, slurm.layout.slurm_conf.read_text()
    conf.write_text(f"{before}PrivateData=jobs\n")
    try:
        slurm.run("scontrol", "reconfigure")
        slurm.wait_for(slurm.is_well, "it to know")
        found = checked(portal, VIGIL_SLURM_USER=ALICE)
        ours = checked(portal)
    finally:
        conf.write_text(before)
        slurm.run("scontrol", "reconfigure")
        slurm.wait_for(slurm.is_well, "it to forget")
    assert found.at("error") == {f"{ALICE} sees everybody's jobs": "PrivateData=jobs hides them"}
    assert "AdminLevel=Admin" in found.remedy(f"{ALICE} sees everybody's jobs")
    assert ours.at("error") == {}


def test_a_run_root_open_to_everybody(portal: Portal) -> None:
    portal.runs.chmod(0o2777)
    try:
        found = checked(portal)
    finally:
        portal.runs.chmod(0o2710)
    assert "everybody" in found.at("error")["VIGIL_RUNS: mode"]


def test_a_run_root_without_access_lists(portal: Portal, slurm: Cluster) -> None:
    """ramfs keeps none. It is mounted in the room alone."""
    folder = Path(tempfile.mkdtemp(prefix="vigil-ram-"))
    slurm.run("mount", "-t", "ramfs", "none", folder)
    try:
        slurm.run("chown", f"{PORTAL}:vigil-runs", folder)
        slurm.run("chmod", "2710", folder)
        found = check(portal, "--partition=debug", VIGIL_RUNS=str(folder))
    finally:
        slurm.run("umount", folder)
        folder.rmdir()
    errors = found.at("error")
    assert "has none" in errors["Access control lists"]
    assert "no access control lists" in errors["Partition debug"]
    assert "ramfs" in found.at("warn")["VIGIL_RUNS: file system"]


def test_a_run_root_that_is_not_there(portal: Portal) -> None:
    found = checked(portal, VIGIL_RUNS="/nonexistent/runs")
    assert "install -d" in found.remedy("VIGIL_RUNS")


def test_a_partition_that_is_down(portal: Portal, slurm: Cluster) -> None:
    slurm.run("scontrol", "update", "PartitionName=debug", "State=DOWN")
    try:
        found = check(portal, "--partition=debug")
    finally:
        slurm.run("scontrol", "update", "PartitionName=debug", "State=UP")
    assert found.at("error") == {"Partition debug": "is down"}
    assert "State=UP" in found.remedy("Partition debug")


def test_a_busy_partition_is_not_broken(portal: Portal, slurm: Cluster) -> None:
    script = ("--wrap=sleep 120", "--partition=debug", "--exclusive", "--time=5")
    job = slurm.run("sbatch", "--parsable", *script, user=BOB).strip()
    slurm.wait_for(lambda: slurm.state(job) == "RUNNING", "the other's job to run")
    try:
        found = check(portal, "--partition=debug", "--wait=6")
    finally:
        slurm.run("scancel", job)
    assert found.at("error") == {}
    assert found.at("warn")["Partition debug"].startswith("busy, not broken")
    assert "is pending" in found.progress
    slurm.wait_for(lambda: not slurm.run("squeue", "--noheader").strip(), "the queue to be empty")


def test_a_report_address_that_nodes_cannot_reach(portal: Portal) -> None:
    found = check(portal, "--partition=debug", VIGIL_REPORT_URL="http://127.0.0.1:9")
    assert set(found.at("error")) == {"Partition debug: reports"}
    assert "VIGIL_REPORTS=tail" in found.remedy("Partition debug: reports")
    other = check(portal, "--partition=debug", VIGIL_REPORT_URL=portal.slurm.url)
    assert "is not Vigil" in other.at("error")["Partition debug: reports"]
    tailed = check(portal, "--partition=debug", VIGIL_REPORTS="tail", VIGIL_REPORT_URL="http://127.0.0.1:9")
    assert tailed.at("error") == {}


def test_a_python_that_nodes_lack(portal: Portal) -> None:
    found = check(portal, "--partition=debug", VIGIL_JOB_PYTHON="/nonexistent/python")
    assert "/nonexistent/python is not an interpreter on this node" in found.at("error")["Partition debug"]
    bare = check(portal, "--partition=debug", VIGIL_JOB_PYTHON=f"{sys.base_prefix}/bin/python3")
    assert "No module named 'torch'" in bare.at("error")["Partition debug: torch"]


def test_ctrl_c_leaves_nothing_behind(portal: Portal, slurm: Cluster) -> None:
    blocker = slurm.run(
        "sbatch", "--parsable", "--wrap=sleep 120", "--partition=debug", "--exclusive", user=BOB
    ).strip()
    slurm.wait_for(lambda: slurm.state(blocker) == "RUNNING", "the other's job to run")
    command = portal.command("-m", "vigil_cli.main", "check", "slurm", "--partition=debug")
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=portal.environment
    )
    try:
        assert process.stderr
        assert any("is pending" in line for line in process.stderr)
        process.send_signal(2)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.communicate()
        slurm.run("scancel", blocker)
    assert left_behind(portal) == []
    until(lambda: not slurm.run("squeue", "--noheader", f"--user={ALICE}").strip(), "alice's jobs to be gone")
