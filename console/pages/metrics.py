"""Serve /metrics for Prometheus: the cluster, and Vigil itself."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from typing import Literal

import redis
from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from console.health import heartbeats, run
from jobs.following.tick_metrics import KEY
from nodes.monitoring import metrics as health_metrics
from nodes.telemetry import gauges
from portal import process_counters
from portal.publish import connection
from vigil_core.exposition import CONTENT_TYPE, Family, render

QUEUES = ("follow", "work", "diagnose", "tail", "pull")


@require_safe
def page(request: HttpRequest) -> HttpResponse:
    """Serve all metrics, or with `?only=cluster` or `?only=process` a part: each web process has its own counts."""
    if not settings.VIGIL_METRICS_TOKEN:
        raise Http404
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    is_authorized = hmac.compare_digest(given.strip().encode(), settings.VIGIL_METRICS_TOKEN.encode())
    if scheme.lower() != "bearer" or not is_authorized:
        return HttpResponse(
            "Send `Authorization: Bearer …` with the token in VIGIL_METRICS_TOKEN.\n",
            status=401,
            content_type="text/plain; charset=utf-8",
            headers={"WWW-Authenticate": 'Bearer realm="Vigil"'},
        )
    only = request.GET.get("only", "")
    text = render(_families(cluster=only != "process", process=only != "cluster"))
    return HttpResponse(text.encode(errors="replace"), content_type=CONTENT_TYPE)


def _families(*, cluster: bool, process: bool) -> Iterator[Family]:
    if cluster:
        yield from gauges.families()
        yield from health_metrics.families()
        yield from _background()
        yield from _health()
    if process:
        yield from process_counters.families(settings.VIGIL_METRICS_PROCESS)


def _health() -> Iterator[Family]:
    """Yield the checks of /readyz, and the age of each process's last heartbeat."""
    failing = {finding.check for finding in run.current().findings}
    checks = [((name,), float(name not in failing)) for name in run.CHECKS]
    yield Family("vigil_check_ok", "gauge", "Whether the check found nothing wrong.", ("check",), checks)
    ages = [((p.role, p.host, str(p.pid)), p.silent_s) for p in heartbeats.processes()]
    description = "Seconds since a process of the portal last reported."
    yield Family("vigil_heartbeat_age_seconds", "gauge", description, ("role", "host", "pid"), ages)


def _background() -> Iterator[Family]:
    """Yield metrics of other processes that are stored in Redis; only vigil_redis_up if it does not respond."""
    try:
        with connection().pipeline(transaction=False) as pipe:
            for queue in QUEUES:
                pipe.llen(queue)
            pipe.hgetall(KEY)
            *lengths, follower = pipe.execute()
    except (redis.RedisError, OSError):
        yield Family("vigil_redis_up", "gauge", "Whether Redis answers.", (), [((), 0)])
        return
    yield Family("vigil_redis_up", "gauge", "Whether Redis answers.", (), [((), 1)])
    depth = [((queue,), int(many)) for queue, many in zip(QUEUES, lengths, strict=True)]
    yield Family("vigil_task_queue_length", "gauge", "Tasks waiting for a worker.", ("queue",), depth)
    names: dict[str, tuple[str, Literal["gauge", "counter"], str]] = {
        "seconds": ("vigil_follower_tick_seconds", "gauge", "Duration of the follower's last tick."),
        "at": (
            "vigil_follower_tick_timestamp_seconds",
            "gauge",
            "When the follower's last tick ended. There are no ticks while no job is active.",
        ),
        "ticks": ("vigil_follower_ticks_total", "counter", "Ticks of the follower."),
    }
    for field, (name, kind, description) in names.items():
        value = follower.get(field.encode())
        samples = [] if value is None else [((), float(value))]
        yield Family(name, kind, description, (), samples)
