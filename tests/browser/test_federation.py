"""A federation in the browser: its page follows it round by round, and can be read by keys and without a script."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Watched
from tests.stack import Stack, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.browser]
SPEC = {
    "name": "digits",
    "kind": "federated",
    "resources": {"ranks_per_node": 1, "time_limit": "00:10:00"},
    "run": {
        "recipe": "tabular", "rounds": 100_000, "clients": 10, "learning_rate": 0.3, "split": "dirichlet",
        "dirichlet": {"alpha": 0.3},
    },
}  # fmt: skip
MATRIX = "(script) => script.textContent"


@pytest.fixture
def running(portal_up: Stack) -> Iterator[int]:
    """A federation that goes on until the test has ended."""
    with portal_up.client() as client:
        job_id = int(client.post("/api/v1/jobs", json={"spec": SPEC}).raise_for_status().json()["id"])
        at = f"/api/v1/jobs/{job_id}"
        wait_for(lambda: client.get(f"{at}/rounds").json()["items"], "its first rounds", 120)
        yield job_id
        client.post(f"{at}/cancel").raise_for_status()
        wait_for(lambda: client.get(at).json()["state"] == "cancelled", "its end", 120)


def drawn(watched: Watched) -> dict[str, Any]:
    return dict(json.loads(watched.page.locator("#matrix-data").evaluate(MATRIX)))


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_its_page_follows_it_round_by_round(
    portal_up: Stack, running: int, browse: Callable[..., Watched], width: int, theme: str
) -> None:
    watched = browse(portal_up, width=width, theme=theme)
    page = watched.page
    watched.open(f"/jobs/{running}")
    expect(page.locator(".tabs").get_by_role("link", name="Rounds")).to_have_attribute("aria-current", "page")
    canvas = page.locator("#matrix canvas")
    expect(canvas).to_be_visible()
    for chart in ("accuracy", "loss", "seconds", "bytes"):
        page.locator(f"[data-chart={chart}] canvas").wait_for()
    before = drawn(watched)
    last = before["first"] + before["done"]
    wait_for(lambda: (now := drawn(watched))["first"] + now["done"] > last, "newer rounds on the page", 60)
    canvas.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#cell")).to_have_text(re.compile(r"^client 1 · round [\d,]+ of [\d,]+ · trained"))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("link", name="Clients 10").click()
    expect(page.locator("table.fairness tbody tr")).to_have_count(10)


def test_without_a_script_its_numbers_are_there(portal_up: Stack, running: int, browse: Callable[..., Watched]) -> None:
    watched = browse(portal_up, java_script_enabled=False)
    watched.open(f"/jobs/{running}")
    expect(watched.page.locator("table.fairness tbody tr")).to_have_count(10)
    expect(watched.page.locator("#matrix")).to_be_hidden()
    watched.page.locator("#data summary").click()
    expect(watched.page.locator("#data tbody tr").first).to_be_visible()
