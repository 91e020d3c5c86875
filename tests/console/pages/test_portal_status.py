"""Sysadmins see on /health how Vigil itself is."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from console.health import heartbeats
from console.health.heartbeats import Activity
from nodes.models import Agent, Reading
from portal.models import Lease, User

pytestmark = pytest.mark.django_db


def page(user: User) -> str:
    client = Client()
    client.force_login(user)
    return client.get("/health").content.decode().replace("\xa0", " ")


def test_processes_polls_leases_and_agents_are_listed() -> None:
    now = timezone.now()
    heartbeats.report("web", Activity())
    heartbeats.report("follow", Activity(task="jobs.tasks.follow", task_seconds=12))
    Reading.objects.create(part="nodes", read_at=now - timedelta(seconds=20))
    Lease.objects.create(name="follow", holder="head:412", expires_at=now + timedelta(minutes=10))
    for number in range(3):
        received = now - timedelta(minutes=5 if number else 0)
        Agent.objects.create(node=f"dgx-{number}", heard_at=received)
    html = page(User.objects.create_superuser("root"))
    assert "Vigil itself" in html
    assert "2 processes report; the longest task is jobs.tasks.follow, for 12 s" in html
    assert "silent: worker, diagnosis and notices" in html
    assert "Jobs are followed by head:412." in html
    assert "Last polled" in html
    assert "3 agents, 2 silent." in html


def test_a_failing_poll_shows_since_when_and_why() -> None:
    Reading.objects.create(part="queue", failing_since=timezone.now(), error="<b>slurmrestd</b> refuses")
    html = page(User.objects.create_superuser("root"))
    assert "Polls of queue have failed since" in html
    assert "&lt;b&gt;slurmrestd&lt;/b&gt; refuses" in html


def test_others_do_not_see_it() -> None:
    heartbeats.report("web", Activity())
    assert "Vigil itself" not in page(User.objects.create_user("mira"))
