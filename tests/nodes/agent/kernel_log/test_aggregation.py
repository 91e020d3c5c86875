"""Test turning Xids into events: equal ones are merged, also those of NVML and the kernel."""

from __future__ import annotations

from typing import Any

from nodes.agent.kernel_log.aggregation import MAX_EVENTS, XidAggregator
from nodes.agent.kernel_log.xids import DriverLogParser, XidRecord

UUIDS = {"0000:05:00": "GPU-5"}


def xids() -> XidAggregator:
    return XidAggregator("boot", lambda bus: UUIDS.get(bus, ""), 5.0)


def xid(number: int = 31, text: str = "fault @ 0x10", bus: str = "0000:05:00") -> XidRecord:
    return XidRecord("xid", number, bus, text, pid=7, name="python")


def hear(folded: XidAggregator, *some: XidRecord, now: float = 0.0, seq: int = 0) -> None:
    for place, item in enumerate(some):
        folded.add_kernel_record(item, seq=seq + place, at=1000.0 + now + place, now=now)


def test_an_xid_is_reported_with_all_its_facts() -> None:
    folded = xids()
    hear(folded, xid(), seq=4)
    assert folded.is_urgent
    assert folded.take(0.0) == [
        {
            "kind": "xid",
            "at": 1000.0,
            "gpu": "GPU-5",
            "bus": "0000:05:00",
            "xid": 31,
            "text": "fault @ 0x10",
            "source": "kernel",
            "boot_id": "boot",
            "seq": 4,
            "count": 1,
            "confirmed": False,
            "pid": 7,
            "name": "python",
        }
    ]
    assert folded.take(0.0) == []


def test_for_an_unknown_gpu_the_bus_address_is_reported() -> None:
    folded = xids()
    hear(folded, xid(bus="0000:77:00"))
    (event,) = folded.take(0.0)
    assert "gpu" not in event
    assert event["bus"] == "0000:77:00"


def test_a_million_a_minute_become_a_handful() -> None:
    """A bad node wrote 800,000 lines of Xid 95, of which 29 were distinct."""
    folded, driver, events, seq = xids(), DriverLogParser(), [], 0
    for window in range(6):
        for number in range(2_000):
            line = (
                f"NVRM: Xid (PCI:0000:05:00): 95, pid={number}, name=a, Uncontained: LTC {number % 29} (0x{number:x})."
            )
            report = driver.read(line, float(window))
            assert report is not None
            folded.add_kernel_record(report, seq=seq, at=float(seq), now=10.0 * window)
            seq += 1
        events += folded.take(10.0 * window)
        folded.begin_window()
    assert len(events) == 6
    assert sum(event["count"] for event in events) == seq
    assert (events[0]["seq"], events[0]["last_seq"]) == (0, 1999)
    assert (events[-1]["at"], events[-1]["last_at"]) == (10_000.0, 11_999.0)


def test_texts_without_end_are_bounded_and_counted() -> None:
    folded = xids()
    letters = [f"{first}{second}{third}" for first in "ghijklm" for second in "ghijklmnop" for third in "ghijklmnop"]
    hear(folded, *(xid(number, text) for number in range(100) for text in letters))
    events = folded.take(0.0)
    assert len(events) <= 2 * MAX_EVENTS + 1
    assert sum(event["count"] for event in events) == 100 * len(letters)


def test_a_repetition_within_a_window_is_no_news() -> None:
    folded = xids()
    hear(folded, xid(text="fault @ 0x10"))
    folded.take(0.0)
    hear(folded, xid(text="fault @ 0x2f"), now=1.0)
    assert not folded.is_urgent
    hear(folded, xid(text="another"), now=1.0)
    assert folded.is_urgent
    folded.take(1.0)
    folded.begin_window()
    hear(folded, xid(), now=2.0)
    assert folded.is_urgent


def confirmed(events: list[dict[str, Any]]) -> list[bool]:
    return [event["confirmed"] for event in events]


def test_nvml_confirms_before_the_event_is_sent() -> None:
    folded = xids()
    hear(folded, xid())
    folded.add_nvml_event("00000000:05:00.0", 31, at=1000.0, now=0.1)
    assert confirmed(folded.take(0.2)) == [True]


def test_nvml_confirms_though_it_comes_first() -> None:
    folded = xids()
    folded.add_nvml_event("00000000:05:00.0", 999, at=1000.0, now=0.0)
    hear(folded, xid(), now=3.0)
    assert confirmed(folded.take(3.0)) == [True]
    assert folded.take(10.0) == []


def test_nvml_confirms_an_event_that_was_sent_by_sending_it_again() -> None:
    folded = xids()
    hear(folded, xid(), seq=4)
    (first,) = folded.take(0.0)
    folded.add_nvml_event("00000000:05:00.0", 31, at=1000.0, now=4.0)
    assert folded.has_urgent(4.0)
    assert folded.take(4.0) == [{**first, "confirmed": True}]
    folded.add_nvml_event("00000000:05:00.0", 31, at=1000.0, now=4.1)
    assert folded.take(4.2) == []


def test_another_gpus_or_numbers_word_confirms_nothing() -> None:
    folded = xids()
    hear(folded, xid())
    folded.add_nvml_event("00000000:06:00.0", 31, at=1000.0, now=0.0)
    folded.add_nvml_event("00000000:05:00.0", 13, at=1000.0, now=0.0)
    folded.add_nvml_event("00000000:05:00.0", 31, at=1006.0, now=6.0)
    assert confirmed(folded.take(0.0)) == [False]


def test_what_only_nvml_reports_is_sent_after_a_while() -> None:
    folded = xids()
    for _ in range(3):
        folded.add_nvml_event("00000000:05:00.0", 48, at=1000.0, now=0.0)
    assert not folded.has_urgent(4.9)
    assert folded.take(4.9) == []
    assert folded.has_urgent(5.0)
    (event,) = folded.take(5.0)
    assert (event["xid"], event["source"], event["confirmed"], event["count"]) == (48, "nvml", False, 3)
    assert "seq" not in event
    assert not folded.has_urgent(6.0)


def test_without_a_kernel_log_it_waits_for_none() -> None:
    folded = xids()
    folded.add_nvml_event("00000000:05:00.0", 48, at=1000.0, now=0.0)
    assert folded.has_urgent(0.0, is_kernel_log_read=False)
    assert len(folded.take(0.0, is_kernel_log_read=False)) == 1


def test_they_come_in_the_order_of_their_last_records() -> None:
    """A reader that counts by the last record would otherwise take the second for one that it has."""
    folded = xids()
    hear(folded, xid(31, "a"), xid(13, "b"), xid(31, "a"), seq=4)
    assert [(event["xid"], event.get("last_seq", event["seq"])) for event in folded.take(0.0)] == [(13, 5), (31, 6)]
