"""Test using the pages: keyboard shortcuts, charts, the list, the form and its text."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import APIResponse, Route, expect

from tests.browser.conftest import Watched, drag
from tests.stack import REPOSITORY, Stack
from vigil_core import formatting

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.sampled(2)]
Browse = Callable[..., Watched]

# Before the chart could be redrawn.
TWICE = """async (plot) => {
  for (const _ of [1, 2]) plot.dispatchEvent(new KeyboardEvent("keydown", { key: "l" }));
  await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
}"""


@pytest.fixture(scope="module")
def long_job(lab_up: Stack) -> int:
    """Return a finished job of the lab that has a curve."""
    with lab_up.client() as client:
        for job in client.get("/api/v1/jobs?state=completed&kind=distributed&limit=50").json()["items"]:
            series = client.get(f"/api/v1/jobs/{job['id']}/series?name=loss").json()["items"]
            if series and len(series[0]["step"]) > 100:
                return int(job["id"])
    raise AssertionError("the lab has no finished job with a curve")


def test_script_and_server_write_numbers_alike(lab_up: Stack, browse: Browse) -> None:
    watched = browse(lab_up)
    watched.open("/")
    address = watched.page.locator("script[type=module]").first.get_attribute("src")
    assert address
    values = [0, 0.43, 2.551, 41.12, 99.97, 305.4, 9412.3, 9999.6, 290_123, 1_240_000, 81.4e9, -0.5, 0.00012, 3.25e-7]
    seconds = [0, 8.67e-5, 0.00618, 0.431, 2.55, 9.996, 38.4, 59.6, 262, 305, 600, 3599.7, 65_040, 86_400, 183_600]
    report = watched.page.evaluate(
        """async ([address, values, seconds]) => {
            const source = await (await fetch(address)).text();
            const name = source.match(/from "(\\.\\/words[^"]*)"/)[1];
            const words = await import(new URL(name, new URL(address, location)));
            const shares = [0, 0.689, 0.999, 1].map(words.share);
            return [values.map(words.measure), values.map(words.loss), seconds.map(words.duration), shares];
        }""",
        [address, values, seconds],
    )
    assert report == [
        [formatting.measure(v) for v in values],
        [formatting.loss(v) for v in values],
        [formatting.duration(s) for s in seconds],
        [formatting.share(f) for f in (0, 0.689, 0.999, 1)],
    ]


def test_a_checkpoint_is_pinned_by_keyboard_and_nothing_moves(lab_up: Stack, long_job: int, browse: Browse) -> None:
    for width in (1280, 390):
        watched = browse(lab_up, width=width)
        watched.open(f"/jobs/{long_job}/checkpoints")
        page = watched.page
        button = page.get_by_role("button", name=re.compile("^Pin(ned)? step ")).first
        expect(button).to_have_attribute("aria-pressed", "false")
        before = page.locator("tbody").evaluate(
            "e => [...e.querySelectorAll('*')].map((x) => x.offsetLeft + x.offsetTop)"
        )
        for pressed, word in (("true", "Pinned"), ("false", "Pin")):
            button.press("Enter")
            expect(button).to_have_attribute("aria-pressed", pressed)
            expect(button).to_have_text(re.compile(f"^{word} step "))
            expect(button).to_be_focused()
        button.press("Enter")
        expect(button).to_have_attribute("aria-pressed", "true")
        after = page.locator("tbody").evaluate(
            "e => [...e.querySelectorAll('*')].map((x) => x.offsetLeft + x.offsetTop)"
        )
        assert after == before
        assert page.evaluate("window.shifted") < 0.01
        page.reload()
        button.click()
        expect(button).to_have_attribute("aria-pressed", "false")


RAISE = """
import django
django.setup()
from portal import notify
for name in ("first", "second"):
    notify.raise_notice(name, kind="test", to=notify.SYSADMINS, title=f"The {name} <i>thing</i>.", link="/nodes")
"""


def test_a_notice_is_read_by_keyboard_and_the_next_one_has_the_focus(lab_up: Stack, browse: Browse) -> None:
    watched = browse(lab_up, width=390)
    watched.open("/")
    page = watched.page
    shown = page.get_by_role("region", name="Notifications")
    # The lab has reported its failed jobs by then; a notice that comes between would take the focus away.
    expect(shown.get_by_role("link", name="failed")).to_have_count(3)
    environment = {**lab_up.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
    subprocess.run(lab_up.command("-c", RAISE), cwd=REPOSITORY, env=environment, check=True)
    watched.open("/")
    expect(shown.get_by_role("link", name="The second <i>thing</i>.")).to_have_attribute("href", "/nodes")
    raised = shown.get_by_role("listitem").filter(has_text=re.compile("The (first|second) <i>thing</i>"))
    buttons = raised.get_by_role("button", name="Mark as read")
    expect(buttons).to_have_count(2)
    assert (buttons.first.bounding_box() or {})["height"] >= 40
    buttons.first.press("Enter")
    expect(buttons).to_have_count(1)
    expect(buttons).to_be_focused()
    buttons.press("Enter")
    expect(raised).to_have_count(0)
    expect(page.locator("#main:focus, section:has(h2:text-is('Notifications')) button:focus")).to_have_count(1)
    assert page.url == f"{lab_up.url}/"


def test_the_list_is_walked_by_keys(lab_up: Stack, browse: Browse) -> None:
    watched = browse(lab_up)
    watched.open("/jobs")
    page = watched.page
    rows = page.locator("#jobs tbody tr")
    names = rows.locator(".name").all_inner_texts()
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(rows.nth(1).locator(".name")).to_be_focused()
    page.keyboard.press("k")
    expect(rows.nth(0).locator(".name")).to_be_focused()
    page.keyboard.press("x")
    expect(rows.nth(0)).to_have_attribute("aria-selected", "true")
    expect(page.locator("#chosen-text")).to_have_text("1 selected")
    page.keyboard.press("Escape")
    expect(page.locator("#chosen")).to_be_hidden()
    page.keyboard.press("/")
    expect(page.get_by_label("Search jobs")).to_be_focused()
    page.keyboard.type(names[-1])
    expect(rows.first.locator(".name")).to_have_text(names[-1])
    page.wait_for_url("**/jobs?*q=*")
    page.locator(".tabs").get_by_text("Completed").click()
    page.wait_for_url("**/jobs?*state=completed*")
    assert "q=" in page.url
    page.go_back()
    page.wait_for_url(lambda url: "state=" not in url)
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("g")
    page.keyboard.press("h")
    page.wait_for_url(watched.url + "/")


def test_the_skip_link_comes_first_and_dialogs_give_the_focus_back(
    lab_up: Stack, browse: Browse, long_job: int
) -> None:
    watched = browse(lab_up)
    watched.open(f"/jobs/{long_job}")
    page = watched.page
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    edit = page.get_by_role("button", name="Edit…")
    edit.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#edit")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#edit")).to_be_hidden()
    expect(edit).to_be_focused()


def test_an_open_dialog_survives_an_answer_that_was_on_its_way(lab_up: Stack, browse: Browse, long_job: int) -> None:
    watched = browse(lab_up)
    page = watched.page
    routes: list[Route] = []
    page.route(re.compile(r"/jobs/\d+/life"), lambda route: routes.append(route))
    watched.open(f"/jobs/{long_job}")
    page.evaluate("htmx.trigger('#life', 'vigil:life')")
    while not routes:
        page.wait_for_timeout(20)
    page.get_by_role("button", name="Edit…").click()
    page.evaluate("document.addEventListener('htmx:afterSettle', () => { window.settled = true; })")
    routes[0].continue_()
    page.wait_for_function("() => window.settled")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.unroute_all(behavior="ignoreErrors")


def test_an_open_menu_survives_an_answer_that_was_on_its_way(lab_up: Stack, browse: Browse, long_job: int) -> None:
    watched = browse(lab_up)
    page = watched.page
    routes: list[Route] = []
    page.route(re.compile(r"/jobs/\d+/life"), lambda route: routes.append(route))
    watched.open(f"/jobs/{long_job}")
    page.evaluate("htmx.trigger('#life', 'vigil:life')")
    while not routes:
        page.wait_for_timeout(20)
    page.locator("#life details.menu summary").click()
    page.evaluate("document.addEventListener('htmx:afterRequest', () => { window.answered = true; })")
    routes[0].continue_()
    page.wait_for_function("() => window.answered")
    page.get_by_role("button", name="Delete…").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.unroute_all(behavior="ignoreErrors")


def test_a_chart_is_read_zoomed_and_taken_along(lab_up: Stack, browse: Browse, long_job: int, tmp_path: Path) -> None:
    watched = browse(lab_up)
    watched.open(f"/jobs/{long_job}")
    page = watched.page
    figure = page.locator("[data-chart=loss]")
    figure.locator("canvas").wait_for()
    readout, plot = figure.locator(".readout"), figure.locator(".plot")
    step = readout.locator("b").first
    newest = step.inner_text()
    plot.focus()
    page.keyboard.press("Home")
    expect(step).not_to_have_text(newest)
    expect(readout).to_have_attribute("aria-live", "polite")
    page.keyboard.press("End")
    page.keyboard.press("l")
    expect(figure.locator("[data-scale=log]")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("l")
    expect(figure.locator("[data-scale=log]")).to_have_attribute("aria-pressed", "false")
    plot.evaluate(TWICE)
    expect(figure.locator("[data-scale=log]")).to_have_attribute("aria-pressed", "false")
    with page.expect_response(lambda response: "/series?" in response.url and "from=" in response.url):
        drag(figure, 0.4, 0.6)
    back = figure.locator("[data-live-edge]")
    expect(back).to_be_visible()
    back.click()
    expect(back).to_be_hidden()
    figure.locator(".menu summary").click()
    with page.expect_download() as download:
        figure.get_by_role("button", name="CSV as drawn").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("step,")
    assert len(lines) > 50
    figure.locator(".menu summary").click()
    figure.get_by_role("button", name="Data as a table").click()
    expect(page.locator("dialog.data table")).to_be_visible()


def test_form_and_text_stay_in_step(lab_up: Stack, browse: Browse) -> None:
    watched = browse(lab_up)
    watched.open("/submit")
    page = watched.page
    text, summary = page.locator("#toml"), page.locator("#say")
    page.get_by_label("Global batch").fill("63")
    expect(summary).to_contain_text("One thing to fix: Global batch.")
    page.wait_for_function("() => document.getElementById('toml').value.includes('global_batch = 63')")
    expect(page.locator("#editor [data-invalid]")).to_contain_text("does not divide over 2 ranks")
    box = page.get_by_label("Global batch")
    expect(box).to_have_attribute("aria-invalid", "true")
    expect(box).to_be_focused()
    page.get_by_label("Steps", exact=True).focus()
    summary.get_by_role("link", name="Global batch").click()
    expect(box).to_be_focused()
    page.locator("#f-run-global_batch-e").get_by_role("button", name="64").click()
    expect(summary).to_contain_text("Ready to submit.")
    expect(box).to_have_value("64")
    text.fill(text.input_value().replace("steps = 200", "steps = 300  # longer"))
    expect(page.get_by_label("Steps", exact=True)).to_have_value("300")
    page.get_by_label("Seed").fill("7")
    page.wait_for_function("() => document.getElementById('toml').value.includes('seed = 7')")
    assert "# longer" in text.input_value(), "comments stay"
    text.fill(text.input_value().replace("[run]", "[run"))
    expect(summary).to_contain_text("a table's name is written in brackets")
    expect(page.locator("#editor [data-invalid]")).to_have_count(1)
    page.locator("#file").set_input_files(REPOSITORY / "examples" / "vision.toml")
    expect(page.get_by_label("Recipe")).to_have_value("vision")
    page.get_by_label("Kind").select_option("script")
    expect(page.get_by_label("Program")).to_be_visible()
    expect(page.get_by_label("Recipe")).to_have_count(0)
    with page.expect_response("**/submit/sync"):  # the server is informed; typing would interrupt that
        page.get_by_label("Code", exact=True).set_input_files(REPOSITORY / "examples" / "script" / "train.py")
    text.fill(text.input_value().replace("train.py", "other.py"))
    expect(page.get_by_label("Program")).to_have_value("other.py")
    assert page.evaluate("document.getElementById('f-code').files.length") == 1, "what was chosen stays"
    page.get_by_label("Kind").select_option("federated")
    page.get_by_label("Recipe").select_option("client")
    expect(page.get_by_label("Client", exact=True)).to_have_value("client.py")
    expect(summary).to_contain_text("Choose the code to upload: Code.")
    page.get_by_label("Code", exact=True).set_input_files(REPOSITORY / "examples" / "client" / "client.py")
    expect(summary).to_contain_text("Ready to submit.")


def test_what_is_typed_while_an_answer_is_on_its_way_stays(lab_up: Stack, browse: Browse) -> None:
    watched = browse(lab_up)
    watched.open("/submit")
    page = watched.page
    routes: list[tuple[Route, APIResponse]] = []
    page.route("**/submit/sync", lambda route: routes.append((route, route.fetch())), times=1)
    page.get_by_label("Parallelism", exact=True).select_option("fsdp")  # has other fields: all are redrawn
    while not routes:
        page.wait_for_timeout(20)
    source = page.get_by_label("Source", exact=True)
    source.fill("/data/notes")
    route, answer = routes[0]
    route.fulfill(response=answer)
    page.wait_for_function("() => document.getElementById('toml').value.includes('/data/notes')")
    expect(source).to_have_value("/data/notes")
    expect(page.get_by_label("Reshard", exact=True)).to_have_count(1)
