"""Test a post-mortem in a real browser: on screen, on a phone, on paper, and a verdict that arrives on an open page."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Watched
from tests.browser.test_pages import TRIPS
from tests.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.sampled(2)]
Browse = Callable[..., Watched]
OF_SIXTY_FOUR = """
import django
import numpy as np
django.setup()
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Incident, Stream
from portal.series import codec, store
attempt = Incident.objects.get(cause="gpu.off_bus", incarnation=None).attempt
nodes = [*attempt.nodes, *(f"dgx-{n}" for n in range(91, 98))]
Attempt.objects.filter(pk=attempt.pk).update(nodes=nodes)
series = store.find(owner_of(attempt.pk), ["step_seconds"])["step_seconds"]
points = codec.Points(np.array([attempt.step]), np.array([attempt.ended_at.timestamp()]), np.array([1.0]))
store.insert([store.merged_row(series, attempt.incarnation, rank, points) for rank in range(8, 64)])
Stream.objects.bulk_create(
    Stream(attempt=attempt, uid=f"{rank:08x}", incarnation=attempt.incarnation, rank=rank, node=nodes[rank // 8])
    for rank in range(8, 64)
)
"""


@pytest.fixture(scope="module")
def address(lab_up: Stack) -> str:
    """Return the address of the lab's richest post-mortem: the job was restarted, and people commented on it."""
    with lab_up.client() as client:
        items = client.get("/api/v1/postmortems?cause=gpu.off_bus").json()["items"]
    return str(items[0]["url"]).removeprefix(lab_up.url)


@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (390, "light")])
def test_nobody_trips(lab_up: Stack, address: str, browse: Browse, width: int, theme: str) -> None:
    watched = browse(lab_up, width=width, theme=theme)
    for path in (address, f"{address}&span=attempt", "/postmortems", "/postmortems?cause=gpu.off_bus"):
        assert watched.open(path) == 200, path
        watched.page.wait_for_load_state("networkidle")
        assert watched.page.evaluate(TRIPS) == [], path


def sheets(watched: Watched) -> int:
    printed = watched.page.pdf(prefer_css_page_size=True)
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", printed))


def test_goes_on_two_sheets(lab_up: Stack, address: str, browse: Browse) -> None:
    watched = browse(lab_up, theme="dark")
    watched.open(address)
    assert 1 <= sheets(watched) <= 2
    watched.page.emulate_media(media="print")
    assert not watched.page.locator(".nav").is_visible()
    assert not watched.page.locator("details.write").first.is_visible()
    assert watched.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"


def test_one_click_from_a_line_to_its_log(lab_up: Stack, address: str, browse: Browse) -> None:
    watched = browse(lab_up)
    watched.open(address)
    watched.page.get_by_role("link", name="torch.AcceleratorError").click()
    expect(watched.page.locator(".log.whole")).to_contain_text("CUDA error: unknown error")


def test_is_written_and_filtered_without_script(lab_up: Stack, address: str, browse: Browse) -> None:
    watched = browse(lab_up, java_script_enabled=False)
    watched.open(address)
    page = watched.page
    page.get_by_text("Edit…", exact=True).click()
    page.get_by_role("textbox", name="Narrative").fill("Seen by nobody until the morning.")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".prose")).to_contain_text("Seen by nobody until the morning.")
    watched.open("/postmortems")
    page.get_by_label("Cause", exact=True).select_option("gpu.off_bus")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator(".incidents tbody tr")).to_have_count(1)


def test_the_list_filters_where_it_stands(lab_up: Stack, browse: Browse) -> None:
    watched = browse(lab_up)
    watched.open("/postmortems")
    watched.page.get_by_label("Who must act").select_option("sysadmin")
    expect(watched.page.locator(".incidents tbody")).to_contain_text("gpu.off_bus")
    expect(watched.page.locator(".incidents tbody")).not_to_contain_text("numerics.nan")
    expect(watched.page).to_have_url(re.compile("owner=sysadmin"))


def test_of_sixty_four_ranks_goes_on_two_sheets(lab_up: Stack, address: str, browse: Browse) -> None:
    """Last: it makes the lab's richest larger."""
    environment = {**lab_up.environment, "DJANGO_SETTINGS_MODULE": "portal.settings"}
    command = lab_up.command("-c", OF_SIXTY_FOUR)
    subprocess.run(command, cwd=lab_up.checkout, env=environment, check=True)
    watched = browse(lab_up)
    watched.open(address)
    expect(watched.page.locator(".strip i")).to_have_count(64)
    assert 1 <= sheets(watched) <= 2
