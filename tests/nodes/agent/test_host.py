"""Test reading a machine's activity from kernel files, prepared like those of real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nodes.agent import disks, host, proc
from nodes.agent.checking import pci_gpus
from nodes.agent.facts import MAX_BYTES, facts
from nodes.agent.host import HostSampler


def plant(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> HostSampler:
    """A DGX in small."""
    plant(
        tmp_path / "proc",
        {
            "stat": "cpu  1000 0 500 8000 500 0 0 0 0 0\ncpu0 1000 0 500 8000 500 0 0 0 0 0\nprocs_blocked 1",
            "loadavg": "12.50 10.11 9.00 3/4242 991",
            "meminfo": "MemTotal:       2113425408 kB\nMemFree: 1 kB\nMemAvailable:   1056712704 kB",
            "uptime": "86400.50 1000.00",
            "sys/kernel/random/boot_id": "0f5c3b1e-1111-4222-8333-444455556666",
            "diskstats": "\n".join(
                [
                    " 259 0 nvme0n1 100 0 204800 5 10 0 409600 7 0 5 6",
                    " 259 1 nvme0n1p1 100 0 204800 5 10 0 409600 7 0 5 6",
                    "   8 0 sda 1 0 2048 5 1 0 4096 7 0 5 6",
                    "   8 1 sda1 1 0 2048 5 1 0 4096 7 0 5 6",
                    " 253 0 dm-0 1 0 2048 5 1 0 4096 7 0 5 6",
                    "   7 0 loop0 1 0 2048 5 1 0 4096 7 0 5 6",
                    "garbage",
                ]
            ),
            "self/mounts": "\n".join(
                [
                    "/dev/nvme0n1p1 / ext4 rw 0 0",
                    "/dev/nvme0n1p1 /var/lib/containers ext4 rw 0 0",
                    "nfs01:/data /data nfs4 rw 0 0",
                    r"lustre@tcp:/scratch /scratch\040of\040all lustre rw 0 0",
                    "tmpfs /dev/shm tmpfs rw 0 0",
                    "/dev/loop3 /snap/core squashfs ro 0 0",
                ]
            ),
            "7/stat": "7 (a) b) c) D 1 7",
            "8/stat": "8 (python) S 1 8",
            "9/stat": "9 (D) R 1 9",
        },
    )
    plant(
        tmp_path / "sys",
        {
            "class/net/eth0/device/vendor": "0x15b3",
            "class/net/eth0/statistics/rx_bytes": 10 * 2**20,
            "class/net/eth0/statistics/tx_bytes": 20 * 2**20,
            "class/net/docker0/statistics/rx_bytes": 5,
            "class/net/docker0/statistics/tx_bytes": 5,
            "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
            "class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": 2**20,
            "class/infiniband/mlx5_0/ports/1/counters/port_xmit_data": 2**20,
            "class/infiniband/mlx5_0/ports/1/counters/symbol_error": 3,
            "class/infiniband/mlx5_0/ports/1/counters/link_downed": 2,
            "class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
        },
    )
    return HostSampler(tmp_path / "proc", tmp_path / "sys")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(host.time, "monotonic", lambda: now[0])
    return now


def test_the_first_sample_has_no_rates(machine: HostSampler, clock: list[float]) -> None:
    report = machine.sample()
    assert report["load_1"] == 12.5
    assert report["memory_total_mib"] == 2_063_892.0
    assert report["memory_used_mib"] == 1_031_946.0
    assert report["uptime_s"] == 86_400
    assert report["blocked_processes"] == 1.0
    assert report["cpu_percent"] is None
    assert (report["ib_up:mlx5_0/1"], report["ib_up:mlx5_1/1"]) == (1.0, 0.0)
    assert report["ib_errors:mlx5_0/1"] == 5.0
    assert "ib_errors:mlx5_1/1" not in report
    assert not [name for name in report if name.startswith(("net_", "disk_read", "ib_rx"))]


def test_the_second_sample_has_rates(machine: HostSampler, clock: list[float]) -> None:
    machine.sample()
    plant(
        machine.proc,
        {
            "stat": "cpu  1600 0 700 8100 600 0 0 0 0 0",
            "diskstats": " 259 0 nvme0n1 100 0 225280 5 10 0 409600 7 0 5 6",
        },
    )
    plant(
        machine.sys,
        {
            "class/net/eth0/statistics/rx_bytes": 110 * 2**20,
            "class/net/eth0/statistics/tx_bytes": 1,
            "class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": 2**20 + 25 * 2**20,
        },
    )
    clock[0] += 10.0
    report = machine.sample()
    assert report["cpu_percent"] == 80.0
    assert report["net_rx_mib:eth0"] == 10.0
    assert "net_tx_mib:eth0" not in report, "a counter that went back was reset"
    assert report["ib_rx_mib:mlx5_0/1"] == 10.0
    assert report["disk_read_mib:nvme0n1"] == 1.0
    assert report["disk_write_mib:nvme0n1"] == 0.0
    assert not [name for name in report if "docker0" in name or "nvme0n1p1" in name or "sda1" in name or "dm-0" in name]


def test_a_machine_without_kernel_files_gives_an_empty_sample(tmp_path: Path) -> None:
    report = HostSampler(tmp_path / "none", tmp_path / "none").sample()
    assert report["load_1"] is None
    assert "memory_used_mib" not in report


def test_names_are_those_of_the_contract(machine: HostSampler) -> None:
    machine.sample()
    for name in machine.sample():
        head, _, label = name.partition(":")
        assert head.replace("_", "").replace("1", "").isalpha()
        assert len(label) <= 72
        assert label.isprintable()


def test_mounts_by_where_their_data_is(machine: HostSampler) -> None:
    mounted = disks.mounts(machine.proc)
    assert disks.shared(mounted) == ("/data", "/scratch of all")
    assert disks._on_disks(mounted) == ["/"]


def test_of_very_many_homes_some_are_probed(tmp_path: Path) -> None:
    homes = "\n".join(f"nfs01:/home/u{number} /home/u{number} nfs rw 0 0" for number in range(500))
    plant(tmp_path, {"self/mounts": f"nfs01:/data /data nfs rw 0 0\n{homes}"})
    found = disks.shared(disks.mounts(tmp_path))
    assert len(found) == 16
    assert "/data" in found


def test_processes_that_wait_for_a_disk_are_found_by_their_state(machine: HostSampler) -> None:
    assert proc.blocked(machine.proc) == [7]


def test_gpus_on_the_bus(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x030200"), ("0x10de", "0x068000"), ("0x15b3", "0x020000")]
    ):
        folder = f"bus/pci/devices/0000:{number:02d}:00.0"
        plant(tmp_path, {f"{folder}/vendor": vendor, f"{folder}/class": kind})
    assert pci_gpus(tmp_path) == 2
    (tmp_path / "bus/pci/drivers/vfio-pci").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:01:00.0/driver").symlink_to(tmp_path / "bus/pci/drivers/vfio-pci")
    assert pci_gpus(tmp_path) == 1, "a virtual machine has the other"


def facts_of(gpus: list[dict[str, Any]]) -> dict[str, Any]:
    return facts(node="n", machine=None, gpus=gpus, problems={}, probed=(), software={})


def test_facts_of_very_many_gpus_still_fit_into_an_event() -> None:
    gpus = [
        {"uuid": f"GPU-{number}", "name": "x" * 96, "serial": "s" * 100, "instances": [{"name": "y" * 90}] * 7}
        for number in range(64)
    ]
    report = facts_of(gpus)
    assert len(str(report)) < MAX_BYTES
    assert [gpu["uuid"] for gpu in report["gpus"]] == [gpu["uuid"] for gpu in gpus]
    assert facts_of(gpus[:2])["gpus"] == gpus[:2]
