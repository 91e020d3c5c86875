"""Test a node's page and a job's GPUs in the browser: live samples, a chosen time range, a row of the map."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Watched
from tests.browser.test_pages import TRIPS
from tests.stack import Stack
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.sampled(2)]
Browse = Callable[..., Watched]
NODE = "bench-01"
REFRESH = 'document.dispatchEvent(new Event("visibilitychange"))'
UUIDS = [f"GPU-b0b0{i:04x}-0000-0000-0000-000000000000" for i in range(2)]


@dataclass
class Machine:
    """A simulated agent that posts to a real portal."""

    stack: Stack
    token: str = ""
    next: int = 0
    until: int = 0
    gpus: list[str] = field(default_factory=lambda: UUIDS)

    def enrol(self) -> None:
        with self.stack.client() as client:
            self.token = client.post(f"/api/v1/nodes/{NODE}/token").raise_for_status().json()["token"]

    def post(self, *batches: dict[str, Any]) -> None:
        body = {
            "version": 1, "stream": "00000000000000b0", "first": self.next, "boot_id": "b", "sent_at": time.time(),
            "agent": "1.0", "batches": list(batches),
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {self.token}", "Content-Encoding": "gzip"}
        with self.stack.client() as client:
            answer = client.post(
                f"/api/v1/nodes/{NODE}/telemetry", content=gzip.compress(json.dumps(body).encode()),
                headers={**headers, "Content-Type": "application/json"},
            )  # fmt: skip
        self.next = int(answer.raise_for_status().json()["next"])

    def facts(self) -> None:
        about = {"name": "NVIDIA H100", "memory_mib": 81_559, "slowdown_c": 87, "power_cap_watts": 700}
        gpus = [{"uuid": uuid, "index": i, **about} for i, uuid in enumerate(self.gpus)]
        at = int(time.time()) - 3600
        self.post({"at": at, "n": 0, "events": [{"kind": "facts", "at": at, "gpus": gpus}]})

    def batch(self, at: int, percent: int) -> dict[str, Any]:
        """Return the next ten seconds of samples."""
        at = max(at, self.until)
        self.until = at + 10
        rows = {"gpu_percent": percent, "memory_mib": 20_480, "temperature_c": 61, "watts": 300}
        columns = {name: [[value] * 10 for _ in self.gpus] for name, value in rows.items()}
        return {"at": at, "n": 10, "gpus": self.gpus, "columns": columns, "host": {"cpu_percent": float(percent)}}


@pytest.fixture(scope="module")
def machine(portal_up: Stack) -> Machine:
    """Return a machine that has reported for ten minutes."""
    item, now = Machine(portal_up), int(time.time())
    item.enrol()
    item.facts()
    item.post(*(item.batch(at, 40) for at in range(now - 600, now - 20, 10)))
    return item


def shown(page: Page, percent: int) -> None:
    readout = page.locator(".lane").first.locator(".readout > span:not([hidden]) b").first
    expect(readout).to_have_text(str(percent))


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_a_machine_live_and_past(portal_up: Stack, machine: Machine, browse: Browse, width: int, theme: str) -> None:
    watched = browse(portal_up, width=width, theme=theme)
    page = watched.page
    watched.open(f"/nodes/{NODE}")
    expect(page.locator(".lane .plot canvas").first).to_be_visible()
    expect(page.locator("#lamp")).to_have_text("Live")
    assert page.evaluate(TRIPS) == []

    fresh = 70 + width % 7
    machine.post(machine.batch(int(time.time()) - 10, fresh))
    shown(page, fresh)
    happened = {"kind": "xid", "at": time.time(), "gpu": UUIDS[1], "xid": 31, "seq": width, "text": "<b>MMU Fault</b>"}
    machine.post({"at": int(time.time()), "n": 0, "events": [happened]})
    expect(page.locator(".say")).to_contain_text("Xid 31 on GPU 1")
    expect(page.locator("#below")).to_contain_text("<b>MMU Fault</b>")

    page.locator("#ranges").get_by_text("6h").click()
    page.wait_for_url(re.compile(r"\?range=6h$"))
    expect(page.locator("#ranges [aria-current]")).to_have_text("6h")
    page.go_back()
    expect(page.locator("#ranges [aria-current]")).to_have_text("1h")


def test_a_refresh_waits_for_a_form(portal_up: Stack, browse: Browse) -> None:
    watched = browse(portal_up)
    page = watched.page
    watched.open("/drains")
    expect(page.locator("#lamp")).to_have_text("Live")
    page.get_by_text("Add a hot spare…").click()
    page.locator("#spare-node").fill("dgx-1")
    page.evaluate(REFRESH)
    expect(page.locator("#lamp")).to_have_text("Paused")
    expect(page.locator("#spare-node")).to_have_value("dgx-1")
    page.locator("#spare-node").fill("")
    page.get_by_text("Add a hot spare…").click()
    page.evaluate(REFRESH)
    expect(page.locator("#lamp")).to_have_text("Live")


def test_dragging_over_a_chart_chooses_the_time(portal_up: Stack, machine: Machine, browse: Browse) -> None:
    watched = browse(portal_up)
    page = watched.page
    watched.open(f"/nodes/{NODE}")
    figure = page.locator("[data-chart=cpu]")
    figure.locator("canvas").wait_for()
    figure.scroll_into_view_if_needed()
    box = until(lambda: figure.locator(".u-over").bounding_box())
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + 40, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile(r"\?from=\d+&to=\d+$"))
    expect(page.locator("#ranges [aria-current]")).to_contain_text("–")
    assert "from=" in (page.locator("#csv").get_attribute("href") or "")
    shown(page, 40)


def test_scripts_of_the_page_are_light(portal_up: Stack, machine: Machine, browse: Browse) -> None:
    watched = browse(portal_up)
    sizes: dict[str, int] = {}
    watched.page.on("requestfinished", lambda r: sizes.update({r.url: r.sizes()["responseBodySize"]}))
    watched.open(f"/nodes/{NODE}")
    watched.page.locator(".lane .plot canvas").first.wait_for()
    assert sum(size for url, size in sizes.items() if "/static/js/" in url) < 25_000


def test_without_a_script_there_are_words_and_numbers(portal_up: Stack, machine: Machine, browse: Browse) -> None:
    watched = browse(portal_up, java_script_enabled=False)
    watched.open(f"/nodes/{NODE}")
    assert re.search(r"Temperature\s*61\s*°C of 87", watched.page.locator(".lane").first.inner_text())
    assert not watched.page.locator(".lane .plot").first.is_visible()


@pytest.fixture(scope="module")
def job(lab_up: Stack) -> int:
    """Return a job of the demonstration with agent reports for its GPUs."""
    with lab_up.client() as client:
        for item in client.get("/api/v1/jobs?limit=200").json()["items"]:
            heat = client.get(f"/api/v1/jobs/{item['id']}/gpus?columns=10").json()
            if heat["source"] == "agent" and len(heat["items"]) > 4:
                return int(item["id"])
    raise AssertionError("no job of the demonstration has GPUs that an agent told of")


@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (390, "light")])
def test_a_row_of_the_map(lab_up: Stack, job: int, browse: Browse, width: int, theme: str) -> None:
    watched = browse(lab_up, width=width, theme=theme)
    page = watched.page
    watched.open(f"/jobs/{job}/gpus")
    canvas, chosen, readout = page.locator(".heat-box canvas"), page.locator("#row-of"), page.locator("#cell")
    page.locator("[data-row=watts] canvas").wait_for()
    assert page.evaluate(TRIPS) == []
    drawn = json.loads(page.locator("#heat-data").inner_text())
    rows = [row["key"].replace(":", " GPU ") for group in drawn["groups"] for row in group["rows"]]

    canvas.scroll_into_view_if_needed()
    canvas.click(position={"x": 120, "y": drawn["rowHeight"] * 2.5})
    expect(chosen).to_have_text(rows[2])
    canvas.focus()
    page.keyboard.press("ArrowDown")
    expect(chosen).to_have_text(rows[3])
    expect(readout).to_contain_text(rows[3])
    assert "row=" in page.url

    page.get_by_role("link", name="Temperature").click()
    page.wait_for_url(re.compile("field=temperature_c"))
    expect(page.locator("#gpu-summary")).to_contain_text("temperature")
    expect(page.locator("[data-field][aria-current]")).to_have_text("Temperature")
    expect(chosen).to_have_text(rows[3])


IS_OF_THIS_THEME = """() => {
  const map = document.querySelector(".heat-box canvas");
  const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  Object.assign(copy.canvas, { width: map.width, height: 40 });
  const probe = document.body.appendChild(document.createElement("i"));
  const ramp = new Set(Array.from({ length: 9 }, (_, i) => {
    probe.style.color = `var(--seq-${i})`;
    copy.fillStyle = getComputedStyle(probe).color;
    copy.fillRect(0, 0, 1, 1);
    return copy.getImageData(0, 0, 1, 1).data.join();
  }));
  probe.remove();
  copy.drawImage(map, 0, 0);
  const { data } = copy.getImageData(0, 0, map.width, 40);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) found += ramp.has(data.slice(i, i + 4).join());
  return found > data.length / 12;
}"""


def test_the_map_takes_on_the_theme_that_is_chosen(lab_up: Stack, job: int, browse: Browse) -> None:
    watched = browse(lab_up, theme="light")
    watched.open(f"/jobs/{job}/gpus")
    watched.page.locator("[data-row=watts] canvas").wait_for()
    watched.page.wait_for_function(IS_OF_THIS_THEME)
    watched.page.get_by_role("button", name="Theme").click()
    watched.page.wait_for_function(IS_OF_THIS_THEME, timeout=5_000)


def test_dragging_over_the_map_shows_the_steps_of_that_time(lab_up: Stack, job: int, browse: Browse) -> None:
    watched = browse(lab_up)
    page = watched.page
    watched.open(f"/jobs/{job}/gpus")
    page.locator("[data-row=watts] canvas").wait_for()
    before = page.locator("#steps-of").inner_text()
    page.locator(".heat-box canvas").scroll_into_view_if_needed()
    box = page.locator(".heat-box canvas").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile(r"from=\d+&to=\d+"))
    expect(page.locator("#steps-of")).not_to_have_text(before)
    page.locator("#whole").click()
    expect(page.locator("#steps-of")).to_have_text(before)
    expect(page.locator("#whole")).to_be_hidden()
