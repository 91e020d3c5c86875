"""Test static/js/live.js in a real browser with a fake socket and a controlled clock."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route

from jobs import live
from tests.stack import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.sampled(2)]

STAGE = """
window.sockets = [];
window.WebSocket = class {
  static CONNECTING = 0; static OPEN = 1; static CLOSING = 2; static CLOSED = 3;
  constructor(url) { this.url = url; this.readyState = 1; window.sockets.push(this); }
  close(code = 1000) { this.readyState = 3; this.onclose?.({ code }); }
};
window.received = [];
window.send = (text) => window.sockets.at(-1).onmessage({ data: text });
window.sendFrame = (base64) => {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  window.sockets.at(-1).onmessage({ data: bytes.buffer });
};
const { follow, followJobs, decode } = await import("/live.js");
window.start = (answers, options) => {
  window.following = follow(7, {
    points: (series, header) => received.push(["points", header.version, series.map((s) => [s.name, s.kind, [...s.step],
      ...["value", "min", "median", "max", "worst"].filter((c) => s[c]).map((c) => [...s[c]])])]),
    state: (header) => received.push(["state", header.version ?? null, header.state]),
    event: (event) => received.push(["event", event.kind]),
    stale: (isStale) => received.push(["stale", isStale]),
    reread: async () => { received.push(["reread"]); return answers?.shift(); },
  }, options);
};
window.startJobs = () => {
  const jobs = (lines) => received.push(["jobs", lines.map((l) => l.job)]);
  followJobs({ jobs, reread: () => received.push(["reread"]) });
};
window.ready = true;
"""


class Scene:
    def __init__(self, page: Page) -> None:
        self.page = page

    def start(self, *answers: int, **options: Any) -> None:
        self.page.evaluate("([answers, options]) => start(answers, options)", [list(answers), options])

    def send(self, **word: Any) -> None:
        self.page.evaluate("(word) => send(JSON.stringify(word))", word)
        self.wait(0)

    def frame(self, version: int, *series: tuple[str, list[float], list[float]], **about: Any) -> None:
        entries = [{"name": n, "kind": "value", "rank": 0, "incarnation": 0, "n": len(s)} for n, s, _ in series]
        header = {"number": 1, "version": version, "state": "running", "series": entries, "events": []} | about
        flat = [column for _, s, v in series for column in (np.array(s, "<f8"), np.array(v, "<f4"))]
        self.raw(live.pack(header, *flat))

    def raw(self, frame: bytes) -> None:
        self.page.evaluate("(data) => sendFrame(data)", base64.b64encode(frame).decode())

    def wait(self, milliseconds: int) -> None:
        self.page.clock.run_for(milliseconds)

    def received(self) -> list[Any]:
        """Return what the page has received since the last call."""
        received: list[Any] = self.page.evaluate("() => received.splice(0)")
        return received

    @property
    def sockets(self) -> list[str]:
        urls: list[str] = self.page.evaluate("() => sockets.map((s) => s.url)")
        return urls


def _script(body: str) -> Callable[[Route], None]:
    return lambda route: route.fulfill(body=body, content_type="text/javascript")


@pytest.fixture
def scene(chromium: Browser) -> Iterator[Scene]:
    page = chromium.new_page()
    for name in ("live.js", "socket.js"):
        page.route(f"**/{name}", _script((REPOSITORY / "static" / "js" / name).read_text()))
    page.route("**/page", lambda route: route.fulfill(body="<!doctype html><title>x</title>", content_type="text/html"))
    page.clock.install()
    page.goto("http://vigil.test/page")
    page.add_script_tag(content=STAGE, type="module")
    page.wait_for_function("() => window.ready")
    yield Scene(page)
    page.close()


def joined(scene: Scene, *answers: int, version: int = 5) -> None:
    scene.start(*answers)
    scene.send(kind="hello", number=1, version=version, state="running")
    scene.wait(1_100)
    scene.received()


def test_it_reads_history_once_joined_and_drops_what_that_had(scene: Scene) -> None:
    scene.start(6)
    assert scene.sockets == ["ws://vigil.test/ws/jobs/7"]
    scene.send(kind="hello", number=1, version=5, state="running")
    assert scene.received() == [["state", 5, "running"], ["reread"]]
    scene.frame(6, ("loss", [1], [1.0]))
    scene.frame(7, ("loss", [2, 3], [2.5, 2.25]))
    assert scene.received() == [
        ["points", 7, [["loss", "value", [2, 3], [2.5, 2.25]]]],
        ["state", 7, "running"],
    ]


def test_a_band_and_events_and_odd_lengths_are_decoded(scene: Scene) -> None:
    joined(scene)
    band = {"name": "loss", "kind": "band", "incarnation": 0, "n": 1}
    value = {"name": "ü", "kind": "value", "rank": 0, "incarnation": 0, "n": 3}
    header = {
        "number": 1, "version": 6, "state": "running", "series": [band, value],
        "events": [{"kind": "checkpoint.committed"}],
    }  # fmt: skip
    columns = [np.array([9.0])] + [np.array([x], "<f4") for x in (1, 2, 3, 7)]
    scene.raw(live.pack(header, *columns, np.arange(3.0), np.array([1, np.inf, -1], "<f4")))
    received = scene.received()
    assert received[0][2][0] == ["loss", "band", [9], [1], [2], [3], [7]]
    assert received[0][2][1][:3] == ["ü", "value", [0, 1, 2]]
    assert received[1] == ["event", "checkpoint.committed"]


def test_a_gap_makes_it_read_again_unless_it_closes_by_itself(scene: Scene) -> None:
    joined(scene)
    scene.frame(6)
    scene.frame(8)  # another web process was quicker
    scene.frame(7)
    scene.wait(2_000)
    assert ["reread"] not in scene.received()
    scene.frame(10)
    scene.wait(2_000)
    received = scene.received()
    assert received.count(["reread"]) == 1
    scene.frame(9)
    assert scene.received() == [], "what was read again has it"


def test_a_heartbeat_ahead_of_what_came_makes_it_read_again(scene: Scene) -> None:
    joined(scene)
    scene.frame(6)
    scene.send(kind="heartbeat", number=1, version=6, state="running")
    scene.wait(2_000)
    assert ["reread"] not in scene.received()
    scene.send(kind="heartbeat", number=1, version=9, state="completed")
    scene.wait(2_000)
    assert scene.received() == [["state", 9, "completed"], ["reread"]]


def test_a_new_attempt_starts_over_and_messages_of_the_old_one_are_dropped(scene: Scene) -> None:
    joined(scene)
    scene.frame(1, number=2)
    scene.wait(2_000)
    assert ["reread"] in scene.received()
    scene.frame(99, number=1)
    scene.wait(2_000)
    assert scene.received() == []


def test_words_that_were_missed_or_left_out_are_read(scene: Scene) -> None:
    joined(scene)
    scene.send(kind="missed")
    scene.wait(1_500)
    assert scene.received() == [["reread"]]
    scene.frame(6, partial=True)
    scene.wait(1_500)
    assert ["reread"] in scene.received()


def test_bands_and_single_ranks_do_not_count_as_versions(scene: Scene) -> None:
    joined(scene)
    scene.frame(6)
    scene.received()
    scene.frame(6, ("loss", [1], [1.0]), extra=True)
    assert scene.received() == [["points", 6, [["loss", "value", [1], [1]]]]]
    scene.wait(2_000)
    assert scene.received() == []


def test_it_comes_back_after_a_while_and_reads_again(scene: Scene) -> None:
    joined(scene)
    scene.page.evaluate("() => sockets.at(-1).close(1006)")
    scene.wait(500)
    assert len(scene.sockets) == 2
    scene.send(kind="hello", number=1, version=9, state="running")
    assert ["reread"] in scene.received()
    scene.page.evaluate("() => sockets.at(-1).close(1006)")
    scene.wait(16_000)
    assert len(scene.sockets) >= 3


@pytest.mark.parametrize("code", [4401, 4403, 4404])
def test_it_does_not_reconnect_where_that_changes_nothing(scene: Scene, code: int) -> None:
    joined(scene)
    scene.page.evaluate(f"() => sockets.at(-1).close({code})")
    assert scene.received() == [["stale", True]]
    scene.wait(60_000)
    assert len(scene.sockets) == 1


def test_after_fifteen_silent_seconds_it_is_stale_until_the_next_word(scene: Scene) -> None:
    joined(scene)
    scene.wait(16_000)
    assert scene.received() == [["stale", True]]
    scene.send(kind="heartbeat", number=1, version=5, state="running")
    assert scene.received() == [["stale", False]]


def test_closing_is_for_good(scene: Scene) -> None:
    joined(scene)
    scene.page.evaluate("() => following.close()")
    scene.wait(60_000)
    assert scene.received() == []
    assert len(scene.sockets) == 1


def test_a_chosen_rank_is_in_the_address(scene: Scene) -> None:
    scene.start(rank=3)
    assert scene.sockets == ["ws://vigil.test/ws/jobs/7?rank=3"]


def test_lists(scene: Scene) -> None:
    scene.page.evaluate("() => startJobs()")
    scene.send(kind="hello")
    scene.send(kind="jobs", jobs=[{"job": 1}, {"job": 2}])
    assert scene.received() == [["reread"], ["jobs", [1, 2]]]
