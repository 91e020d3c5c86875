"""Test every role of the compose file in its image: one job passes through all of them."""

from __future__ import annotations

import json
import signal
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomlkit

from tests.image import compose
from tests.image.site import Site
from tests.stack import REPOSITORY
from tests.waiting import until

STEPS = 20
OURS = [name for name, service in compose.read().items() if service.target]


def spec(**run: Any) -> str:
    """Return a shortened version of the README's first job."""
    request = tomlkit.parse((REPOSITORY / "examples/language.toml").read_text())
    request["run"].update({"steps": STEPS, "warmup_steps": 2, "validate_every": 10, "checkpoint_every": 10, **run})
    return tomlkit.dumps(request)


def submit(client: httpx.Client, text: str) -> int:
    answer = client.post("/api/v1/jobs", content=text, headers={"Content-Type": "application/toml"})
    assert answer.status_code == 201, answer.text
    return int(answer.json()["id"])


def ended(client: httpx.Client, job: int) -> dict[str, Any]:
    def poll() -> dict[str, Any] | None:
        read: dict[str, Any] = client.get(f"/api/v1/jobs/{job}").json()
        return read if read["state"] in {"completed", "failed", "cancelled", "timeout"} else None

    found = until(poll, seconds=240)
    assert found
    return found


def test_a_job_goes_through_the_site(site: Site, client: httpx.Client) -> None:
    checked = client.post("/api/v1/jobs/check", content=spec(), headers={"Content-Type": "application/toml"})
    assert checked.status_code == 200, checked.text
    job = submit(client, spec())
    assert ended(client, job)["state"] == "completed", site.output()
    lines = client.get(f"/api/v1/jobs/{job}/series", params={"name": "loss"}).json()["items"]
    assert [line["last_step"] for line in lines] == [STEPS] * len(lines)
    assert lines
    assert client.get(f"/api/v1/jobs/{job}/logs").json()["items"]
    assert [item["step"] for item in client.get(f"/api/v1/jobs/{job}/checkpoints").json()["items"]] == [20, 10]


def test_pages_and_static_files_come_through_the_proxy(site: Site) -> None:
    with httpx.Client(base_url=site.url, follow_redirects=True, trust_env=False) as browser:
        page = browser.get("/")
        assert "Vigil" in page.text
        style = page.text.split('rel="stylesheet" href="')[1].split('"')[0]
        assert browser.get(style).status_code == 200


@pytest.mark.parametrize("name", [name for name in OURS if name != "prepare"])
def test_a_role_runs_as_nobody_in_particular(site: Site, name: str) -> None:
    status = Path(f"/proc/{site.containers[name].pid}/status").read_text()
    text = {line.split(":")[0]: line.split(":")[1].split() for line in status.splitlines()}
    assert text["Uid"] == ["10001"] * 4
    assert text["NoNewPrivs"] == ["1"]
    assert int(text["CapEff"][0], 16) == int(text["CapBnd"][0], 16) == 0
    assert site.containers[name].run("touch", "/srv/vigil/x").returncode
    assert site.containers[name].run("touch", "/home/vigil/x").returncode


@pytest.mark.parametrize("name", [name for name in OURS if name not in ("prepare", "follow")])
def test_only_the_node_has_torch(site: Site, name: str) -> None:
    readings = ("python", "-c", "import importlib.util as u; raise SystemExit(bool(u.find_spec('torch')))")
    assert site.containers[name].run(*readings).returncode == 0
    assert site.containers["follow"].run(*readings).returncode == 1


def test_prepare_prints_what_a_person_needs_and_nothing_else(site: Site) -> None:
    lines = site.containers["prepare"].output().splitlines()
    assert [line.split(":")[0] for line in lines] == ["Sign in"], lines


def test_secrets_come_from_files_alone(site: Site) -> None:
    secrets = [path.read_text() for path in (site.docker / "secrets").iterdir()]
    for name in OURS:
        body = json.dumps([site.services[name].environment, site.containers[name].image.environment])
        assert not [secret for secret in secrets if secret in body], name
        assert not [secret for secret in secrets if secret in site.containers[name].output()], name


def test_the_database_is_backed_up_from_within(site: Site) -> None:
    """Its pg_dump is as new as the server."""
    container = site.containers["work"]
    done = container.run("vigil", "backup", "/var/lib/vigil/backup.tar.gz")
    assert done.returncode == 0, done.stderr
    assert container.run("pg_restore", "--version").returncode == container.run("psql", "--version").returncode == 0


@pytest.mark.parametrize("name", [name for name in OURS if name != "prepare"])
def test_a_role_stops_on_request_and_starts_again(site: Site, name: str) -> None:
    """It is process 1, for which the kernel ignores signals without a handler."""
    container = site.containers[name]
    assert container.stop(10) in (0, 128 + signal.SIGTERM), container.output()
    site.start_service(replace(site.services[name], ports=[]))
    if site.services[name].healthcheck:
        site.wait(name, "service_healthy")
    until(lambda: container.ended is None)


def test_a_job_runs_after_all_of_that(site: Site, client: httpx.Client) -> None:
    job = submit(client, spec(steps=10))
    assert ended(client, job)["state"] == "completed", site.output()


def test_a_slurm_site_has_no_torch_anywhere() -> None:
    services = compose.read({"VIGIL_SCHEDULER": "slurm", "VIGIL_FOLLOW": "portal"})
    assert {services[name].image for name in OURS} == {"vigil:portal"}
    assert {services[name].environment["VIGIL_SCHEDULER"] for name in OURS} == {"slurm"}


def test_the_examples_are_valid_here(client: httpx.Client) -> None:
    for path in sorted((REPOSITORY / "examples").glob("*.toml")):
        if "sweep" in tomllib.loads(path.read_text()):
            continue
        answer = client.post(
            "/api/v1/jobs/check", content=path.read_text(), headers={"Content-Type": "application/toml"}
        )
        assert answer.status_code == 200, (path.name, answer.text)
