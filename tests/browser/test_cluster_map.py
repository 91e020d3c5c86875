"""Test the map of the cluster: switching views without a request, keyboard navigation, updates from agents' posts."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Watched
from tests.browser.test_pages import TRIPS
from tests.stack import REPOSITORY, Stack

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.sampled(2)]
Browse = Callable[..., Watched]
NODES = 300
FILL = f"""
import django
django.setup()
from bench import simulated_fleet
from nodes.telemetry.enrolment import enroll_here
made = simulated_fleet.make({NODES}, made_up=True, cpu_nodes=2)
print(enroll_here("dgx-001"))
print(" ".join(made.uuids["dgx-001"]))
"""


class Posting:
    """The agent of dgx-001, with GPU values that a test changes."""

    def __init__(self, stack: Stack, token: str, uuids: list[str]) -> None:
        self.stack, self.token, self.uuids, self.next = stack, token, uuids, 0

    def report(self, percent: int, celsius: int = 55) -> None:
        columns = {"gpu_percent": percent, "temperature_c": celsius, "watts": 333, "memory_mib": 7}
        rows = {name: [[value] * 10 for _ in self.uuids] for name, value in columns.items()}
        batch = {"at": int(time.time()) - 10, "period": 1, "n": 10, "gpus": self.uuids, "columns": rows, "host": {}}
        about = {"version": 1, "stream": "fedcba9876543210", "first": self.next, "boot_id": "b", "agent": "0.1.0"}
        answer = httpx.post(
            f"{self.stack.url}/api/v1/nodes/dgx-001/telemetry",
            content=gzip.compress(json.dumps({**about, "sent_at": time.time(), "batches": [batch]}).encode()),
            headers={"Authorization": f"Bearer {self.token}", "Content-Encoding": "gzip"},
        )
        assert answer.status_code == 200, answer.text
        self.next = answer.json()["next"]


@pytest.fixture(scope="module")
def cluster_up(prepared_home: Path) -> Iterator[Posting]:
    """Start a portal that shows 300 nodes with 2,400 GPUs in addition to its own machine."""
    stack = Stack(prepared_home, VIGIL_AGENT="no")
    try:
        stack.start(timeout_s=120)
        environment = {**stack.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
        filled = subprocess.run(
            stack.command("-c", FILL), cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True
        )
        token, uuids = filled.stdout.splitlines()[-2:]
        yield Posting(stack, token, uuids.split())
    finally:
        stack.close()


def cell(page: Page, index: int) -> Any:
    return page.locator(f'[data-node="dgx-001"] .gpu[data-i="{index}"]')


def shown(page: Page, index: int) -> str:
    """Return the text in a cell, which CSS generates."""
    text = cell(page, index).evaluate("e => getComputedStyle(e, '::after').content")
    return str(text).strip('"')


def test_a_radio_switches_what_cells_show_without_a_request(cluster_up: Posting, browse: Browse) -> None:
    watched = browse(cluster_up.stack)
    watched.open("/cluster?rack=R01")
    page = watched.page
    cluster_up.report(47, 58)
    expect(cell(page, 0)).to_have_attribute("data-use", "47")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    texts, colours = [], []
    for name in ("Utilisation", "Temperature", "Owner", "State"):
        page.get_by_text(name, exact=True).first.click()
        texts.append(shown(page, 0))
        colours.append(cell(page, 0).evaluate("e => getComputedStyle(e).backgroundColor"))
    owner = cell(page, 0).get_attribute("data-owner")
    assert texts == ["47", "58", owner, ""]
    assert len(set(colours)) == 4
    assert requests == []
    page.get_by_text("Temperature", exact=True).first.click()
    assert "by=heat" in page.url
    assert "rack=R01" in page.url
    page.reload()
    expect(page.locator("#by-heat")).to_be_checked()
    assert shown(page, 0) == "58"


def test_cells_change_as_agents_report(cluster_up: Posting, browse: Browse) -> None:
    watched = browse(cluster_up.stack)
    watched.open("/cluster?rack=R01&by=use")
    page = watched.page
    expect(page.locator("#lamp")).to_have_text("Live")
    cluster_up.report(12)
    expect(cell(page, 3)).to_have_attribute("data-use", "12")
    expect(cell(page, 3)).to_have_attribute("data-u", "1")
    cluster_up.report(99, 90)
    expect(cell(page, 3)).to_have_attribute("data-s", "hot")
    assert cell(page, 3).get_attribute("data-mark") == "▲"
    cluster_up.report(99, 50)
    expect(cell(page, 3)).to_have_attribute("data-temp", "50")
    assert page.evaluate("window.shifted") < 0.01


def test_gpus_are_walked_by_keys_and_a_card_gives_the_focus_back(cluster_up: Posting, browse: Browse) -> None:
    watched = browse(cluster_up.stack)
    watched.open("/cluster?rack=R01")
    page = watched.page
    expect(cell(page, 0)).to_have_attribute("tabindex", "0")
    assert page.locator('.gpu[tabindex="0"]').count() == 1, "one stop of the Tab key"
    cell(page, 0).focus()
    page.keyboard.press("ArrowRight")
    expect(cell(page, 1)).to_be_focused()
    page.keyboard.press("End")
    expect(cell(page, 7)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator('[data-node="dgx-002"] .gpu[data-i="7"]')).to_be_focused()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    card = page.locator("#gpu-card")
    expect(card).to_be_visible()
    expect(card).to_contain_text("GPU 7 of dgx-001")
    expect(card).to_contain_text("throttles at 87 °C")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    expect(cell(page, 7)).to_be_focused()
    cell(page, 2).click()
    expect(card).to_contain_text("GPU 2 of dgx-001")
    box, window = card.bounding_box(), page.viewport_size
    assert box
    assert window
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= window["width"]


def test_the_focus_stays_when_the_map_is_redrawn(cluster_up: Posting, browse: Browse) -> None:
    watched = browse(cluster_up.stack)
    watched.open("/cluster?rack=R01")
    page = watched.page
    expect(cell(page, 4)).to_have_attribute("tabindex", "-1")
    cell(page, 4).focus()
    cell(page, 4).evaluate("e => { e.dataset.old = '' }")
    page.evaluate('() => htmx.ajax("GET", location.href, { target: "#live", swap: "innerHTML" })')
    expect(page.locator("[data-old]")).to_have_count(0)
    expect(cell(page, 4)).to_be_focused()


def test_the_map_is_there_without_a_script(cluster_up: Posting, browse: Browse) -> None:
    watched = browse(cluster_up.stack, java_script_enabled=False)
    watched.open("/cluster")
    page = watched.page
    page.get_by_role("link", name="R01", exact=True).click()
    page.get_by_text("Owner", exact=True).first.click()
    expect(page.locator("#by-owner")).to_be_checked()
    cell(page, 5).click()
    page.wait_for_url(re.compile(r"/nodes/dgx-001#gpu-\d+$"))


def test_many_nodes_are_a_single_canvas_with_keys(cluster_up: Posting, browse: Browse) -> None:
    watched = browse(cluster_up.stack)
    watched.open("/cluster?by=use")
    page = watched.page
    assert page.evaluate("document.querySelectorAll('*').length") < 2_500
    canvas, readout = page.locator("#map"), page.locator("#readout")
    canvas.focus()
    expect(readout).to_contain_text("dgx-001")
    expect(readout).to_contain_text("GPU 0")
    expect(readout).to_have_attribute("aria-live", "polite")
    page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("GPU 1")
    page.keyboard.press("ArrowDown")
    expect(readout).to_contain_text("dgx-002")
    page.keyboard.press("ArrowUp")
    cluster_up.report(37)
    expect(readout).to_contain_text("37\N{NO-BREAK SPACE}%")
    before = canvas.screenshot()
    cluster_up.report(98)
    expect(readout).to_contain_text("98\N{NO-BREAK SPACE}%")
    assert canvas.screenshot() != before, "its cells were painted again"
    page.get_by_text("Temperature", exact=True).first.click()
    assert "by=heat" in page.url
    canvas.focus()
    page.keyboard.press("Enter")
    card = page.locator("#gpu-card")
    expect(card).to_contain_text("GPU 1 of dgx-001")
    page.keyboard.press("Escape")
    expect(canvas).to_be_focused()
    page.keyboard.press("End")
    expect(readout.locator("b")).to_have_text(re.compile("^(cpu-|[a-z]).*"))
    box = canvas.bounding_box()
    assert box
    page.mouse.move(box["x"] + 12, box["y"] + 24)
    expect(readout).to_contain_text("dgx-001")


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_nobody_trips_over_a_large_cluster(cluster_up: Posting, browse: Browse, width: int, theme: str) -> None:
    watched = browse(cluster_up.stack, width=width, theme=theme)
    for path in ("/cluster", "/cluster?rack=R02&by=owner", "/cluster?rack=h100", "/agents", "/racks"):
        assert watched.open(path) == 200, path
        watched.page.wait_for_load_state("networkidle")
        assert watched.page.evaluate(TRIPS) == [], path
