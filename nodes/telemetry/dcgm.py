"""Machines whose dcgm-exporter is asked instead of an agent: pulled each ten seconds, and taken in as a post.

Less than an agent tells: a sample in ten seconds, nothing of the host, no process, and of Xids a gauge that holds the
last one, so that its change is all that can be told. An exporter's answer is a stranger's: bounded in bytes, time and
lines, and put through the same checks as an agent's post (`nodes.telemetry.wire`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import httpx
import msgspec
from django.conf import settings

from nodes.models import Agent, AgentStream, Gpu
from nodes.telemetry import intake, wire
from nodes.telemetry.exporters import exporters
from portal.http.posts import Malformed
from vigil_core import untrusted
from vigil_core.exposition import Sample, samples

logger = logging.getLogger(__name__)

PERIOD_S = 10
BUDGET_S = 8.0  # for all of them: the next turn comes after ten seconds
EACH_S = 5.0
AT_ONCE = 32
MOST_BYTES = 8 * 1024 * 1024
VERSION = "dcgm-exporter"
MIB = 1024 * 1024
XID, FREE = "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_FB_FREE"
USED = "DCGM_FI_DEV_FB_USED"
LAST_XID = "last_xid"  # among a GPU's counters


@dataclass(frozen=True)
class _Field:
    """Where a field of DCGM's goes, and times what; beyond `most` is how DCGM says that it knows no value."""

    column: str
    most: float
    factor: float = 1.0


_FIELDS = {
    "DCGM_FI_DEV_GPU_UTIL": _Field("gpu_percent", 100),
    "DCGM_FI_PROF_SM_ACTIVE": _Field("sm_percent", 1, 100),
    USED: _Field("memory_mib", 1e8),
    "DCGM_FI_DEV_GPU_TEMP": _Field("temperature_c", 250),
    "DCGM_FI_DEV_MEMORY_TEMP": _Field("memory_temperature_c", 250),
    "DCGM_FI_DEV_POWER_USAGE": _Field("watts", 1e5),
    "DCGM_FI_DEV_SM_CLOCK": _Field("sm_mhz", 1e5),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": _Field("throttle", 2**30),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": _Field("throttle", 2**30),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": _Field("nvlink_tx_mib", 1e13, 1 / MIB),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": _Field("nvlink_rx_mib", 1e13, 1 / MIB),
    "DCGM_FI_PROF_PCIE_TX_BYTES": _Field("pcie_tx_mib", 1e13, 1 / MIB),
    "DCGM_FI_PROF_PCIE_RX_BYTES": _Field("pcie_rx_mib", 1e13, 1 / MIB),
}
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,95}")
_DEVICE = re.compile(r"nvidia(\d{1,4})")
_failing: set[str] = set()  # by this process, so that the log tells of it once


@dataclass
class Told:
    """What an exporter says of one GPU."""

    index: int
    about: dict[str, Any]
    values: dict[str, int] = field(default_factory=dict)
    xid: int | None = None
    free_mib: int | None = None

    def facts(self) -> dict[str, Any]:
        """As an agent's facts have it; its memory is what is used and what is free."""
        used = self.values.get("memory_mib")
        return self.about | ({} if used is None or self.free_mib is None else {"memory_mib": used + self.free_mib})


def pull(budget_s: float = BUDGET_S) -> int:
    """Ask all exporters that the setting names, once; answers how many told something."""
    try:
        wanted = exporters(settings.VIGIL_DCGM_EXPORTERS)
    except ValueError as error:
        _note_failure("VIGIL_DCGM_EXPORTERS", error)
        return 0
    _failing.discard("VIGIL_DCGM_EXPORTERS")
    deadline = time.monotonic() + budget_s
    pool = ThreadPoolExecutor(min(AT_ONCE, len(wanted) or 1), "dcgm")
    done = 0
    try:
        asked = {pool.submit(fetch, url, deadline): node for node, url in wanted.items()}
        for answer in as_completed(asked, timeout=budget_s):
            done += _live_through(asked[answer], answer.result)
    except TimeoutError:
        late = [node for answer, node in asked.items() if not answer.done()]
        logger.warning("%d dcgm-exporters were not asked in time, %s first", len(late), late[0] if late else "none")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return done


def _live_through(node: str, answer: Callable[[], str]) -> bool:
    """One that fails keeps no other from being taken."""
    try:
        took = take(node, answer(), now=time.time())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, Malformed) as error:
        _note_failure(node, error)
        return False
    if node in _failing:
        _failing.discard(node)
        logger.info("%s: its dcgm-exporter tells again", node)
    return took


def _note_failure(node: str, error: Exception) -> None:
    if node not in _failing:
        _failing.add(node)
        logger.warning(
            "%s: its dcgm-exporter tells nothing: %s", node, untrusted.line(str(error)) or type(error).__name__
        )


def fetch(url: str, deadline: float) -> str:
    """The text at that address; no longer than `MOST_BYTES`, and read no later than until then (monotonic seconds)."""
    return asyncio.run(_until(min(deadline, time.monotonic() + EACH_S), url))


async def _until(deadline: float, url: str) -> str:
    # A client's own timeouts are of each read alone: heads that come letter by letter would keep a thread for days.
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await _fetch(url)
    except TimeoutError:
        raise ValueError("it does not come to an end") from None


async def _fetch(url: str) -> str:
    body = bytearray()
    # Packed it could be any size once it is opened; and where it sends us on to is nobody's whom a sysadmin has named.
    headers = {"Accept": "text/plain", "Accept-Encoding": "identity"}
    timeout = httpx.Timeout(EACH_S, connect=2.0)
    async with (
        httpx.AsyncClient(timeout=timeout, follow_redirects=False, trust_env=False) as http,
        http.stream("GET", url, headers=headers) as answer,
    ):
        if answer.status_code != 200 or answer.headers.get("Content-Encoding", "identity") != "identity":
            raise ValueError(f"it answers {answer.status_code} {answer.headers.get('Content-Encoding', '')}".strip())
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > MOST_BYTES:
                raise ValueError(f"it answers more than {MOST_BYTES // MIB} MiB")
    return body.decode(errors="replace")


def take(node: str, text: str, *, now: float) -> bool:
    """Take in what an exporter says of its GPUs; whether it said anything.

    A machine whose own agent reports is left to that.
    """
    told = gpus(samples(text))
    if not told:
        raise ValueError("it tells of no GPU")
    agent, _ = Agent.objects.defer("facts", "newest", "processes").get_or_create(node=node)
    stream = blake2b(f"dcgm {node}".encode(), digest_size=8).hexdigest()
    if agent.stream not in {"", stream} and not agent.is_silent():
        raise ValueError("an agent reports from this machine: take it out of VIGIL_DCGM_EXPORTERS")
    cursor = AgentStream.objects.filter(agent=agent, uid=stream).values_list("next_seq", flat=True).first() or 0
    body = {
        "version": 1,
        "stream": stream,
        "first": cursor,
        "boot_id": "",
        "sent_at": now,
        "agent": VERSION,
        "batches": [_batch(told, _events(agent, told, now), int(now))],
    }
    intake.take(agent.pk, wire.parse(msgspec.json.encode(body)), now=now)
    return True


def gpus(told: Iterable[Sample]) -> dict[str, Told]:
    """By UUID. What a slice of a GPU does (MIG) is not the GPU's, and left out."""
    found: dict[str, Told] = {}
    for one in told:
        uuid, index = one.labels.get("UUID", ""), untrusted.whole(one.labels.get("gpu"), 1024)
        if not one.name.startswith("DCGM_FI_") or not _UUID.fullmatch(uuid) or index is None:
            continue
        if "GPU_I_ID" in one.labels or (uuid not in found and len(found) >= wire.GPUS):
            continue
        gpu = found.setdefault(uuid, Told(index, _about(uuid, index, one.labels)))
        if one.name == FREE and 0 <= one.value <= _FIELDS[USED].most:
            gpu.free_mib = round(one.value)
        elif one.name == XID:
            gpu.xid = untrusted.count(int(one.value), 10_000) if 0 <= one.value < 10_000 else None
        elif (where := _FIELDS.get(one.name)) is not None and 0 <= one.value <= where.most:
            gpu.values[where.column] = round(one.value * where.factor)
    return found


def _about(uuid: str, index: int, labels: Mapping[str, str]) -> dict[str, Any]:
    """As an agent's facts name it."""
    device = _DEVICE.fullmatch(labels.get("device", ""))
    about = {"uuid": uuid, "index": index, "name": untrusted.line(labels.get("modelName"), 128)}
    about |= {"bus": untrusted.line(labels.get("pci_bus_id"), 32)}
    return about | ({"minor": int(device[1])} if device else {})


def _batch(told: Mapping[str, Told], events: Sequence[dict[str, Any]], at: int) -> dict[str, Any]:
    columns = {one.column for one in _FIELDS.values()}
    return {
        "at": at // PERIOD_S * PERIOD_S,
        "period": PERIOD_S,
        "n": 1,
        "gpus": list(told),
        "columns": {
            column: [[gpu.values.get(column)] for gpu in told.values()]
            for column in sorted(columns)
            if any(column in gpu.values for gpu in told.values())
        },
        "events": events,
    }


def _events(agent: Agent, told: Mapping[str, Told], now: float) -> list[dict[str, Any]]:
    """Facts where the GPUs are others than before, and Xids that the gauges show and did not at the last look."""
    rows = Gpu.objects.filter(agent=agent, gone_at=None).only("uuid", "index", "model", "counters")
    known = {gpu.uuid: gpu for gpu in rows}
    before = {uuid: (gpu.index, gpu.model) for uuid, gpu in known.items()}
    found: list[dict[str, Any]] = []
    if before != {uuid: (gpu.index, gpu.about["name"]) for uuid, gpu in told.items()}:
        about = {"agent": VERSION, "gpus": [gpu.facts() for gpu in told.values()]}
        found.append({"kind": "facts", "at": now, **about})
    for uuid, gpu in told.items():
        counters = known[uuid].counters if uuid in known else {}
        last = counters.get(LAST_XID)
        if gpu.xid is None or gpu.xid == last:
            continue
        found.append({"kind": "gpu.counters", "at": now, "gpu": uuid, **counters, LAST_XID: gpu.xid})
        if gpu.xid and last is not None:  # at the first look nobody can say when it was
            text = "The last Xid that dcgm-exporter knows of has changed: it tells neither its text nor others before."
            found.append({"kind": "xid", "at": now, "gpu": uuid, "xid": gpu.xid, "text": text})
    return found
