"""Test messages about machines: lines of all, samples of one, and nothing about GPUs the person may not see."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.conf import LazySettings

from jobs.sockets import machines
from nodes.models import Gpu, Holding
from portal.models import User
from tests.jobs.sockets.listening import Socket, play
from tests.lab import a_project, person, signed_in
from tests.nodes.telemetry.reporting import UUIDS, Machine
from tests.redis import Server

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def machine(server: Server) -> Machine:
    machine = Machine()
    machine.post(machine.facts(time.time()))
    return machine


@pytest.fixture
def mira() -> User:
    return person("mira", a_project(), slurm_user="mira")


async def post_samples(machine: Machine, percent: int, *, ago: int = 10) -> None:
    batch = machine.batch(int(time.time()) - ago, gpu_percent=percent, watts=300, host={"cpu_percent": 5})
    await sync_to_async(machine.post)(batch)


def test_a_line_of_each_machine_once_a_second(machine: Machine, mira: User) -> None:
    client = signed_in(mira)

    async def scene() -> None:
        socket = Socket("/ws/cluster", client)
        assert await socket.connect() is None
        await socket.hear("hello")
        await post_samples(machine, 10)
        await post_samples(machine, 20)
        received: list[Any] = []
        while not received or received[-1]["gpus"] != [[20, None, None, 300]] * 2:
            received += (await socket.hear("machines"))["machines"]
        assert received[-1]["node"] == "dgx-01"
        assert received[-1]["cpu"] == 5
        await socket.disconnect()

    play(scene)


def test_gpus_stand_by_their_index_whatever_their_order_and_number(server: Server, mira: User) -> None:
    """A lost GPU is in no batch, and what comes after it stays in its place."""
    machine = Machine(gpus=UUIDS[:4])
    machine.post(machine.facts(time.time()))
    machine.gpus = (UUIDS[3], UUIDS[0])
    client = signed_in(mira)

    async def scene() -> None:
        socket = Socket("/ws/cluster", client)
        await socket.connect()
        await socket.hear("hello")
        batch = machine.batch(int(time.time()) - 10, gpu_percent=[[30] * 10, [10] * 10])
        await sync_to_async(machine.post)(batch)
        (line,) = (await socket.hear("machines"))["machines"]
        assert line["gpus"] == [[10, None, None, None], None, None, [30, None, None, None]]
        assert "uuids" not in line
        await socket.disconnect()

    play(scene)


def test_all_samples_of_a_machine(machine: Machine, mira: User) -> None:
    client = signed_in(mira)

    async def scene() -> None:
        socket = Socket("/ws/cluster?node=dgx-01", client)
        assert await socket.connect() is None
        await socket.hear("hello")
        await post_samples(machine, 10)
        received = await socket.hear("samples")
        assert (received["node"], received["period"], received["gpus"]) == ("dgx-01", 1, list(UUIDS[:2]))
        assert received["columns"] == {"gpu_percent": [[10] * 10] * 2, "watts": [[300] * 10] * 2}
        assert received["host"] == {"cpu_percent": 5}
        await socket.disconnect()

    play(scene)


def test_that_something_happened_is_sent_at_once_and_not_what(machine: Machine, mira: User) -> None:
    """It may be somebody else's business: the page reads what it may see."""
    client = signed_in(mira)

    async def scene() -> None:
        socket = Socket("/ws/cluster?node=dgx-01", client)
        await socket.connect()
        await socket.hear("hello")
        event = machine.event("xid", time.time(), gpu=UUIDS[0], xid=79, seq=1, text="name=secret.py")
        await sync_to_async(machine.post)(event)
        assert await socket.hear("happened") == {"kind": "happened", "node": "dgx-01", "happened": ["xid"]}
        await socket.disconnect()

    play(scene)


def test_a_backlog_is_no_news(machine: Machine, mira: User) -> None:
    client = signed_in(mira)

    async def scene() -> None:
        socket = Socket("/ws/cluster?node=dgx-01", client)
        await socket.connect()
        await socket.hear("hello")
        await post_samples(machine, 10, ago=3600)
        await post_samples(machine, 30)
        assert (await socket.hear("samples"))["columns"]["gpu_percent"][0][0] == 30
        await socket.disconnect()

    play(scene)


@pytest.mark.parametrize("path", ["/ws/cluster", "/ws/cluster?node=dgx-01"])
def test_what_others_hold_is_left_out_where_the_site_hides_it(
    machine: Machine, mira: User, settings: LazySettings, path: str
) -> None:
    settings.VIGIL_QUEUE_VISIBLE = "own"
    gpu = Gpu.objects.get(uuid=UUIDS[0])
    Holding.objects.create(
        gpu=gpu, agent=gpu.agent, scheduler_id="7", user="noor", source="scheduler", since=datetime.now(UTC)
    )
    client = signed_in(mira)

    async def scene() -> None:
        socket = Socket(path, client)
        await socket.connect()
        await socket.hear("hello")
        await post_samples(machine, 10)
        if "node" in path:
            columns = (await socket.hear("samples"))["columns"]
            assert columns["gpu_percent"] == [[None] * 10, [10] * 10]
        else:
            (line,) = (await socket.hear("machines"))["machines"]
            assert line["gpus"] == [None, [10, None, None, 300]]
        await socket.disconnect()

    play(scene)


def test_a_job_that_begins_meanwhile_is_left_out_soon(
    machine: Machine, mira: User, settings: LazySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.VIGIL_QUEUE_VISIBLE = "own"
    monkeypatch.setattr(machines, "HIDDEN_S", 0.05)
    gpu, client = Gpu.objects.get(uuid=UUIDS[0]), signed_in(mira)
    holding = {"gpu": gpu, "agent": gpu.agent, "scheduler_id": "7", "user": "noor", "source": "scheduler"}

    async def scene() -> None:
        socket = Socket("/ws/cluster?node=dgx-01", client)
        await socket.connect()
        await socket.hear("hello")
        await post_samples(machine, 10)
        assert (await socket.hear("samples"))["columns"]["gpu_percent"][0][0] == 10
        await sync_to_async(Holding.objects.create)(**holding, since=datetime.now(UTC))
        for _ in range(100):
            await post_samples(machine, 10)
            if (await socket.hear("samples"))["columns"]["gpu_percent"] == [[None] * 10, [10] * 10]:
                break
        else:
            pytest.fail("it is told on and on")
        await socket.disconnect()

    play(scene)


def test_nobody_who_is_not_signed_in_hears_anything(machine: Machine) -> None:
    async def scene() -> None:
        from django.test import Client

        socket = Socket("/ws/cluster", Client())
        await socket.connect()
        assert await socket.hear() == 4401

    play(scene)


def test_a_machine_that_nobody_knows(machine: Machine, mira: User) -> None:
    client = signed_in(mira)

    async def scene() -> None:
        socket = Socket("/ws/cluster?node=nowhere", client)
        await socket.connect()
        assert await socket.hear() == 4404

    play(scene)
