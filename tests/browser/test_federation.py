"""Test a federation in the browser: live updates round by round, keyboard use, and the page without scripts."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.conftest import Watched
from tests.stack import Stack
from tests.waiting import until

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
def nothing_left(portal_up: Stack) -> Iterator[None]:
    """End every job that the test submitted."""
    yield
    with portal_up.client() as client:
        for job in client.get("/api/v1/jobs", params={"state": "alive"}).json()["items"]:
            client.post(f"/api/v1/jobs/{job['id']}/cancel")
    until(lambda: not portal_up.job_processes(), "its job's processes to end")


@pytest.fixture
def running(portal_up: Stack) -> Iterator[int]:
    """Run a federation until the test ends."""
    with portal_up.client() as client:
        job_id = int(client.post("/api/v1/jobs", json={"spec": SPEC}).raise_for_status().json()["id"])
        at = f"/api/v1/jobs/{job_id}"
        until(lambda: client.get(f"{at}/rounds").json()["items"], "its first rounds")
        yield job_id
        client.post(f"{at}/cancel").raise_for_status()
        until(lambda: client.get(at).json()["state"] == "cancelled", "its end")


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
    expect(page.locator("[data-chart=seconds] .readout")).to_contain_text(re.compile(r"compute [\d.]+\s(m?s)"))
    expect(page.locator("[data-chart=bytes] .readout")).to_contain_text(re.compile(r"down [\d.e−]+\sMB"))
    before = drawn(watched)
    last = before["first"] + before["done"]
    until(lambda: (now := drawn(watched))["first"] + now["done"] > last, "newer rounds on the page")
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


def test_its_kind_is_chosen_in_the_form(portal_up: Stack, nothing_left: None, browse: Callable[..., Watched]) -> None:
    """Switch kinds and back: text of shared sections stays as written, sections of one kind go with it."""
    watched = browse(portal_up)
    page = watched.page

    def box(name: str) -> Locator:
        return page.locator(f"#fields [name='{name}']")

    def choose(kind: str, shown: str, gone: tuple[str, ...]) -> None:
        box("kind").select_option(kind)
        expect(box(shown)).to_be_visible()
        for name in gone:
            expect(box(name)).to_have_count(0)
        expect(box("name")).to_have_value("switched")
        expect(box("resources.time_limit")).to_have_value("00:07:00")
        expect(page.locator("#toml")).to_have_value(re.compile(rf'kind = "{kind}".*"00:07:00"', re.S))

    watched.open("/submit")
    box("name").fill("switched")
    box("resources.time_limit").fill("00:07:00")
    expect(page.locator("#toml")).to_have_value(re.compile('"00:07:00"'))
    choose("federated", "run.rounds", ("run.steps", "run.parallelism", "script.entry"))
    box("run.rounds").fill("3")
    expect(page.locator("#toml")).to_have_value(re.compile("rounds = 3"))
    choose("script", "script.entry", ("run.steps", "run.rounds", "run.clients"))
    expect(page.locator("#toml")).not_to_have_value(re.compile("rounds"))
    choose("federated", "run.rounds", ("run.steps", "script.entry"))
    box("run.rounds").fill("2")
    expect(page.locator("#toml")).to_have_value(re.compile("rounds = 2"))
    expect(page.locator("#say")).to_contain_text("Ready to submit.")
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url(re.compile(r"/jobs/\d+$"))
    expect(page.locator("h1")).to_have_text("switched")
    expect(page.locator(".tabs").get_by_role("link", name="Rounds")).to_be_visible()
