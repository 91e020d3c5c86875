"""Test static/js/swaps.js in a real browser: what a person uses survives the replacement of a part of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser.conftest import Watched
from tests.stack import REPOSITORY, Stack

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.sampled(2)]
Browse = Callable[..., Watched]
REFRESH = 'htmx.ajax("GET", "/part", { target: "#live", swap: "innerHTML" })'
FRAME = """<!doctype html><html lang="en"><title>Nodes</title>
<style>.scroll { overflow: auto; height: 40px; width: 80px; } .scroll p { height: 400px; width: 400px; }</style>
<script src="/htmx.js"></script><script src="/swaps.js" type="module"></script>
<main><div id="live">%s</div></main></html>"""


def nodes(*names: str, age: str = "now") -> str:
    """Return a list of nodes, each with the controls that our pages have: few of them have an id."""
    return "".join(
        f'<article id="node-{name}"><a href="/nodes/{name}">{name}, {age}</a>'
        f'<form method="post" action="/nodes/{name}/undrain"><button>Undrain</button></form>'
        f"<details><summary>Log</summary><p>Log of {name}</p></details>"
        f'<div class="scroll"><p>Curve of {name}</p></div></article>'
        for name in names
    )


def served(name: str) -> Callable[[Route], None]:
    body = (REPOSITORY / "static" / name).read_text()
    return lambda route: route.fulfill(body=body, content_type="text/javascript")


class Scene:
    """A page that is refreshed with given content."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.part = ""
        page.route("**/page", lambda route: route.fulfill(body=FRAME % self.part, content_type="text/html"))
        page.route("**/part", lambda route: route.fulfill(body=self.part, content_type="text/html"))
        page.route("**/htmx.js", served("vendor/htmx/htmx.js"))
        page.route("**/swaps.js", served("js/swaps.js"))

    def open(self, part: str) -> None:
        self.part = part
        self.page.goto("http://vigil.test/page")

    def refresh(self, part: str) -> None:
        """Replace the live part and wait for it."""
        self.part = part
        self.page.evaluate(f"() => {REFRESH}")


@pytest.fixture
def scene(chromium: Browser) -> Iterator[Scene]:
    page = chromium.new_page()
    yield Scene(page)
    page.close()


@pytest.mark.parametrize("control", ["a", "button", "summary"])
def test_the_focus_stays_on_the_control_that_does_the_same(scene: Scene, control: str) -> None:
    scene.open(nodes("dgx-02", "dgx-03"))
    scene.page.locator(f"#node-dgx-03 {control}").focus()
    scene.refresh(nodes("dgx-01", "dgx-02", "dgx-03", age="5 s ago"))
    expect(scene.page.locator(f"#node-dgx-03 {control}")).to_be_focused()


def test_the_focus_never_moves_to_a_control_of_another_node(scene: Scene) -> None:
    scene.open(nodes("dgx-02", "dgx-03"))
    scene.page.locator("#node-dgx-02 button").focus()
    scene.refresh(nodes("dgx-03"))
    expect(scene.page.locator("#live :focus")).to_have_count(0)


def test_open_details_and_scroll_positions_stay(scene: Scene) -> None:
    scene.open(nodes("dgx-02", "dgx-03"))
    opened, box = scene.page.locator("#node-dgx-03 details"), scene.page.locator("#node-dgx-03 .scroll")
    opened.locator("summary").click()
    box.evaluate("e => e.scrollTo(30, 70)")
    scene.refresh(nodes("dgx-01", "dgx-02", "dgx-03"))
    expect(opened).to_have_attribute("open", "")
    expect(scene.page.locator("details[open]")).to_have_count(1)
    assert box.evaluate("e => [e.scrollLeft, e.scrollTop]") == [30, 70]


def test_drains_are_refreshed_under_the_focus(portal_up: Stack, browse: Browse) -> None:
    watched = browse(portal_up)
    page = watched.page
    watched.open("/drains")
    expect(page.locator("#lamp")).to_have_text("Live")
    spare = page.locator("summary", has_text="hot spare…")
    spare.evaluate("e => { window.before = e; }")
    spare.focus()
    page.evaluate('() => document.dispatchEvent(new Event("visibilitychange"))')
    page.wait_for_function("() => !window.before.isConnected")
    expect(spare).to_be_focused()
