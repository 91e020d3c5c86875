"""Test reading GPUs through real NVML bindings over a stand-in library: reports, and every way of failing."""

from __future__ import annotations

import select
import time
from pathlib import Path

import pytest

from gpus.reports import DriverEvent, GpuCounters, GpuInventory, GpuSamples
from tests.gpus.conftest import STEADY, Watch, stand_in
from tests.nvml import LEARNED_LATE, MIG_CHANGED, RECOVERY, StandIn, bus, slice_uuid, uuid
from tests.waiting import until

pytestmark = pytest.mark.lengthy  # a process each, and what it tells comes by the second


def test_what_there_is(nvml: StandIn, watch: Watch) -> None:
    machine = watch().first(GpuInventory)
    assert (machine.driver, machine.nvml, machine.cuda) == ("570.86.15", "12.570.86.15", "12.8")
    assert [gpu.uuid for gpu in machine.gpus] == [uuid(index) for index in range(8)]
    assert [row[0] for row in machine.topology] == ["X", *["NV18"] * 7]
    assert machine.gpus[3].as_payload() == {
        "gpu": "3",
        "uuid": uuid(3),
        "index": 3,
        "minor": 3,
        "bus": bus(3),
        "name": "NVIDIA H100 80GB HBM3",
        "memory_mib": 81920,
        "serial": "1650000000003",
        "vbios": "96.00.74.00.01",
        "inforom": "G520.0200.00.05",
        "power_cap_watts": 700,
        "slowdown_c": 89,
        "numa_node": 0,
        "mig": False,
    }


def test_without_links_gpus_are_near_or_far(nvml: StandIn, watch: Watch) -> None:
    nvml.set_state("* field.91 0")
    assert watch().first(GpuInventory).topology[0] == ("X", *["NODE"] * 3, *["SYS"] * 4)


def test_a_gpu_that_reports_only_its_margin_to_slowdown(nvml: StandIn, watch: Watch) -> None:
    nvml.set_state("* slowdown_c !3", "* temperature_c 40", "* margin_c 47", "* field.194 -2")
    assert watch().first(GpuInventory).gpus[0].slowdown_c == 89


def test_what_gpus_do(nvml: StandIn, watch: Watch) -> None:
    nvml.set_state("3 gpu_percent 30~90/60", "3 throttle 72", "3 field.138 0+2097152", "3 field.139 0+1048576")
    watched = watch()
    samples = watched.current().samples
    assert samples[0] == STEADY
    assert samples[3] is not None
    assert 30 <= samples[3]["gpu_percent"] <= 90
    assert samples[3]["throttle"] == 72
    assert samples[3]["nvlink_tx_mib"] == pytest.approx(2048, rel=0.2)
    assert samples[3]["nvlink_rx_mib"] == pytest.approx(1024, rel=0.2)


def test_each_period_gets_one_sample(nvml: StandIn, watch: Watch) -> None:
    watched = watch()
    until(lambda: len(watched.all(GpuSamples)) > 10)
    periods = [reading.time // 0.1 for reading in watched.all(GpuSamples)]
    assert sorted(set(periods)) == periods
    assert abs(watched.all(GpuSamples)[-1].time - time.time()) < 30


def test_counters_and_processes(nvml: StandIn, watch: Watch) -> None:
    nvml.set_state(
        "2 ecc_uncorrected 4", "2 remapped_pending 1", "2 pcie_width 8", "2 field.230 2", "2 nvlink.5 0",
        "2 sram_threshold_exceeded 1", "0 process 4711 2000", "0 process 4712 150", "1 processes !4",
    )  # fmt: skip
    report = watch().first(GpuCounters)
    assert report.counters[0] == {
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "ecc_corrected_lifetime": 2,
        "ecc_uncorrected_lifetime": 0,
        "sram_threshold_exceeded": 0,
        "remapped_corrected": 0,
        "remapped_uncorrected": 0,
        "remapped_pending": 0,
        "remapped_failed": 0,
        "pcie_replays": 0,
        "pcie_generation": 5,
        "pcie_generation_most": 5,
        "pcie_width": 16,
        "pcie_width_most": 16,
        "power_cap_watts": 700,
        "recovery_action": 0,
        "nvlinks": [1] * 18,
    }
    assert {name: value for name, value in report.counters[2].items() if value != report.counters[0][name]} == {
        "ecc_uncorrected": 4,
        "remapped_pending": 1,
        "pcie_width": 8,
        "recovery_action": 2,
        "sram_threshold_exceeded": 1,
        "nvlinks": [1] * 5 + [0] + [1] * 12,
    }
    both = ({"pid": 4711, "memory_mib": 2000}, {"pid": 4712, "memory_mib": 150})
    assert report.processes[:3] == (both, None, ())


# What is not reported.


def test_unsupported_fields_are_left_out_and_queried_again_once_nvml_is_reopened(nvml: StandIn, watch: Watch) -> None:
    nvml.set_state("2 watts !3", "2 field.82 !3", "2 gpm.20 !3")
    watched = watch()
    missing = {name: value for name, value in STEADY.items() if name not in ("watts", "memory_temperature_c")}
    missing.pop("pcie_tx_mib")
    samples = watched.current().samples
    assert (samples[1], samples[2]) == (STEADY, missing)
    nvml.set_state("2 gpm.20 !3")
    assert watched.current().samples[2] == missing, "the driver was queried again"
    nvml.set_state("* reload 1")
    assert until(lambda: [item for item in watched.all(GpuInventory) if item.reopened])
    assert watched.current().samples[2] == STEADY


def test_a_field_that_fails_once_is_queried_again(nvml: StandIn, watch: Watch) -> None:
    nvml.set_state("2 watts !999")
    watched = watch()
    sample = watched.current().samples[2]
    assert sample is not None
    assert "watts" not in sample
    nvml.set_state()
    assert watched.current().samples[2] == STEADY


def test_a_counter_that_may_go_round_unseen_makes_no_rate(nvml: StandIn, watch: Watch) -> None:
    nvml.set_state("* gpm 0", "0 field.197 100+1", "1 field.197 5e12+1048576000", "2 field.202 0+1048576000")
    first, second, third = watch().current().samples[:3]
    assert first is not None
    assert second is not None
    assert third is not None
    assert not {"pcie_tx_mib", "sm_percent", "nvlink_tx_mib"} & first.keys()
    assert second["pcie_tx_mib"] == pytest.approx(1000, rel=0.2)
    assert third["nvlink_tx_mib"] == pytest.approx(1000, rel=0.2)


def test_an_old_driver_reports_what_it_supports(watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(StandIn(tmp_path, without=LEARNED_LATE), monkeypatch)
    watched = watch()
    assert watched.first(GpuInventory).gpus[0].numa_node is None
    assert set(watched.first(GpuCounters).processes) == {None}
    sample = watched.current().samples[0]
    # With what the driver keeps for itself.
    assert sample == {
        "gpu_percent": 90,
        "memory_mib": 31232,
        "temperature_c": 60,
        "watts": 350,
        "sm_mhz": 1980,
        "throttle": 0,
    }


# Events.


def test_an_xid_is_reported_before_the_next_sample(nvml: StandIn, watch: Watch) -> None:
    watched = watch(every=3600)
    watched.first(GpuCounters)
    nvml.event(5, 79)
    event = watched.first(DriverEvent)
    assert (event.gpu.uuid, event.kind, event.value) == (uuid(5), "xid", 79)
    nvml.event(5, 79)
    nvml.event(5, 2, kind=RECOVERY)
    until(lambda: len(watched.all(DriverEvent)) == 2)
    assert watched.all(DriverEvent)[1].kind == "recovery", "an equal one counts as one until the next look"
    assert len(watched.all(GpuSamples)) == 1


def test_that_there_is_something_to_read_shows_in_a_selector(nvml: StandIn, watch: Watch) -> None:
    watched = watch(every=3600)
    watched.first(GpuCounters)
    watched.reader.poll()
    number = watched.reader.fileno()
    assert number is not None
    assert not select.select([number], [], [], 0)[0]
    nvml.event(0, 31)
    assert select.select([number], [], [], 60)[0]


@pytest.mark.parametrize("how", ["0", "!3"])
def test_gpus_without_events_are_sampled_all_the_same(nvml: StandIn, watch: Watch, how: str) -> None:
    nvml.set_state(f"* events {how}")
    watched = watch()
    watched.current()
    nvml.event(0, 79)
    watched.current()
    assert not watched.all(DriverEvent)


def test_a_wait_that_fails_neither_spins_nor_stops(nvml: StandIn, watch: Watch) -> None:
    nvml.set_state("* wait !15")
    watched = watch()
    watched.current()
    watched.current()
    periods = [reading.time // 0.1 for reading in watched.all(GpuSamples)]
    assert sorted(set(periods)) == periods


# Slices (MIG).


def test_slices_are_reported_when_they_are_made_and_removed(nvml: StandIn, watch: Watch) -> None:
    watched = watch()
    watched.first(GpuCounters)
    nvml.set_state("3 mig 1", "3 slice 1 9856", "3 slice 2 19968", "3 process 4711 2000 2")
    nvml.event(3, 1, kind=MIG_CHANGED)
    cut = until(lambda: [item for item in watched.all(GpuInventory) if item.gpus[3].mig])[0]
    assert cut.gpus[3].instances == (
        {
            "uuid": slice_uuid(3, 1),
            "name": "NVIDIA H100 80GB HBM3",
            "memory_mib": 9856,
            "gpu_instance": 1,
            "compute_instance": 0,
        },
        {
            "uuid": slice_uuid(3, 2),
            "name": "NVIDIA H100 80GB HBM3",
            "memory_mib": 19968,
            "gpu_instance": 2,
            "compute_instance": 0,
        },
    )
    assert watched.next(GpuCounters).processes[3] == ({"pid": 4711, "memory_mib": 2000, "gpu_instance": 2},)
    sample = watched.current().samples[3]
    assert sample is not None
    assert ("gpu_percent" in sample, sample["watts"]) == (False, 350)
    nvml.set_state()
    nvml.event(3, 0, kind=MIG_CHANGED)
    assert until(lambda: [item for item in watched.all(GpuInventory) if item.gpus[3].mig is False])
    assert watched.current().samples[3] == STEADY


def test_a_slice_by_its_uuid_names_its_gpu(nvml: StandIn, watch: Watch) -> None:
    nvml.set_state("3 mig 1", "3 slice 1 9856")
    watched = watch([slice_uuid(3, 1)], detailed=False)
    (gpu,) = watched.first(GpuInventory).gpus
    assert (gpu.uuid, gpu.parent, gpu.memory_mib) == (slice_uuid(3, 1), uuid(3), 9856)
    (sample,) = watched.current().samples
    assert sample is not None
    assert sample["memory_mib"] == 4928
    assert not {"gpu_percent", "watts"} & sample.keys()


# Whose it is.


def test_chosen_ones_by_index_and_uuid(nvml: StandIn, watch: Watch) -> None:
    watched = watch([uuid(6), "2"], detailed=False)
    assert [gpu.index for gpu in watched.first(GpuInventory).gpus] == [6, 2]
    assert len(watched.current().samples) == 2
    assert not watched.all(GpuCounters)


def test_a_missing_gpu_has_empty_samples(nvml: StandIn, watch: Watch) -> None:
    watched = watch(["GPU-of-nobody", "0"], detailed=False)
    assert [gpu.uuid for gpu in watched.first(GpuInventory).gpus] == ["", uuid(0)]
    assert watched.current().samples == ({}, STEADY)
