"""Fixtures for a real Chromium and a real portal; any console error or policy violation fails the test."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Browser, BrowserContext, Error, FloatRect, Locator, Page, expect, sync_playwright

from tests.stack import REPOSITORY, Stack
from tests.waiting import until

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 60_000  # what is waited for is a condition: on a quiet machine it holds within a tenth of a second
expect.set_options(timeout=PATIENCE_MS)
PASSWORD = "long enough for a browser"
WATCH = """
document.addEventListener("securitypolicyviolation", (e) => {
  console.error("CSP", e.violatedDirective, e.blockedURI, e.sample);
});
window.shifted = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifted += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""
IS_SETTLED = """() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => resolve(
  document.readyState === "complete" && !document.querySelector(".htmx-request") &&
  [...document.querySelectorAll(".chart[data-chart] > .plot")].every((plot) => plot.childElementCount)
))))"""


@dataclass
class Watched:
    """A page that records everything that goes wrong in it."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str) -> int:
        """Open a path and return the HTTP status."""
        response = self.page.goto(self.url + path)
        assert response
        return response.status

    def settle(self) -> None:
        """Wait until nothing is being loaded and every chart has its drawing, or a sentence in place of it."""
        self.page.wait_for_load_state("load")
        self.page.wait_for_function(IS_SETTLED)


def drag(figure: Locator, start: float, end: float) -> None:
    """Drag over a share of a chart, as soon as it has a position: it has none while it is redrawn for new data."""

    def plot_box() -> FloatRect | None:
        return figure.locator(".u-over").bounding_box()

    over, mouse = until(plot_box), figure.page.mouse
    assert over
    mouse.move(over["x"] + over["width"] * start, over["y"] + 40)
    mouse.down()
    mouse.move(over["x"] + over["width"] * end, over["y"] + 40, steps=4)
    mouse.up()


def sign_in_link(stack: Stack) -> str:
    """Return a new one-time link of the first sysadmin."""
    command = [sys.executable, "manage.py", "login_link"]
    environment = {**stack.environment, "VIGIL_PORT": str(stack.port), "VIGIL_PUBLIC_URL": stack.url}
    completed = subprocess.run(
        command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    return next(word for word in completed.stdout.split() if word.startswith("http"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Start a browser per module: Playwright leaves a loop running in its thread, where Django's ORM then fails."""
    # The headless shell is the same engine without a browser around it: a seventh of the work for the same pages.
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no chromium on PATH: apt install chromium-headless-shell, or chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


def _step_back(process: psutil.Process) -> None:
    """Lower the priority of a process and of its session, which Linux may schedule as one group."""
    with suppress(psutil.NoSuchProcess, OSError):
        process.nice(19)
        Path(f"/proc/{process.pid}/autogroup").write_text("19")


def _is_rank(process: psutil.Process) -> bool:
    """Return whether the process is a rank; false if it is exiting."""
    with suppress(psutil.NoSuchProcess):
        return "RANK" in process.environ()
    return False


@pytest.fixture(scope="session")
def lab_up(prepared_home: Path) -> Iterator[Stack]:
    """Start a portal with the demo lab, which has jobs in every state."""
    stack = Stack(prepared_home)
    try:
        stack.start("--demo", timeout_s=120)
        # Its running job would train for as long as the tests last, and take all that they need.
        until(lambda: any(_is_rank(process) for process in stack.job_processes()), "the lab's job to run")
        for process in stack.job_processes():
            _step_back(process)
        yield stack
    finally:
        stack.close()


@pytest.fixture(scope="session")
def signed_in_states() -> dict[str, Any]:
    """Return the cache of browser sessions by portal, so that each portal needs one sign-in."""
    return {}


OPENED = pytest.StashKey[list[tuple[BrowserContext, Watched]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach what the pages of a failed test showed: the timeout of a locator alone does not explain it."""
    report = yield
    if report.when == "call" and report.failed:
        for _, watched in item.stash.get(OPENED, []):
            with suppress(Error):
                shown = watched.page.locator("body").inner_text(timeout=2_000)
                report.sections.append((f"page {watched.page.url}", shown))
    return report


@pytest.fixture
def browse(
    request: pytest.FixtureRequest, chromium: Browser, signed_in_states: dict[str, Any]
) -> Iterator[Callable[..., Watched]]:
    """Open signed-in pages of a portal, at a given size and theme; fail the test if one recorded an error."""
    opened = request.node.stash[OPENED] = []

    def open_page(
        stack: Stack, *, width: int = 1280, height: int = 900, theme: str = "light", **options: Any
    ) -> Watched:
        if stack.url not in signed_in_states:
            signed_in_states[stack.url] = sign_in(chromium, stack)
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme,  # type: ignore[arg-type]
            storage_state=signed_in_states[stack.url], **options,
        )  # fmt: skip
        context.set_default_timeout(PATIENCE_MS)
        context.add_init_script(WATCH)
        watched = watch(context.new_page(), stack.url)
        opened.append((context, watched))
        return watched

    yield open_page
    complaints = [complaint for _, watched in opened for complaint in watched.complaints]
    for context, _ in opened:
        context.close()
    assert not complaints, complaints


def watch(page: Page, url: str) -> Watched:
    watched = Watched(page, url)
    page.on(
        "console",
        lambda m: watched.complaints.append(f"{m.type}: {m.text}") if m.type in {"error", "warning"} else None,
    )
    page.on("pageerror", lambda error: watched.complaints.append(f"exception: {error}"))
    return watched


def sign_in(browser: Browser, stack: Stack) -> Any:
    """Sign in by one-time link, button and new password; return the session's state."""
    context = browser.new_context()
    context.add_init_script(WATCH)
    watched = watch(context.new_page(), stack.url)
    page = watched.page
    page.goto(sign_in_link(stack))
    page.get_by_role("button", name="Sign in as").click()
    page.wait_for_url("**/accounts/password/new/")
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_label("Repeat the password").fill(PASSWORD)
    page.get_by_role("button", name="Set password").click()
    page.wait_for_url(stack.url + "/")
    assert not watched.complaints
    state = context.storage_state()
    context.close()
    return state
