"""Test the main workflow in the browser: sign in, submit, watch the chart move, see a checkpoint, cancel, resume."""

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Watched
from tests.stack import Stack
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SPEC = """\
name = "watched-in-a-browser"
kind = "distributed"
project = "default"
tags = ["browser"]

[resources]
ranks_per_node = 2
time_limit = "00:10:00"

[run]
recipe = "language"
steps = 1_000_000
global_batch = 8
warmup_steps = 10
validate_every = 50
validation_batches = 1
checkpoint_every = 50

[run.language]
layers = 1
heads = 2
head_width = 16
context = 32
"""


START_MS = 180_000  # ranks start while those of other tests run


@pytest.fixture
def empty_portal(portal_up: Stack) -> Iterator[Stack]:
    """Start a portal, and end all job processes afterwards, even on failure: they would occupy the next job's slots."""
    yield portal_up
    with portal_up.client() as client:
        for job in client.get("/api/v1/jobs", params={"state": "alive"}).json()["items"]:
            client.post(f"/api/v1/jobs/{job['id']}/cancel")
    until(lambda: not portal_up.job_processes(), "every job's processes to end")


def test_submit_watch_cancel_resume(empty_portal: Stack, browse: Callable[..., Watched]) -> None:
    watched = browse(empty_portal)
    page = watched.page
    watched.open("/submit")
    page.locator("#toml").fill(SPEC)
    expect(page.locator("#say")).to_contain_text("Ready to submit.")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url(re.compile(r"/jobs/\d+$"))
    expect(page.locator("h1")).to_have_text("watched-in-a-browser")

    # It starts, reports, and the chart moves without a reload.
    page.evaluate("window.stayed = true")
    canvas = page.locator("[data-chart=loss] canvas")
    canvas.wait_for(timeout=START_MS)
    step = page.locator("[data-chart=loss] .readout b").first
    first = step.inner_text()
    expect(step).not_to_have_text(first)
    before = canvas.evaluate("(c) => c.toDataURL()")
    page.wait_for_function(
        "(before) => document.querySelector('[data-chart=loss] canvas').toDataURL() !== before",
        arg=before,
    )
    expect(page.locator("#lamp")).to_have_attribute("data-live", "")
    expect(page.locator("[data-chart=ranks] h3")).to_contain_text("worst")
    expect(page.locator("#newest")).to_contain_text("50")
    expect(page.locator("#log-tail")).to_contain_text("loss")
    assert page.evaluate("window.stayed"), "the page was never reloaded"

    # Cancel: confirmed in a dialog, a last checkpoint, and a way back.
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Save and cancel").click()
    expect(page.locator("#toasts")).to_contain_text("Cancelling watched-in-a-browser.")
    expect(page.locator(".head .state")).to_have_text("cancelled")
    expect(page.locator(".say")).to_contain_text("It can be resumed from step")

    # Resume from that checkpoint, then end it for good.
    page.get_by_role("button", name="Resume…").click()
    page.locator("#resume").get_by_role("button", name="Resume").click()
    expect(page.locator("#toasts")).to_contain_text("Attempt 2 is queued and starts from step")
    expect(page.locator(".say")).to_contain_text("resumed from step", timeout=START_MS)
    expect(page.locator("#count-attempts")).to_have_text("2")
    page.get_by_role("link", name="Logs", exact=True).click()
    expect(page.locator("#log")).to_contain_text("loss", timeout=START_MS)
    lines = page.locator("#log li").count()
    page.wait_for_function("(n) => document.querySelectorAll('#log li').length > n", arg=lines)
    page.get_by_role("button", name="Cancel…").click()
    page.get_by_role("button", name="Save and cancel").click()
    expect(page.locator(".head .state")).to_have_text("cancelled")

    # What both attempts ran with, and the line that runs it again.
    page.get_by_role("link", name=re.compile("^Attempts")).click()
    for number in (1, 2):
        ran = page.locator(f"#attempt-{number} details.ran")
        expect(ran.locator("summary")).to_contain_text(re.compile(r"Ran with Python 3\S+, torch \S+ .*; \d+\spackages"))
        ran.locator("summary").click()
    expect(page.locator("#attempt-1 .packages")).to_contain_text("torch")
    expect(page.locator("#attempt-2 details.ran")).to_contain_text("as attempt 1")
    page.get_by_role("link", name="Spec", exact=True).click()
    expect(page.locator("#again")).to_have_text(re.compile(r"^vigil spec \d+ > again.toml && vigil submit again.toml$"))
