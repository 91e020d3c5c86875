"""Measure the map of a thousand nodes: the page, the traffic of a socket, and a live frame in the browser.

    python -m bench.cluster_map [sqlite|postgres …] [--nodes 1000] [--times 30] [--seconds 30]

8 GPUs a node; each agent's line comes every 10 s, spread over them, through Redis to one web process, as intake
publishes it. Bars: `/cluster` p95 ≤ 200 ms of the server, with and without a shared file system that was slow on
every node; a live frame ≤ 16 ms of the browser's main thread (Chromium, every task of it counted, at p95 and if all
agents report in the same second); ≤ 60 kB/s a socket. The browser's part is measured where a Chromium is.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import stage

NODES, TIMES, SECONDS = 1_000, 30, 30.0
PERIOD_S = 10.0
SHOWN_WITHIN_US = 250_000  # what the main thread does later is no part of a live frame
BAR_PAGE_MS, BAR_FRAME_MS, BAR_KB = 200.0, 16.0, 60.0
ADDRESSES = ("/cluster", "/cluster?rack=R07", "/agents", "/racks", "/api/v1/racks", "/api/v1/gpus?limit=200")
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster_map")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    if options.one:
        return _measure(options)
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    for database in options.databases:
        given = (f"--{name}={getattr(options, name)}" for name in ("nodes", "times", "seconds"))
        found = stage.in_child("bench.cluster_map", database, "--one", *given)
        bars |= _print_figures(database, found)
        figures[database] = found
    return stage.result("cluster_map", bars=bars, nodes=options.nodes, **figures)


def _print_figures(database: str, found: dict[str, Any]) -> dict[str, bool]:
    print(f"\n{database}: {'address':42} {'p95':>9} {'of bar':>7} {'CPU':>9} {'bytes':>9}")
    for address, (p95, cpu, size) in found["pages"].items():
        print(f"  {address:52} {p95:7.1f}ms {p95 / BAR_PAGE_MS:7.2f} {cpu:7.1f}ms {size:9,}")
    worst = max(p95 for address, (p95, _, _) in found["pages"].items() if address.startswith("/cluster"))
    bars = {
        f"{database}_page": stage.bar("/cluster, p95", worst, BAR_PAGE_MS, at_least=False, unit=" ms"),
        f"{database}_socket": stage.bar("a socket", found["kb_s"], BAR_KB, at_least=False, unit=" kB/s"),
    }
    frames = found.get("frames")
    if frames is None:
        print("  a live frame: not measured, no Chromium is here")
        return bars
    for name, title in (("spread", "agents spread over 10 s"), ("at_once", "all agents in the same second")):
        of = frames[name]
        print(f"  {title}: {of['frames']} frames, p50 {of['p50_ms']:.1f} ms, longest task {of['longest_ms']:.1f} ms")
        what = f"a live frame, {title}, p95"
        bars[f"{database}_{name}"] = stage.bar(what, of["p95_ms"], BAR_FRAME_MS, at_least=False, unit=" ms")
    return bars


def _measure(options: argparse.Namespace) -> int:
    with stage.site(options.databases[0]) as place:
        stage.django(place)
        import console.asgi  # noqa: F401  (as the web process: everything loaded)
        from bench import simulated_fleet
        from tests.lab import sysadmin

        user, made = sysadmin(), simulated_fleet.make(options.nodes, cpu_nodes=6, nodes_per_rack=20)
        _store_temperatures()
        # Rows tell of this moment: while the pages are timed, agents are to be heard.
        pages = {address: _page(user, address, options.times) for address in ADDRESSES}
        pages["/cluster, with a slow file system"] = _with_slow_mount(user, options.times)
        pages["/racks, the first time in an hour"] = _page(user, "/racks", 3, is_cached=False)
        found: dict[str, Any] = {"pages": pages}
        _mark_agents_connected()
        command = [sys.executable, "manage.py", "collectstatic", "--noinput", "-v", "0"]
        subprocess.run(command, cwd=stage.REPOSITORY, check=True)
        with place.web() as (port, _):
            found |= _live(place, port, user, made, options.seconds)
        print(json.dumps(found))
        return 0


def _page(user: Any, address: str, times: int, *, is_cached: bool = True) -> tuple[float, float, int]:
    """Return a page's 95th percentile and CPU time in milliseconds, and its bytes."""
    from django.core.cache import cache
    from django.test import Client

    from bench.empty_site import spent

    client = Client(headers={"host": "127.0.0.1"})
    client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
    for _ in range(2):
        answer = client.get(address)
        assert answer.status_code == 200, (address, answer.status_code)
    _mark_agents_connected()
    taken, cpu = [], spent()
    for _ in range(times):
        if not is_cached:
            cache.clear()
        began = time.perf_counter()
        client.get(address)
        taken.append((time.perf_counter() - began) * 1000)
    return stage.percentile(taken, 0.95), (spent() - cpu) * 1000 / times, len(answer.content)


def _store_temperatures() -> None:
    """Store the temperatures of all racks, and a failure an hour, over 90 days."""
    from datetime import timedelta
    from random import Random

    from django.utils import timezone

    from jobs.models import Failure
    from nodes.models import RackPlace, RackTemperature
    from tests.lab import a_project

    random, hour = Random(1), timezone.now().replace(minute=0, second=0, microsecond=0)
    hours = [hour - timedelta(hours=ago) for ago in range(90 * 24)]
    nodes = list(RackPlace.objects.values_list("node", flat=True))
    for rack in RackPlace.objects.order_by("rack").values_list("rack", flat=True).distinct():
        RackTemperature.objects.bulk_create(
            RackTemperature(rack=rack, hour=at, sum_c=60 * random.gauss(24, 3), count=60, nodes=20, is_estimate=False)
            for at in hours
        )
    project = a_project()
    Failure.objects.bulk_create(
        Failure(
            at=at, day=at.date(), project=project, node=random.choice(nodes), cause="gpu.ecc", program="p",
            is_interruption=True, lost_node_s=0, lost_gpu_s=0,
        )
        for at in hours
    )  # fmt: skip


def _with_slow_mount(user: Any, times: int) -> tuple[float, float, int]:
    from datetime import timedelta

    from django.utils import timezone

    from bench import simulated_fleet
    from nodes.telemetry import mounts

    now = timezone.now()
    many = simulated_fleet.slow_mount("nfs01:/export/home", at=now - timedelta(hours=1), minutes=11)
    (event,) = mounts.between(now - timedelta(days=1), now)
    assert len(event.nodes) == many, (len(event.nodes), many)
    return _page(user, "/cluster", times)


def _mark_agents_connected() -> None:
    from django.utils import timezone

    from nodes.models import Agent

    Agent.objects.update(heard_at=timezone.now())


def _live(place: stage.Site, port: int, user: Any, made: Any, seconds: float) -> dict[str, Any]:
    """Measure what a socket carries while every agent reports, and what that costs a browser."""
    publisher = _SamplePublisher(made)
    found: dict[str, Any] = {"kb_s": asyncio.run(_socket(port, user, publisher, seconds))}
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser:
        found["frames"] = {
            "spread": _frames(browser, port, user, publisher, seconds, at_once=False),
            "at_once": _frames(browser, port, user, publisher, seconds, at_once=True),
        }
    return found


class _SamplePublisher:
    """Publish every agent's line, as intake does, until it is stopped."""

    def __init__(self, made: Any) -> None:
        self._made, self._number = made, 0

    def run(self, stop: threading.Event, *, at_once: bool) -> None:
        from portal.publish import publish

        nodes = self._made.nodes
        while not stop.is_set():
            began = time.monotonic()
            for place, node in enumerate(nodes):
                if not at_once:
                    wait = began + PERIOD_S * place / len(nodes) - time.monotonic()
                    if wait > 0.01 and stop.wait(wait):
                        return
                publish(self._messages(node, place))
            stop.wait(max(0.0, began + PERIOD_S - time.monotonic()))

    def _messages(self, node: str, place: int) -> dict[str, bytes]:
        import msgspec

        from nodes.telemetry import live

        self._number += 1
        n = self._number
        gpus = [[(n * 7 + i * 13) % 101, 61_000 + i, 50 + (n + i) % 30, 400 + (n * i) % 300] for i in range(8)]
        line = {"node": node, "at": int(time.time()), "uuids": self._made.uuids[node], "gpus": gpus, "cpu": n % 100}
        return {live.TOPIC: msgspec.json.encode(line)}


async def _socket(port: int, user: Any, publisher: _SamplePublisher, seconds: float) -> float:
    """Return the kilobytes per second that a map's socket carries."""
    from asgiref.sync import sync_to_async
    from websockets.asyncio.client import connect

    from portal.models import Token

    _, secret = await sync_to_async(Token.issue)(user, "bench")
    headers = {"Authorization": f"Bearer {secret}"}
    stop = threading.Event()
    thread = threading.Thread(target=publisher.run, args=(stop,), kwargs={"at_once": False}, daemon=True)
    received, lines = 0, 0
    address = f"ws://127.0.0.1:{port}/ws/cluster"
    async with connect(address, additional_headers=headers, compression=None, max_size=2**24) as socket:
        thread.start()
        until = time.monotonic() + max(seconds, 2 * PERIOD_S)
        began = time.monotonic()
        while (left := until - time.monotonic()) > 0:
            with suppress(TimeoutError):
                message = await asyncio.wait_for(socket.recv(), left)
                received += len(message)
                lines += message.count(b'"node"' if isinstance(message, bytes) else '"node"')  # type: ignore[arg-type]
        took = time.monotonic() - began
    stop.set()
    await asyncio.to_thread(thread.join)
    assert lines > 0.8 * took / PERIOD_S * len(publisher._made.nodes), f"only {lines} lines in {took:.0f} s"
    return received / took / 1000


def _frames(
    browser: str, port: int, user: Any, publisher: _SamplePublisher, seconds: float, *, at_once: bool
) -> dict[str, Any]:
    """Measure the milliseconds of main thread per live message, by Chromium's own trace of all tasks."""
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"  # Playwright leaves a loop running in this thread
    from django.conf import settings
    from django.test import Client
    from playwright.sync_api import sync_playwright

    client = Client()
    client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
    cookie = {"name": settings.SESSION_COOKIE_NAME, "value": client.cookies[settings.SESSION_COOKIE_NAME].value}
    stop = threading.Event()
    thread = threading.Thread(target=publisher.run, args=(stop,), kwargs={"at_once": at_once}, daemon=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        context = chromium.new_context(viewport={"width": 1280, "height": 900})
        context.add_cookies([{**cookie, "url": f"http://127.0.0.1:{port}"}])  # type: ignore[typeddict-item]
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/cluster?by=use")
        page.locator("#map").wait_for()
        # What only the database knows is shown anew every 15 s: a page of its own, timed above, and no live frame.
        page.evaluate("() => { htmx.ajax = () => Promise.resolve(); }")
        thread.start()
        page.wait_for_timeout(PERIOD_S * 1000 / 2)
        trace = Path(folder) / "trace.json"
        categories = ["toplevel", "devtools.timeline", "disabled-by-default-devtools.timeline", "__metadata"]
        chromium.start_tracing(page=page, path=trace, categories=categories)
        page.wait_for_timeout(max(seconds, 2 * PERIOD_S) * 1000)
        chromium.stop_tracing()
        stop.set()
        thread.join()
        found = _by_frame(json.loads(trace.read_text())["traceEvents"])
        chromium.close()
    return found


def _by_frame(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the time of the page's main thread for each live frame, from receiving a message to the next frame.

    It is the thread's CPU time where the trace has that: on a busy machine other processes run in between.
    """
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    page_events = sorted(
        (e for e in events if (e["pid"], e.get("tid")) in threads), key=lambda event: event.get("ts", 0)
    )
    starts, has_received = [], False
    for event in page_events:
        if event["name"] == "WebSocketReceive":
            starts.append(event["ts"])
            has_received = True
        elif event["name"] == "FireAnimationFrame":
            if not has_received:
                starts.append(event["ts"])
            has_received = False
    tasks = [
        (e["ts"], e["dur"], e.get("tdur", e["dur"]))
        for e in page_events
        if e["name"].endswith("RunTask") and "dur" in e
    ]
    if not starts or not tasks:
        raise SystemExit(f"the trace tells no frames: {sorted({event['name'] for event in page_events})[:40]}")
    frames = [0.0] * len(starts)
    for ts, dur, thread_s in tasks:
        place = bisect.bisect_right(starts, ts + dur) - 1
        if place >= 0 and ts < starts[place] + SHOWN_WITHIN_US:
            frames[place] += thread_s / 1000
    return {
        "frames": len(frames), "p50_ms": stage.percentile(frames, 0.5), "p95_ms": stage.percentile(frames, 0.95),
        "longest_ms": max(thread_s for _, _, thread_s in tasks) / 1000,
        "wall_longest_ms": max(dur for _, dur, _ in tasks) / 1000,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
