"""Test a job's efficiency in the browser: the verdict and its bar, and requesting and downloading a profile."""

import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Watched
from tests.stack import Stack
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser]

EDGES = "(all) => all.map((e) => e.getBoundingClientRect()).map((box) => [box.x, box.right])"


@pytest.fixture(scope="module")
def jobs(lab_up: Stack) -> dict[str, int]:
    """Return the lab's jobs by name."""
    with lab_up.client() as client:
        return {job["name"]: job["id"] for job in client.get("/api/v1/jobs?limit=200").json()["items"]}


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_shows_what_bounds_a_job(
    lab_up: Stack, jobs: dict[str, int], browse: Callable[..., Watched], width: int, theme: str
) -> None:
    watched = browse(lab_up, width=width, theme=theme)
    watched.open(f"/jobs/{jobs['gpt-760m-context-4k']}")
    shown = watched.page.locator("#measured")
    expect(shown.get_by_role("heading", name="Bound by communication")).to_be_visible()
    expect(shown).to_contain_text("Goodput")
    bar = shown.get_by_role("img", name=re.compile(r"^A step of .*: forward .*, communication 21"))
    expect(bar).to_be_visible()
    # The parts fill the bar, and no name is cut off.
    edges = bar.locator("rect").evaluate_all(EDGES)
    box = bar.bounding_box()
    assert box
    assert edges[0][0] == pytest.approx(box["x"], abs=1.5)
    assert edges[-1][1] == pytest.approx(box["x"] + box["width"], abs=1.5)
    names = bar.locator("text").evaluate_all(EDGES)
    around = bar.locator("rect:has(+ text)").evaluate_all(EDGES)
    assert names
    assert all(name[1] <= part[1] for name, part in zip(names, around, strict=True))
    for chart in ("mfu", "communication_share", "speed", "ranks", "gradient_norm"):
        watched.page.locator(f"[data-chart={chart}] canvas").wait_for()


SPEC = {
    "name": "profiled",
    "kind": "distributed",
    "resources": {"ranks_per_node": 1, "time_limit": "00:10:00"},
    "run": {"recipe": "vision", "steps": 1_000_000, "global_batch": 32, "validate_every": 0, "checkpoint_every": 0},
}


@pytest.fixture
def running(portal_up: Stack) -> Iterator[int]:
    """Run a job that takes steps until the test ends."""
    with portal_up.client() as client:
        job_id = int(client.post("/api/v1/jobs", json={"spec": SPEC}).raise_for_status().json()["id"])
        at = f"/api/v1/jobs/{job_id}"
        until(lambda: client.get(f"{at}/series", params={"name": "loss"}).json()["items"], "its first steps")
        yield job_id
        client.post(f"{at}/cancel").raise_for_status()
        until(lambda: client.get(at).json()["state"] == "cancelled", "its end")


def test_a_profile_is_a_click_away(
    portal_up: Stack, running: int, browse: Callable[..., Watched], tmp_path: Path
) -> None:
    watched = browse(portal_up)
    page = watched.page
    watched.open(f"/jobs/{running}")
    page.get_by_role("button", name="Profile 5 steps").click()
    expect(page.locator("#toasts")).to_contain_text("Rank 0 records its next 5 steps.")
    link = page.locator("#measured").get_by_role("link", name=re.compile(r"^Steps [\d,]+–[\d,]+, rank 0$"))
    expect(link).to_be_visible(timeout=90_000)  # it appears when the page's head is redrawn
    with page.expect_download() as download:
        link.click()
    download.value.save_as(tmp_path / "trace.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
