"""Test machine telemetry on the command line, with scripted answers of a portal."""

import json
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.vigil_cli.commands import nowhere, portal, problem, vigil  # noqa: F401

AGENT = {
    "node": "dgx-01", "version": "0.1.0", "enrolled_at": None, "enrolled_by": "ops", "is_silent": False,
    "last_report_at": datetime.now(UTC).isoformat(), "sampled_at": 1, "clock_offset_s": 0.3, "gpus": 8,
    "discarded_batches": 0, "is_made_up": False,
}  # fmt: skip
GPU = {
    "node": "dgx-01", "uuid": "GPU-1", "index": 0, "minor": 0, "bus": "", "model": "NVIDIA H100", "memory_mib": 81_559,
    "power_cap_watts": 700, "slowdown_c": 87, "is_lost": False, "lost_at": None, "counters": {}, "counted_at": None,
    "newest": {"gpu_percent": 93, "memory_mib": 61_000, "temperature_c": 61, "watts": 512}, "processes": [],
    "holders": [{"scheduler_id": "77", "job": 7, "user": "mira", "name": "wren", "since": "", "source": ""}],
}  # fmt: skip
TELEMETRY = {
    "node": "dgx-01", "last_report_at": AGENT["last_report_at"], "is_silent": False, "sampled_at": 1, "facts": {},
    "host": {"cpu_percent": 12.5, "load_1": 3.0}, "gpus": [GPU, {**GPU, "index": 1, "uuid": "GPU-2", "newest": {}}],
}  # fmt: skip


def test_agents_worst_first(portal):  # noqa: F811
    early, late = ((datetime.now(UTC) - timedelta(minutes=minutes)).isoformat() for minutes in (90, 9))
    items = [
        AGENT,
        {**AGENT, "node": "new", "last_report_at": None, "clock_offset_s": None},
        {**AGENT, "node": "late", "last_report_at": late, "is_silent": True, "discarded_batches": 1_234},
        {**AGENT, "node": "early", "last_report_at": early, "is_silent": True},
    ]
    portal.answers["GET", "agents"] = {"items": items, "next": None}
    lines = vigil("agents").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["NODE", "early", "late", "new", "dgx-01"]
    assert lines[1].split()[1:4] == ["silent", "1", "h"]
    assert "1,234" in lines[2]
    assert "never reported" in lines[3]
    assert "+0.3 s" in lines[4]
    assert json.loads(vigil("agents", "--json").stdout)["items"] == items
    portal.answers["GET", "agents"] = {"items": [], "next": None}
    assert "vigil agent enroll NODE" in vigil("agents").stdout


def test_gpus_of_all_nodes_and_of_a_single_one(portal):  # noqa: F811
    lost = {**GPU, "index": 3, "is_lost": True, "newest": {}, "holders": [{**GPU["holders"][0], "job": None}]}
    portal.answers["GET", "gpus"] = [{"items": [GPU], "next": "c"}, {"items": [lost], "next": None}]
    lines = vigil("gpus").stdout.splitlines()
    assert lines[1].split("  ")[-1].strip() == "mira wren (#7)"
    assert "61,000/81,559" in lines[1]
    assert "93 %" in lines[1]
    assert "lost" in lines[2]
    assert lines[2].endswith("mira wren (77)")
    assert portal.asked[1].url.params["cursor"] == "c"
    item = {key: value for key, value in GPU.items() if key != "node"}
    portal.answers["GET", "nodes/dgx-01/gpus"] = {"items": [item], "next": None}
    assert json.loads(vigil("gpus", "dgx-01", "--json").stdout)["items"] == [{"node": "dgx-01", **item}]
    portal.answers["GET", "gpus"] = {"items": [], "next": None}
    assert "No agent reports a GPU there." in vigil("gpus").stdout


def test_what_a_node_does_now(portal):  # noqa: F811
    portal.answers["GET", "nodes/dgx-01/telemetry"] = TELEMETRY
    output = vigil("telemetry", "dgx-01").stdout
    assert "cpu_percent  12.5" in output
    assert "gpu_percent" in output
    rows = vigil("telemetry", "dgx-01", "--gpu", "0", "--field", "watts").stdout.splitlines()
    assert [row.split() for row in rows[-2:]] == [["GPU", "watts"], ["0", "512"]]
    assert "cpu_percent" not in "".join(rows)
    found = json.loads(vigil("telemetry", "dgx-01", "--gpu", "GPU-1", "--json").stdout)
    assert [gpu["uuid"] for gpu in found["gpus"]] == ["GPU-1"]
    wrong = vigil("telemetry", "dgx-01", "--gpu", "9", status=1)
    assert "dgx-01 has no such GPU. It has 0, 1." in wrong.stderr
    portal.answers["GET", "nodes/dgx-01/telemetry"] = {
        **TELEMETRY,
        "is_silent": True,
        "gpus": [],
        "last_report_at": None,
    }
    assert "last report never. The agent is silent." in vigil("telemetry", "dgx-01").stdout


def test_what_a_node_did_as_csv(portal):  # noqa: F811
    csv = "node,gpu,name,time,value\ndgx-01,0,watts,1796000000,512\n"
    portal.answers["GET", "nodes/dgx-01/series.csv"] = httpx.Response(200, text=csv)
    result = vigil("telemetry", "dgx-01", "--csv", "--field", "watts", "--gpu", "0", "--gpu", "1", "--hours", "2")
    assert result.stdout == csv
    params = portal.asked[0].url.params
    assert (params.get_list("name"), params.get_list("gpu")) == (["watts"], ["0", "1"])
    ago = datetime.now(UTC).timestamp() - int(params["from"])
    assert 7_190 < ago < 7_300
    assert "Choose one of" in vigil("telemetry", "dgx-01", "--csv", "--json", status=2).stderr


@pytest.mark.parametrize("command", [("gpus", "a/b"), ("telemetry", "a/b"), ("telemetry", "a/b", "--csv")])
def test_a_name_stays_one_part_of_the_address(portal, command):  # noqa: F811
    vigil(*command, status=1)
    assert portal.asked[0].url.raw_path.startswith(b"/api/v1/nodes/a%2Fb/")
