"""Test every GPU over REST: by machine, by page, without others' allocations where the site hides them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.conf import LazySettings

from bench import simulated_fleet
from nodes.models import Agent, Gpu, Holding
from portal.models import User
from tests.lab import a_project, bearer, person

pytestmark = pytest.mark.django_db


@pytest.fixture
def mira() -> User:
    return person("mira", a_project(), slurm_user="mira")


def all_of(user: User, **wanted: int) -> list[dict[str, Any]]:
    client, found, cursor = bearer(user, scope="read"), [], None
    while True:
        page = client.get("/api/v1/gpus", {**wanted, **({"cursor": cursor} if cursor else {})}).json()
        found += page["items"]
        cursor = page["next"]
        if cursor is None:
            return found


def test_each_gpu_once_by_machine(mira: User, django_assert_max_num_queries: Any) -> None:
    simulated_fleet.make(12)
    Gpu.objects.filter(agent__node="dgx-02", index=7).update(gone_at=datetime.now(UTC))
    Agent.objects.create(node="login-1")
    with django_assert_max_num_queries(12):
        found = all_of(mira, limit=200)
    assert len(found) == 12 * 8 - 1
    assert [(gpu["node"], gpu["index"]) for gpu in found] == sorted((gpu["node"], gpu["index"]) for gpu in found)
    assert found == all_of(mira, limit=5)
    first = found[0]
    assert first["newest"]["gpu_percent"] > 0
    assert [holder["user"] for holder in first["holders"]] == list(
        Holding.objects.filter(gpu__uuid=first["uuid"]).values_list("user", flat=True)
    )
    assert bearer(mira, scope="read").get("/api/v1/gpus?cursor=x").status_code == 422


def test_what_others_hold_is_theirs(mira: User, settings: LazySettings) -> None:
    settings.VIGIL_QUEUE_VISIBLE = "own"
    simulated_fleet.make(12)
    Holding.objects.filter(agent__node="dgx-01").update(user="mira")
    Holding.objects.filter(agent__node="dgx-02").update(user="noor")
    found = all_of(mira, limit=200)
    own_gpus, other_gpus = ([gpu for gpu in found if gpu["node"] == node] for node in ("dgx-01", "dgx-02"))
    assert all(gpu["newest"] and gpu["processes"] and gpu["holders"] for gpu in own_gpus)
    assert not any(gpu["newest"] or gpu["processes"] or gpu["holders"] for gpu in other_gpus)
