"""Test the driver's messages in the kernel log, with real lines, and with lines that others have forged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpus.pci import normalised
from nodes.agent.kernel_log.reader import KernelRecord
from nodes.agent.kernel_log.xids import MAX_TEXT, DriverLogParser, XidRecord, may_contain_xid

REAL = [
    (
        "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        {"number": 79, "bus": "0000:05:00", "pid": None, "name": "", "text": "GPU has fallen off the bus."},
    ),
    (
        "NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.",
        {"number": 79, "bus": "0000:29:00", "text": "GPU 0000:29:00.0: GPU has fallen off the bus."},
    ),
    (
        r"NVRM: The NVIDIA GPU 0000:b3:00.0\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has\x0aNVRM: fallen"
        " off the bus and is not responding to commands.",
        {"number": 79, "bus": "0000:b3:00"},
    ),
    ("NVRM: Xid (0000:03:00): 14, Channel 00000001", {"number": 14, "bus": "0000:03:00", "text": "Channel 00000001"}),
    (
        "NVRM: Xid (PCI:0000:00:06): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS"
        " GPC2 GPCCLIENT_T1_7 faulted @ 0x2b57_b3000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
        {"number": 31, "bus": "0000:00:06", "pid": 79749, "name": "exe"},
    ),
    (
        "NVRM: Xid (PCI:0000:38:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 9, TPC 1,"
        " SM 1): Out Of Range Address",
        {
            "number": 13,
            "bus": "0000:38:00",
            "text": "Graphics SM Warp Exception on (GPC 9, TPC 1, SM 1): Out Of Range Address",
        },
    ),
    (
        "NVRM: Xid (PCI:0000:38:00): 43, pid=2924364, name=pt_main_thread, Ch 00000008",
        {"number": 43, "pid": 2924364, "name": "pt_main_thread", "text": "Ch 00000008"},
    ),
    (
        "NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149",
        {"number": 45, "bus": "0000:dc:00", "text": "Ch 00000001 caused by previous Xid 149"},
    ),
    (
        "NVRM: Xid (PCI:0000:52:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row (0x0000000018f31d80)"
        " marked for remapping, reset gpu to activate.",
        {"number": 63},
    ),
    (
        "NVRM: Xid (PCI:0000:52:00): 94, pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No, D-RST: No",
        {"number": 94, "text": "Contained: SM (0x1). RST: No, D-RST: No"},
    ),
    (
        "NVRM: Xid (PCI:0003:00:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 14(0x0,"
        " 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
        {"number": 74, "bus": "0003:00:00"},
    ),
    (
        "NVRM: Xid (PCI:0000:cb:00): 109, pid=1797828, name=pt_main_thread, Ch 00000008, errorString CTX SWITCH"
        " TIMEOUT, Info 0x58005",
        {"number": 109, "text": "Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x58005"},
    ),
    (
        "NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, Timeout after 6s of waiting for RPC response"
        " from GPU4 GSP! Expected function 10 (FREE) (0xa55a0210 0x0).",
        {"number": 119, "name": "nvidia-smi"},
    ),
    (
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001"
        " 0x00000000 0x00100000 0x00000004)",
        {"number": 145, "bus": "0018:01:00", "pid": None, "name": ""},
    ),
    (
        "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
        {"number": 154, "text": "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"},
    ),
    (
        "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        {"kind": "sxid", "number": 20034, "bus": "0000:a9:00", "switch": 0, "is_fatal": True},
    ),
    (
        "nvidia-nvswitch3: SXid (PCI:0000:c4:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
        {"kind": "sxid", "number": 12028, "switch": 3, "is_fatal": False},
    ),
    (
        "nvidia: probe of 0000:b3:00.0 failed with error -1",
        {"number": 79, "bus": "0000:b3:00", "is_implied": True},
    ),
    (
        "nvidia 0000:b3:00.0: probe with driver nvidia failed with error -1",
        {"number": 79, "bus": "0000:b3:00", "is_implied": True},
    ),
    ("NVRM: The NVIDIA probe routine failed for 1 device(s).", {"number": 79, "bus": "", "is_implied": True}),
    # Names that hold whatever programs are called.
    ("NVRM: Xid (PCI:0000:10:1c): 43, pid=7, name=nvc:[driver], Ch 8", {"bus": "0000:10:1c", "name": "nvc:[driver]"}),
    ("NVRM: Xid (PCI:0000:38:00): 43, pid=7, name=KMS thread, Ch 8", {"name": "KMS thread", "text": "Ch 8"}),
    ("NVRM: Xid (PCI:0000:38:00 GPU-I:05): 94, pid=7, name=a, Contained", {"number": 94, "bus": "0000:38:00"}),
    ("NVRM: Xid (PCI:0000:38:00): 43, Ch 00000008", {"number": 43, "pid": None, "name": "", "text": "Ch 00000008"}),
    ("NVRM: Xid (PCI:0000:38:00): 43", {"number": 43, "text": ""}),
]


def read(text: str, at: float = 0.0) -> XidRecord | None:
    return DriverLogParser().read(KernelRecord(1, at, text.encode()).text, at)


@pytest.mark.parametrize(("line", "expected"), REAL, ids=[line[:60] for line, _ in REAL])
def test_real_lines(line: str, expected: dict[str, Any]) -> None:
    assert may_contain_xid(line.encode())
    xid = read(line)
    assert xid is not None
    assert {name: getattr(xid, name) for name in expected} == expected


@pytest.mark.parametrize(
    "line",
    [
        "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
        "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Data {0x50610002, 0x10100030, 0x00000000}",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.86.15",
        "usb 1-1: Product: NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (nowhere): 79",
        "NVRM: The NVIDIA probe routine was not called for 1 device(s).",
        "usb 1-1: probe of nvidia failed with error -1",
        "NVRM: Xid (PCI:0000:05:00): seventy-nine",
        "NVRM: GPU at PCI:0000:05:00: GPU-1ebc3ad1-1d4c-4d5a-8b0c-1f1d8f6bd9d0",
    ],
)
def test_lines_without_an_xid(line: str) -> None:
    assert read(line) is None


def test_a_sentence_in_three_records_names_the_gpu_of_the_first() -> None:
    driver = DriverLogParser()
    pieces = [
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]
    reports = [driver.read(piece, 1.0) for piece in pieces]
    assert reports[:2] == [None, None]
    assert reports[2] is not None
    assert (reports[2].number, reports[2].bus) == (79, "0000:b3:00")


def test_its_end_alone_names_none() -> None:
    xid = read("NVRM: fallen off the bus and is not responding to commands.")
    assert xid is not None
    assert (xid.number, xid.bus) == (79, "")


XID_79 = "NVRM: Xid (PCI:0000:29:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
SENTENCE = "NVRM: GPU 0000:29:00.0: GPU has fallen off the bus."


@pytest.mark.parametrize("lines", [[XID_79, SENTENCE], [SENTENCE, XID_79], [SENTENCE, SENTENCE, XID_79]])
def test_a_gpu_off_the_bus_is_reported_once_by_sentence_and_xid(lines: list[str]) -> None:
    driver = DriverLogParser()
    assert len([line for line in lines if driver.read(line, 100.0)]) == 1


BOOT_WITHOUT_A_GPU = (
    "NVRM: The NVIDIA GPU 0000:b3:00.0",
    "NVRM: (PCI ID: 10de:26b5) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
    "nvidia: probe of 0000:b3:00.0 failed with error -1",
    "NVRM: The NVIDIA probe routine failed for 1 device(s).",
)


@pytest.mark.parametrize("first", range(5))
def test_a_gpu_that_does_not_start_is_reported_once(first: int) -> None:
    """However much of what the kernel writes at a boot is left in its log."""
    driver = DriverLogParser()
    found = [xid for line in BOOT_WITHOUT_A_GPU[first:] if (xid := driver.read(line, 3.0))]
    assert [xid.number for xid in found] == [79]


def test_two_gpus_that_do_not_start_are_two() -> None:
    driver = DriverLogParser()
    lines = [f"nvidia: probe of 0000:{bus}:00.0 failed with error -1" for bus in ("05", "b3")]
    lines.append("NVRM: The NVIDIA probe routine failed for 2 device(s).")
    assert [xid.bus for line in lines if (xid := driver.read(line, 3.0))] == ["0000:05:00", "0000:b3:00"]


def test_a_gpu_that_the_driver_does_not_support_is_not_lost() -> None:
    driver = DriverLogParser()
    lines = (
        "NVRM: The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:0df8)",
        "NVRM: installed in this system is not supported by the",
        "NVRM: NVIDIA 570.86.15 driver release.",
        "nvidia: probe of 0000:b3:00.0 failed with error -1",
        "NVRM: The NVIDIA probe routine failed for 1 device(s).",
    )
    assert [driver.read(line, 3.0) for line in lines] == [None] * 5


def test_a_fall_much_later_is_another() -> None:
    driver = DriverLogParser()
    assert driver.read(XID_79, 100.0)
    assert driver.read(SENTENCE, 106.0)
    assert [bool(driver.read(XID_79, 200.0 + second)) for second in range(3)] == [True] * 3


@pytest.mark.parametrize(
    ("bus", "expected"),
    [
        ("00000000:05:00.0", "0000:05:00"),
        ("0000:B3:00", "0000:b3:00"),
        ("03:1c", "0000:03:1c"),
        ("10000:01:00.0", "10000:01:00"),
        ("", ""),
        ("nowhere", ""),
        ("1:2:3:4", ""),
    ],
)
def test_places_on_the_bus(bus: str, expected: str) -> None:
    assert normalised(bus) == expected


@given(text=st.text(max_size=3000), at=st.floats(0, 1e9))
def test_whatever_follows_is_bounded_and_a_single_printable_line(text: str, at: float) -> None:
    for head in ("NVRM: Xid (PCI:0000:05:00): 31, ", "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 1, ", "NVRM: ", ""):
        xid = DriverLogParser().read(head + text, at)
        if xid is not None:
            assert len(xid.text) <= MAX_TEXT
            assert xid.text.isprintable()
            assert xid.name.isprintable()
            assert len(xid.name) <= 64


@given(line=st.sampled_from([line for line, _ in REAL]), data=st.data())
def test_damaged_lines_raise_nothing(line: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(line)))
    put = data.draw(st.text(max_size=8))
    DriverLogParser().read(line[:place] + put + line[place + data.draw(st.integers(0, 8)) :], 0.0)
