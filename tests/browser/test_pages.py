"""Test every page in a real browser, in both widths and themes: no errors, nothing cut off, every control named."""

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Watched
from tests.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.sampled(2)]

CLUSTER = [
    "/cluster",
    "/nodes",
    "/nodes/dgx-02",
    "/queue",
    "/waste",
    "/waste?by=job&days=30",
    "/reliability?by=node",
    "/agents",
    "/racks",
]
PAGES = [
    "/",
    "/jobs",
    "/jobs?state=bad",
    "/jobs?q=nothing-like-it&since=7d",
    "/submit",
    "/me/",
    "/docs",
    "/docs/reference/federated",
    *CLUSTER,
]
TABS = ["", "/logs", "/checkpoints", "/gpus", "/attempts", "/spec"]

# What a reader of the page would trip over. Hidden things are not read.
TRIPS = """() => {
  const found = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const say = (what, e) => found.push(`${what} ${e.outerHTML.slice(0, 120)}`);
  const shown = (e) => e.checkVisibility() && !e.closest("[aria-hidden=true]");
  const name = (e) => (e.getAttribute("aria-label") || e.title || e.textContent || "").trim();
  const described = (e) => e.getAttribute("aria-labelledby") || e.getAttribute("aria-describedby") || "";
  for (const e of all("a[href], button, summary")) if (shown(e) && !name(e)) say("nameless", e);
  for (const e of all("input:not([type=hidden]), select, textarea"))
    if (shown(e) && !e.labels.length && !e.getAttribute("aria-label")) say("unlabelled", e);
  for (const e of all("[role=img]"))
    if (shown(e) && !e.getAttribute("aria-label") && !described(e)) say("undescribed", e);
  const ids = all("[id]").map((e) => e.id);
  for (const id of new Set(ids)) if (ids.filter((i) => i === id).length > 1) found.push("twice #" + id);
  for (const e of all("[aria-labelledby], [aria-describedby]"))
    for (const id of described(e).split(" ")) if (!document.getElementById(id)) say("no #" + id, e);
  if (all("h1").length !== 1) found.push(all("h1").length + " h1");
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) found.push("wider than the window: " + width);
  return found;
}"""
Browse = Callable[..., Watched]


@pytest.fixture(scope="module")
def jobs(lab_up: Stack) -> dict[str, int]:
    """Return one job of the lab in each state."""
    with lab_up.client() as client:
        items = client.get("/api/v1/jobs?limit=200").json()["items"]
    return {job["state"]: job["id"] for job in items}


@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (390, "light")])
def test_nobody_trips(lab_up: Stack, jobs: dict[str, int], browse: Browse, width: int, theme: str) -> None:
    watched = browse(lab_up, width=width, theme=theme)
    paths = [*PAGES, f"/submit?from={jobs['completed']}"]
    paths += [f"/jobs/{number}{tab}" for number in set(jobs.values()) for tab in TABS]
    for path in paths:
        assert watched.open(path) == 200, path
        watched.settle()
        assert watched.page.evaluate(TRIPS) == [], path
        assert not watched.complaints, path


def test_nothing_jumps_while_a_job_loads(lab_up: Stack, jobs: dict[str, int], browse: Browse) -> None:
    watched = browse(lab_up, height=1400)
    for state in ("completed", "failed"):
        watched.open(f"/jobs/{jobs[state]}")
        watched.settle()
        assert watched.page.evaluate("window.shifted") < 0.02, state


def test_nothing_jumps_when_a_job_gets_going(lab_up: Stack, jobs: dict[str, int], browse: Browse) -> None:
    """The bar of its steps and the ribbon's key have their place before they come."""
    watched = browse(lab_up)
    watched.open(f"/jobs/{jobs['completed']}")
    measure = "document.querySelector('.tabs').getBoundingClientRect().top"
    there = watched.page.evaluate(measure)
    watched.page.evaluate("document.querySelector('.facts progress').remove()")
    watched.page.evaluate("document.querySelector('#life .key').replaceChildren()")
    assert watched.page.evaluate(measure) == there


def test_every_chart_is_drawn_before_it_is_scrolled_to(lab_up: Stack, jobs: dict[str, int], browse: Browse) -> None:
    watched = browse(lab_up, width=390)
    watched.open(f"/jobs/{jobs['completed']}")
    charts = watched.page.locator(".chart").count()
    expect(watched.page.locator(".chart canvas")).to_have_count(charts)
    assert watched.page.evaluate("scrollY") == 0


def test_pages_are_there_without_script(lab_up: Stack, jobs: dict[str, int], browse: Browse) -> None:
    watched = browse(lab_up, java_script_enabled=False)
    watched.open(f"/jobs/{jobs['completed']}")
    assert watched.page.locator("h1").inner_text()
    assert watched.page.locator("svg.ribbon").is_visible()
    assert watched.page.locator(".facts").is_visible()
    watched.open("/submit")
    watched.page.get_by_role("button", name="Check").click()
    assert "Dry run" in watched.page.locator("#findings").inner_text()
    watched.open("/jobs?q=")
    watched.page.get_by_label("Search jobs").fill("nothing-like-it")
    watched.page.get_by_role("button", name="Filter").click()
    assert "No job matches" in watched.page.locator(".empty").inner_text()


def test_the_theme_is_remembered_and_does_not_flash(lab_up: Stack, browse: Browse) -> None:
    watched = browse(lab_up, theme="light")
    watched.open("/")
    watched.page.get_by_role("button", name="Theme").click()
    assert watched.page.locator("html").get_attribute("data-theme") == "dark"
    dark = watched.page.evaluate("getComputedStyle(document.body).backgroundColor")
    watched.page.goto(watched.url + "/jobs")
    assert 'data-theme="dark"' in watched.page.content()
    assert watched.page.evaluate("getComputedStyle(document.body).backgroundColor") == dark


def test_a_first_visit_is_light(lab_up: Stack, jobs: dict[str, int], browse: Browse) -> None:
    """Styles, scripts and fonts of the heaviest page, as they go over the wire."""
    watched = browse(lab_up)
    watched.open(f"/jobs/{jobs['completed']}")
    watched.page.wait_for_selector("[data-chart=loss] canvas")
    watched.settle()
    sizes = watched.page.evaluate(
        "() => performance.getEntriesByType('resource').map((entry) => [entry.name, entry.encodedBodySize])"
    )
    static = {url: size for url, size in sizes if "/static/" in url}
    scripts = sum(size for url, size in static.items() if "/static/js/" in url)
    assert 10_000 < sum(static.values()) < 200_000, static
    assert 1_000 < scripts < 25_000, scripts
