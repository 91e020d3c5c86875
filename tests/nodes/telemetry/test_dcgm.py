"""Test machines whose dcgm-exporter is polled instead of an agent, with a real HTTP server, good and bad answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from nodes.models import Agent, AgentStream, Frame, Gpu, NodeEvent
from nodes.tasks import pull
from nodes.telemetry import dcgm
from nodes.telemetry.exporters import exporters
from nodes.telemetry.fields import gpu_owner
from portal.ticks import SCHEDULE
from tests.lab import bearer, sysadmin
from tests.nodes.telemetry.curves import outline
from tests.nodes.telemetry.exporter import UUIDS, Exporter, serving, text
from tests.nodes.telemetry.reporting import Machine
from tests.stack import Stack
from tests.waiting import until

pytestmark = pytest.mark.django_db


@pytest.fixture
def exporter(settings: Any) -> Iterator[Exporter]:
    dcgm._failing.clear()
    with serving() as created:
        settings.VIGIL_DCGM_EXPORTERS = f"dgx-03={created.url}"
        yield created


def newest() -> dict[str, Any]:
    found: dict[str, Any] = Agent.objects.get(node="dgx-03").newest["gpus"]
    return found


class TestTaken:
    def test_as_a_post_of_an_agent(self, exporter: Exporter) -> None:
        pull()
        agent = Agent.objects.get()
        assert (agent.node, agent.version, agent.is_silent()) == ("dgx-03", "dcgm-exporter", False)
        gpus = [(gpu.uuid, gpu.index, gpu.minor, gpu.model, gpu.bus, gpu.memory_mib) for gpu in agent.gpus.all()]
        model, memory = "NVIDIA H100 80GB HBM3", 80_559
        assert gpus == [
            (UUIDS[0], 0, 0, model, "00000000:05:00.0", memory),
            (UUIDS[1], 1, 1, model, "00000000:06:00.0", memory),
        ]
        report = {name: newest()[UUIDS[0]][name] for name in ("gpu_percent", "memory_mib", "temperature_c", "watts")}
        assert report == {"gpu_percent": 97, "memory_mib": 60_559, "temperature_c": 61, "watts": 403}
        now, owner = int(time.time()), gpu_owner(agent.gpus.all()[1].pk)
        for name, value in {
            "sm_percent": 82, "sm_mhz": 1980, "memory_temperature_c": 58, "pcie_tx_mib": 31, "nvlink_rx_mib": 1000
        }.items():  # fmt: skip
            assert outline(agent, owner, name, start=now - 60, end=now + 10).min.tolist() == [value], name
        assert not NodeEvent.objects.exists()

    def test_each_ten_seconds_in_a_stream_per_node(self, exporter: Exporter) -> None:
        for turn in range(3):
            dcgm.take("dgx-03", text(DCGM_FI_DEV_GPU_UTIL=str(turn)), now=1_796_000_003.0 + 10 * turn)
        assert list(AgentStream.objects.values_list("next_seq", flat=True)) == [3]
        assert list(Frame.objects.order_by("at").values_list("at", "until")) == [
            (1_796_000_000 + 10 * turn, 1_796_000_010 + 10 * turn) for turn in range(3)
        ]

    def test_over_rest_it_is_a_machine_like_others(self, exporter: Exporter) -> None:
        pull()
        found = bearer(sysadmin(), "read").get("/api/v1/nodes/dgx-03/gpus").json()["items"]
        assert [gpu["newest"]["watts"] for gpu in found] == [403, 403]

    def test_another_gpu_in_the_slot(self, exporter: Exporter) -> None:
        pull()
        exporter.body = text(gpus=1).encode()
        pull()
        assert list(Gpu.objects.filter(gone_at=None).values_list("uuid", flat=True)) == [UUIDS[0]]

    @pytest.mark.parametrize("value", ["2147483632", "140737488355328.000000", "NaN", "-1", "101", "+Inf"])
    def test_what_dcgm_does_not_know_is_left_out(self, exporter: Exporter, value: str) -> None:
        exporter.body = text(DCGM_FI_DEV_GPU_UTIL=value).encode()
        pull()
        assert "gpu_percent" not in newest()[UUIDS[0]]
        assert newest()[UUIDS[0]]["watts"] == 403


class TestXids:
    def xids(self, exporter: Exporter, *gauges: str) -> list[int | None]:
        for gauge in gauges:
            exporter.body = text(gpus=1, DCGM_FI_DEV_XID_ERRORS=gauge).encode()
            pull()
        return list(NodeEvent.objects.filter(kind="xid").order_by("pk").values_list("code", flat=True))

    def test_a_change_is_a_single_event(self, exporter: Exporter) -> None:
        assert self.xids(exporter, "0", "79", "79", "79") == [79]
        event = NodeEvent.objects.get()
        assert (event.gpu and event.gpu.uuid, event.count, event.is_confirmed) == (UUIDS[0], 1, False)
        assert self.xids(exporter, "94", "94") == [79, 94]

    def test_what_was_there_at_the_first_poll_may_be_old(self, exporter: Exporter) -> None:
        assert self.xids(exporter, "79", "79") == []
        assert self.xids(exporter, "0", "79") == [79], "after a restart of the exporter it is a new one"

    @pytest.mark.parametrize("gauge", ["-1", "NaN", "1e9", "2147483632"])
    def test_what_is_no_xid_number(self, exporter: Exporter, gauge: str) -> None:
        assert self.xids(exporter, "0", gauge) == []


class TestFaults:
    def warned(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            ({"body": b""}, "it lists no GPU"),
            ({"body": b"<html>\xff\x00 DCGM_FI_DEV_GPU_UTIL 5" * 100}, "it lists no GPU"),
            ({"body": b'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 5\nDCGM_FI_DEV_GPU_UTIL{gpu="x",UUID="GPU-1"} 5'}, "no GPU"),
            ({"status": 500}, "HTTP 500"),
            ({"status": 302, "headers": {"Location": "http://169.254.169.254/"}}, "HTTP 302"),
            ({"headers": {"Content-Encoding": "gzip"}}, "HTTP 200 gzip"),
            ({"body": b"# " + b"x" * dcgm.MAX_BYTES}, "the response exceeds 8 MiB"),
        ],
    )
    def test_is_reported_once_and_stores_nothing(
        self, exporter: Exporter, caplog: pytest.LogCaptureFixture, spoil: dict[str, Any], message: str
    ) -> None:
        for name, value in spoil.items():
            setattr(exporter, name, value)
        pull()
        pull()
        (warning,) = self.warned(caplog)
        assert "dgx-03: its dcgm-exporter does not report" in warning
        assert message in warning
        assert not Frame.objects.exists()

    def test_a_response_that_never_ends_is_dropped(
        self, exporter: Exporter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dcgm, "EACH_S", 0.3)
        exporter.write = exporter.drip
        pull()
        assert "the response does not end" in self.warned(caplog)[0]

    def test_an_unreachable_exporter_keeps_no_other_waiting(
        self, exporter: Exporter, settings: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings.VIGIL_DCGM_EXPORTERS = f"dgx-02=http://127.0.0.1:1/metrics,dgx-03={exporter.url}"
        pull()
        assert list(Agent.objects.exclude(heard_at=None).values_list("node", flat=True)) == ["dgx-03"]
        assert "dgx-02" in self.warned(caplog)[0]

    def test_all_that_do_not_answer_in_time_are_left_to_the_next_turn(
        self, exporter: Exporter, settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dcgm, "MAX_PARALLEL", 1)
        exporter.write = exporter.drip
        settings.VIGIL_DCGM_EXPORTERS = ",".join(f"n{i}={exporter.url}" for i in range(5))
        began = time.monotonic()
        assert dcgm.poll(budget_s=0.4) == 0
        assert time.monotonic() - began < 30
        assert any("were not polled in time" in item for item in self.warned(caplog))

    def test_an_agent_on_the_machine_takes_precedence(
        self, exporter: Exporter, caplog: pytest.LogCaptureFixture
    ) -> None:
        machine = Machine(node="dgx-03")
        machine.post(machine.batch(int(time.time()) - 10, gpu_percent=5))
        pull()
        assert "an agent reports from this machine" in self.warned(caplog)[0]
        assert AgentStream.objects.count() == 1
        Agent.objects.update(heard_at=None)
        pull()
        assert AgentStream.objects.count() == 2, "once that is silent"

    def test_of_a_thousand_gpus_no_more_than_a_machine_has(self) -> None:
        lines = "\n".join(f'DCGM_FI_DEV_GPU_UTIL{{gpu="{i}",UUID="GPU-{i}"}} 5' for i in range(1_000))
        dcgm.take("dgx-03", lines, now=time.time())
        assert Gpu.objects.count() == 64

    def test_hostile_labels_are_bounded_and_escaped(self, exporter: Exporter) -> None:
        exporter.body = text(gpus=1, model="<script>\\n" + "x" * 500).encode()
        pull()
        assert len(Gpu.objects.get().model) <= 128
        assert "\n" not in Gpu.objects.get().model


class TestSetting:
    def test_in_line_and_in_a_file(self, tmp_path: Path) -> None:
        first, second = "http://dgx-01:9400/metrics", "https://10.0.0.2:9400/metrics"
        wanted = {"dgx-01": first, "dgx-02.lab": second}
        assert exporters(f"dgx-01={first}, dgx-02.lab={second},") == wanted
        file = tmp_path / "exporters"
        file.write_text(f"# ours\ndgx-01={first}\n\n  dgx-02.lab={second}  # the new one\n")
        assert exporters(f"@{file}") == wanted
        assert exporters("") == {}

    @pytest.mark.parametrize(
        "setting",
        [
            "dgx-01",
            "dgx-01=ftp://x/",
            "=http://x/",
            "a b=http://x/",
            "a=http://x/,a=http://y/",
            "@/none",
            "a=http:///x",
        ],
    )
    def test_an_invalid_setting_is_reported_at_the_start(self, settings: Any, setting: str) -> None:
        with pytest.raises(ValueError, match=r"."):
            exporters(setting)
        settings.VIGIL_DCGM_EXPORTERS = setting
        with pytest.raises(SystemCheckError, match="VIGIL_DCGM_EXPORTERS"):
            call_command("check", tags=["vigil"])

    def test_a_file_that_has_gone_meanwhile_is_reported_once(
        self, settings: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        dcgm._failing.clear()
        settings.VIGIL_DCGM_EXPORTERS = "@/none"
        pull()
        pull()
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_nothing_is_polled_where_none_is_named() -> None:
    assert "pull" not in SCHEDULE


@pytest.mark.slow
def test_a_whole_portal_polls_it(exporter: Exporter, make_stack: Callable[..., Stack]) -> None:
    stack = make_stack(VIGIL_DCGM_EXPORTERS=f"dgx-03={exporter.url}", VIGIL_AGENT="no")
    stack.start()
    with stack.client() as client:
        report = until(lambda: [item for item in client.get("/api/v1/agents").json()["items"] if item["heard_at"]])
        assert [(entry["node"], entry["version"], entry["gpus"]) for entry in report] == [
            ("dgx-03", "dcgm-exporter", 2)
        ]
        request = exporter.requests
        assert until(lambda: exporter.requests > request), "again"
