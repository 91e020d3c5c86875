"""Test charts of a job's page: choices in the address, smoothing, and repeated steps."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Locator, Page, Route, WebSocketRoute, expect

from jobs import live
from tests.browser.conftest import Watched, drag
from tests.stack import Stack
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.sampled(2)]
Browse = Callable[..., Watched]
AGAIN = re.compile(r"/series\?.*\ball=1\b")
PICTURE = "(canvas) => canvas.toDataURL()"
CHANGED = "(picture) => document.querySelector('[data-chart=loss] canvas').toDataURL() !== picture"


@pytest.fixture(scope="module")
def jobs(lab_up: Stack) -> dict[str, int]:
    """Return the lab's jobs by name."""
    with lab_up.client() as client:
        return {job["name"]: job["id"] for job in client.get("/api/v1/jobs?limit=200").json()["items"]}


def figure_of(page: Page, name: str) -> Locator:
    figure = page.locator(f"[data-chart={name}]")
    figure.locator("canvas").wait_for()
    return figure


def opened(watched: Watched, path: str) -> Locator:
    """Open a page and return its lead chart once all curves have loaded."""
    watched.open(path)
    figure = figure_of(watched.page, "loss")
    watched.page.wait_for_load_state("networkidle")
    return figure


def expect_picture(figure: Locator, picture: str) -> None:
    """Wait until the drawing equals the given one."""
    becomes = "(picture) => document.querySelector('[data-chart=loss] canvas').toDataURL() === picture"
    figure.page.wait_for_function(becomes, arg=picture)


def test_what_was_chosen_is_in_the_address_and_going_back_undoes_it(
    lab_up: Stack, browse: Browse, jobs: dict[str, int]
) -> None:
    watched = browse(lab_up)
    page = watched.page
    path = f"/jobs/{jobs['gpt-760m-baseline']}"
    figure = opened(watched, path)
    back, others = figure.locator("[data-live-edge]"), page.locator("[data-chart=gradient_norm] [data-live-edge]")
    expect(back).to_be_hidden()
    whole = figure.locator("canvas").evaluate(PICTURE)

    drag(figure, 0.3, 0.6)
    page.wait_for_url(re.compile(r"\?from=1\d\d\d&to=2\d\d\d$"))
    expect(back).to_be_visible()
    expect(others).to_be_visible()
    zoomed = page.url
    figure.get_by_role("button", name="Log").click()
    expect(figure.locator("[data-scale=log]")).to_have_attribute("aria-pressed", "true")
    assert page.url == f"{zoomed}&log=loss"
    figure.get_by_label("Smoothing").select_option("5\N{NO-BREAK SPACE}%")
    assert page.url == f"{zoomed}&log=loss&smooth=0.05"
    page.mouse.move(5, 5)

    # Somebody else opens that address.
    theirs = browse(lab_up)
    their_figure = opened(theirs, page.url.removeprefix(watched.url))
    expect(their_figure.locator("[data-scale=log]")).to_have_attribute("aria-pressed", "true")
    expect(their_figure.get_by_label("Smoothing")).to_have_value("0.05")
    until(lambda: their_figure.locator("canvas").evaluate(PICTURE) == figure.locator("canvas").evaluate(PICTURE))
    assert their_figure.locator(".readout").inner_text() == figure.locator(".readout").inner_text()

    page.go_back()
    expect(figure.get_by_label("Smoothing")).to_have_value("0.01")
    page.go_back()
    expect(figure.locator("[data-scale=log]")).to_have_attribute("aria-pressed", "false")
    assert page.url == zoomed
    page.go_back()
    expect(back).to_be_hidden()
    expect(others).to_be_hidden()
    assert page.url == watched.url + path
    expect_picture(figure, whole)
    page.go_forward()
    expect(back).to_be_visible()
    back.click()
    expect(back).to_be_hidden()
    assert page.url == watched.url + path


def test_zooming_by_keys_is_one_step_of_the_history(lab_up: Stack, browse: Browse, jobs: dict[str, int]) -> None:
    watched = browse(lab_up)
    page = watched.page
    figure = opened(watched, f"/jobs/{jobs['gpt-760m-baseline']}?since=yesterday#charts")
    figure.locator(".plot").focus()
    before = page.evaluate("history.length")
    for _ in range(3):
        page.keyboard.press("+")
    expect(page).to_have_url(re.compile(r"\?since=yesterday&from=\d+&to=\d+#charts$"))  # the rest is left alone
    assert page.evaluate("history.length") == before + 1
    page.keyboard.press("Escape")
    expect(figure.locator("[data-live-edge]")).to_be_hidden()
    assert page.url.endswith("?since=yesterday#charts")


def test_what_makes_no_sense_in_an_address_is_ignored(lab_up: Stack, browse: Browse, jobs: dict[str, int]) -> None:
    watched = browse(lab_up)
    ranges = ["from=900&to=100", "from=-5&to=9", "from=abc&to=9", "from=7", "to=9007199254740993&from=1"]
    for query in [*ranges, "log=ranks,no&smooth=7"]:
        watched.open(f"/jobs/{jobs['gpt-760m-baseline']}?{query}")
        figure = figure_of(watched.page, "loss")
        expect(figure.locator(".readout")).to_contain_text("4,000")
        expect(figure.locator("[data-live-edge]")).to_be_hidden()
        expect(figure.locator("[data-scale=log]")).to_have_attribute("aria-pressed", "false")
        expect(figure.get_by_label("Smoothing")).to_have_value("0.01")


def test_a_range_where_nothing_is_can_be_left(lab_up: Stack, browse: Browse, jobs: dict[str, int]) -> None:
    watched = browse(lab_up)
    figure = opened(watched, f"/jobs/{jobs['gpt-760m-baseline']}?from=90000&to=91000")
    expect(figure.locator(".readout b").first).to_have_text("–")
    figure.locator("[data-live-edge]").click()
    expect(figure.locator(".readout b").first).to_have_text("4,000")


def test_smoothing_is_chosen_by_keyboard_and_nothing_moves(lab_up: Stack, browse: Browse, jobs: dict[str, int]) -> None:
    watched = browse(lab_up)
    page = watched.page
    figure = opened(watched, f"/jobs/{jobs['digits-mixup']}")
    smoothing, raw = figure.get_by_label("Smoothing"), figure.locator(".readout span", has_text="raw")
    pictures = [figure.locator("canvas").evaluate(PICTURE)]
    boxes = [figure.locator(".plot").bounding_box()]
    expect(raw).to_be_visible()
    smoothing.focus()
    for key, value in (("End", "0.1"), ("Home", "0")):
        page.keyboard.press(key)
        expect(smoothing).to_have_value(value)
        page.wait_for_function(CHANGED, arg=pictures[-1])
        pictures.append(figure.locator("canvas").evaluate(PICTURE))
        boxes.append(figure.locator(".plot").bounding_box())
    assert page.url.endswith("?smooth=0")
    assert boxes[0] == boxes[1] == boxes[2]
    expect(raw).to_be_hidden()
    # Off is off: what is drawn as the line is what was reported.
    figure.locator(".menu summary").click()
    with page.expect_download() as download:
        figure.get_by_role("button", name="CSV as drawn").click()
    head, *rows = Path(download.value.path()).read_text().splitlines()
    assert head == "step,loss,validation_loss"
    with lab_up.client() as client:
        (line,) = client.get(f"/api/v1/jobs/{jobs['digits-mixup']}/series?name=loss&digits=6").json()["items"]
    drawn = {int(row.split(",")[0]): float(row.split(",")[1]) for row in rows if row.split(",")[1]}
    assert drawn == dict(zip(line["step"], line["value"], strict=True))


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_head_of_a_zoomed_chart_fits(lab_up: Stack, browse: Browse, jobs: dict[str, int], width: int) -> None:
    watched = browse(lab_up, width=width)
    figure = opened(watched, f"/jobs/{jobs['gpt-760m-baseline']}?from=100&to=900")
    expect(figure.locator("[data-live-edge]")).to_be_visible()
    title, tools = figure.locator("h3").bounding_box(), figure.locator(".tools").bounding_box()
    assert title
    assert tools
    assert title["width"] > 20
    assert title["x"] + title["width"] <= tools["x"] + 1
    assert tools["x"] + tools["width"] <= width
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
    for control in figure.locator(".tools > :not([hidden])").all():
        box = control.bounding_box()
        assert box
        assert tools["x"] - 1 <= box["x"]
        assert box["x"] + box["width"] <= tools["x"] + tools["width"] + 1


@pytest.mark.parametrize(
    ("name", "around", "stretch"),
    [("gpt-760m-context-4k", (2900, 3300), (3001, 3180)), ("digits-label-noise-20", (1550, 1750), (1601, 1710))],
)
def test_what_was_done_again_stays_as_a_ghost(
    lab_up: Stack, browse: Browse, jobs: dict[str, int], name: str, around: tuple[int, int], stretch: tuple[int, int]
) -> None:
    """After a resume and after a restart in place: drawn beneath the line, and only there."""
    path = f"/jobs/{jobs[name]}?from={around[0]}&to={around[1]}"
    without = browse(lab_up)

    def nothing(route: Route) -> None:
        route.fulfill(json={"items": [], "next": None, "version": 0, "attempt": None})

    without.page.route(AGAIN, nothing)
    bare = opened(without, path)
    watched = browse(lab_up)
    requests: list[str] = []
    watched.page.on("request", lambda request: requests.append(request.url) if AGAIN.search(request.url) else None)
    figure = opened(watched, path)
    expect(figure.locator(".readout [data-kind=ghost]")).to_be_visible()
    expect(bare.locator(".readout [data-kind=ghost]")).to_be_hidden()
    assert requests
    assert all(f"from={stretch[0]}&to={stretch[1]}" in url for url in requests), "only that stretch is requested"
    expect(figure.locator(".plot")).to_have_attribute("aria-label", re.compile("Repeated: steps "))
    assert figure.locator("canvas").evaluate(PICTURE) != bare.locator("canvas").evaluate(PICTURE)
    left, inside = (painted(figure, bare, part, around, stretch) for part in ("outside", "inside"))
    assert left == 0
    assert inside > 100
    # What is read and taken along is the line of record, as if there had been nothing else.
    assert table(figure) == table(bare)
    readouts = [each.locator(".readout").inner_text().replace("superseded", "").split() for each in (figure, bare)]
    assert readouts[0] == readouts[1]


def painted(figure: Locator, bare: Locator, part: str, around: tuple[int, int], stretch: tuple[int, int]) -> int:
    """Count the pixels of the plot that differ in the columns of those steps (± 4 px), or outside of them."""
    text = """(canvas) => {
        const over = canvas.parentElement.querySelector(".u-over");
        const [x, y, w, h] = [over.offsetLeft, over.offsetTop, over.clientWidth, over.clientHeight];
        const copy = new OffscreenCanvas(w, h).getContext("2d", { willReadFrequently: true });
        copy.drawImage(canvas, -x, -y);
        return [w, [...new Uint32Array(copy.getImageData(0, 0, w, h).data.buffer)]];
    }"""
    width, with_ghost = figure.locator("canvas").evaluate(text)
    _, without = bare.locator("canvas").evaluate(text)
    differ = (np.array(with_ghost) != np.array(without)).reshape(-1, width).sum(axis=0)
    first, last = ((step - around[0]) / (around[1] - around[0]) * width for step in stretch)
    is_inside = np.zeros(width, bool)
    is_inside[max(0, int(first) - 4) : int(last) + 5] = True
    return int(differ[is_inside if part == "inside" else ~is_inside].sum())


def table(figure: Locator) -> list[str]:
    figure.locator(".menu summary").click()
    with figure.page.expect_download() as download:
        figure.get_by_role("button", name="CSV as drawn").click()
    return Path(download.value.path()).read_text().splitlines()


@pytest.mark.parametrize("name", ["gpt-760m-baseline", "gpt-1b3-two-nodes"])
def test_without_repeated_steps_none_are_requested(
    lab_up: Stack, browse: Browse, jobs: dict[str, int], name: str
) -> None:
    """Compare one attempt with two, of which the second continued where the first had saved and stopped."""
    watched = browse(lab_up)
    requests: list[str] = []
    watched.page.on("request", lambda request: requests.append(request.url))
    figure = opened(watched, f"/jobs/{jobs[name]}")
    expect(figure.locator(".readout [data-kind=ghost]")).to_be_hidden()
    assert any("/series?" in url for url in requests)
    assert not any(AGAIN.search(url) or "/ghosts" in url for url in requests)


def test_boundaries_come_without_a_reload(lab_up: Stack, browse: Browse, jobs: dict[str, int]) -> None:
    """Somebody resumes the job while its page is open; or ranks of it are started again in place."""
    watched = browse(lab_up)
    page = watched.page
    figure = opened(watched, f"/jobs/{jobs['gpt-760m-baseline']}?from=0&to=4000")
    page.mouse.move(5, 5)
    first = {"at": 0, "label": "attempt 1", "state": None}
    second = {"at": 3000, "label": "attempt 2", "state": "failed"}
    pictures = [figure.locator("canvas").evaluate(PICTURE)]
    marks: dict[str, Any] = {}

    def change_marks(route: Route) -> None:
        answer = route.fetch()
        text = re.sub(r'(id="marked"[^>]*>)[^<]*', lambda match: match[1] + json.dumps(marks), answer.text())
        route.fulfill(response=answer, body=text)

    page.route("**/life?tab=overview", change_marks)
    for breaks in ([first], [first, second]):
        marks |= {"breaks": breaks, "restarts": [1000]}
        page.evaluate("htmx.trigger('#life', 'vigil:life')")
        page.wait_for_function(CHANGED, arg=pictures[-1])
        pictures.append(figure.locator("canvas").evaluate(PICTURE))
    assert len({*pictures}) == 3


def test_live_points_reach_a_zoomed_chart_and_repeated_steps_are_requested(
    lab_up: Stack, browse: Browse, jobs: dict[str, int]
) -> None:
    job = jobs["digits-mixup"]
    watched = browse(lab_up)
    page = watched.page
    sockets: list[WebSocketRoute] = []

    def serve(socket: WebSocketRoute) -> None:
        sockets.append(socket)
        socket.send(json.dumps({"kind": "hello", "number": 1, "version": 1, "state": "running"}))

    page.route_web_socket(re.compile(rf"/ws/jobs/{job}$"), serve)
    figure = opened(watched, f"/jobs/{job}?from=800&to=1000")
    step = figure.locator(".readout b").first
    expect(step).to_have_text("860")

    def frame(version: int, steps: list[int]) -> None:
        entry = {"name": "loss", "kind": "value", "rank": 0, "incarnation": 1, "n": len(steps)}
        header = {"number": 1, "version": version, "state": "running", "series": [entry], "events": []}
        sockets[-1].send(live.pack(header, np.array(steps, "<f8"), np.full(len(steps), 0.5, "<f4")))

    frame(1_000_001, [861, 862, 870])
    expect(step).to_have_text("870")
    with page.expect_request(lambda request: "/series?" in request.url, timeout=15_000):
        frame(1_000_002, [801, 802])  # a restart in place started again from step 800


def test_what_is_no_number_is_read_as_such(lab_up: Stack, browse: Browse, jobs: dict[str, int]) -> None:
    job = jobs["digits-mixup"]
    watched = browse(lab_up)
    page = watched.page

    def serve(socket: WebSocketRoute) -> None:
        socket.send(json.dumps({"kind": "hello", "number": 1, "version": 1, "state": "running"}))
        entry = {"name": "loss", "kind": "value", "rank": 0, "incarnation": 1, "n": 2}
        header = {"number": 1, "version": 1_000_001, "state": "running", "series": [entry], "events": []}
        socket.send(live.pack(header, np.array([861, 862], "<f8"), np.array([0.5, np.nan], "<f4")))

    page.route_web_socket(re.compile(rf"/ws/jobs/{job}$"), serve)
    figure = opened(watched, f"/jobs/{job}?from=800&to=1000")
    readout = figure.locator(".readout")
    expect(readout.locator("b").first).to_have_text("862")
    expect(readout.locator("span", has_text="training").locator("b")).to_have_text("NaN")
    figure.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    expect(readout.locator("b").first).to_have_text("861")
    expect(readout.locator("span", has_text="training").locator("b")).not_to_have_text("NaN")
