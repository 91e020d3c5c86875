"""Poll dcgm-exporters of machines without an agent every ten seconds, and take in the results like an agent's post.

They report less: a sample per ten seconds, nothing of the host, no processes, and only the last Xid as a gauge, so that
only its change is visible. Responses are untrusted: bounded in bytes, time and lines, and checked like an agent's post
(`nodes.telemetry.wire`).
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
BUDGET_S = 8.0  # for all of them: the next poll begins after ten seconds
EACH_S = 5.0
MAX_PARALLEL = 32
MAX_BYTES = 8 * 1024 * 1024
VERSION = "dcgm-exporter"
MIB = 1024 * 1024
XID, FREE = "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_FB_FREE"
USED = "DCGM_FI_DEV_FB_USED"
LAST_XID = "last_xid"  # in a GPU's counters


@dataclass(frozen=True)
class _FieldMapping:
    """The column and factor of a DCGM field; values above `maximum` are DCGM's markers for "unknown"."""

    column: str
    maximum: float
    factor: float = 1.0


_FIELDS = {
    "DCGM_FI_DEV_GPU_UTIL": _FieldMapping("gpu_percent", 100),
    "DCGM_FI_PROF_SM_ACTIVE": _FieldMapping("sm_percent", 1, 100),
    USED: _FieldMapping("memory_mib", 1e8),
    "DCGM_FI_DEV_GPU_TEMP": _FieldMapping("temperature_c", 250),
    "DCGM_FI_DEV_MEMORY_TEMP": _FieldMapping("memory_temperature_c", 250),
    "DCGM_FI_DEV_POWER_USAGE": _FieldMapping("watts", 1e5),
    "DCGM_FI_DEV_SM_CLOCK": _FieldMapping("sm_mhz", 1e5),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": _FieldMapping("throttle", 2**30),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": _FieldMapping("throttle", 2**30),
    "DCGM_FI_PROF_NVLINK_TX_BYTES": _FieldMapping("nvlink_tx_mib", 1e13, 1 / MIB),
    "DCGM_FI_PROF_NVLINK_RX_BYTES": _FieldMapping("nvlink_rx_mib", 1e13, 1 / MIB),
    "DCGM_FI_PROF_PCIE_TX_BYTES": _FieldMapping("pcie_tx_mib", 1e13, 1 / MIB),
    "DCGM_FI_PROF_PCIE_RX_BYTES": _FieldMapping("pcie_rx_mib", 1e13, 1 / MIB),
}
_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,95}")
_DEVICE = re.compile(r"nvidia(\d{1,4})")
_failing: set[str] = set()  # per process, so that each failure is logged once


@dataclass
class ExporterGpu:
    """An exporter's values of one GPU."""

    index: int
    identity: dict[str, Any]
    values: dict[str, int] = field(default_factory=dict)
    xid: int | None = None
    free_mib: int | None = None

    def facts(self) -> dict[str, Any]:
        """Return it in the form of an agent's facts; total memory is used plus free."""
        used = self.values.get("memory_mib")
        return self.identity | ({} if used is None or self.free_mib is None else {"memory_mib": used + self.free_mib})


def poll(budget_s: float = BUDGET_S) -> int:
    """Poll all configured exporters once; return how many reported."""
    try:
        wanted = exporters(settings.VIGIL_DCGM_EXPORTERS)
    except ValueError as error:
        _note_failure("VIGIL_DCGM_EXPORTERS", error)
        return 0
    _failing.discard("VIGIL_DCGM_EXPORTERS")
    deadline = time.monotonic() + budget_s
    pool = ThreadPoolExecutor(min(MAX_PARALLEL, len(wanted) or 1), "dcgm")
    done = 0
    try:
        requests = {pool.submit(fetch, url, deadline): node for node, url in wanted.items()}
        for request in as_completed(requests, timeout=budget_s):
            done += _take_safely(requests[request], request.result)
    except TimeoutError:
        late = [node for request, node in requests.items() if not request.done()]
        logger.warning("%d dcgm-exporters were not polled in time, %s first", len(late), late[0] if late else "none")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return done


def _take_safely(node: str, answer: Callable[[], str]) -> bool:
    """Take in one response; a failure must not affect the others."""
    try:
        took = take(node, answer(), now=time.time())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, Malformed) as error:
        _note_failure(node, error)
        return False
    if node in _failing:
        _failing.discard(node)
        logger.info("%s: its dcgm-exporter reports again", node)
    return took


def _note_failure(node: str, error: Exception) -> None:
    if node not in _failing:
        _failing.add(node)
        logger.warning(
            "%s: its dcgm-exporter does not report: %s", node, untrusted.line(str(error)) or type(error).__name__
        )


def fetch(url: str, deadline: float) -> str:
    """Return the text at a URL, at most MAX_BYTES long, read by the deadline (monotonic seconds)."""
    return asyncio.run(_until(min(deadline, time.monotonic() + EACH_S), url))


async def _until(deadline: float, url: str) -> str:
    # httpx's timeouts apply to each read: headers that trickle in could occupy a thread for days.
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await _fetch(url)
    except TimeoutError:
        raise ValueError("the response does not end") from None


async def _fetch(url: str) -> str:
    body = bytearray()
    # Compressed content could inflate to any size, and a redirect could lead to a host that no sysadmin configured.
    headers = {"Accept": "text/plain", "Accept-Encoding": "identity"}
    timeout = httpx.Timeout(EACH_S, connect=2.0)
    async with (
        httpx.AsyncClient(timeout=timeout, follow_redirects=False, trust_env=False) as http,
        http.stream("GET", url, headers=headers) as answer,
    ):
        if answer.status_code != 200 or answer.headers.get("Content-Encoding", "identity") != "identity":
            raise ValueError(f"HTTP {answer.status_code} {answer.headers.get('Content-Encoding', '')}".strip())
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > MAX_BYTES:
                raise ValueError(f"the response exceeds {MAX_BYTES // MIB} MiB")
    return body.decode(errors="replace")


def take(node: str, text: str, *, now: float) -> bool:
    """Take in an exporter's report; return whether there was one.

    Raises ValueError if the machine's own agent reports.
    """
    exporter_gpus = gpus(samples(text))
    if not exporter_gpus:
        raise ValueError("it lists no GPU")
    agent, _ = Agent.objects.defer("facts", "newest", "processes").get_or_create(node=node)
    stream = blake2b(f"dcgm {node}".encode(), digest_size=8).hexdigest()
    if agent.stream not in {"", stream} and not agent.is_silent():
        raise ValueError("an agent reports from this machine: remove it from VIGIL_DCGM_EXPORTERS")
    cursor = AgentStream.objects.filter(agent=agent, uid=stream).values_list("next_seq", flat=True).first() or 0
    body = {
        "version": 1,
        "stream": stream,
        "first": cursor,
        "boot_id": "",
        "sent_at": now,
        "agent": VERSION,
        "batches": [_batch(exporter_gpus, _events(agent, exporter_gpus, now), int(now))],
    }
    intake.take(agent.pk, wire.parse(msgspec.json.encode(body)), now=now)
    return True


def gpus(metrics: Iterable[Sample]) -> dict[str, ExporterGpu]:
    """Return GPUs by UUID. MIG slices are left out: their values are not the GPU's."""
    found: dict[str, ExporterGpu] = {}
    for metric in metrics:
        uuid, index = metric.labels.get("UUID", ""), untrusted.whole(metric.labels.get("gpu"), 1024)
        if not metric.name.startswith("DCGM_FI_") or not _UUID.fullmatch(uuid) or index is None:
            continue
        if "GPU_I_ID" in metric.labels or (uuid not in found and len(found) >= wire.GPUS):
            continue
        gpu = found.setdefault(uuid, ExporterGpu(index, _about(uuid, index, metric.labels)))
        if metric.name == FREE and 0 <= metric.value <= _FIELDS[USED].maximum:
            gpu.free_mib = round(metric.value)
        elif metric.name == XID:
            gpu.xid = untrusted.count(int(metric.value), 10_000) if 0 <= metric.value < 10_000 else None
        elif (mapping := _FIELDS.get(metric.name)) is not None and 0 <= metric.value <= mapping.maximum:
            gpu.values[mapping.column] = round(metric.value * mapping.factor)
    return found


def _about(uuid: str, index: int, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the GPU's identity as in an agent's facts."""
    device = _DEVICE.fullmatch(labels.get("device", ""))
    about = {"uuid": uuid, "index": index, "name": untrusted.line(labels.get("modelName"), 128)}
    about |= {"bus": untrusted.line(labels.get("pci_bus_id"), 32)}
    return about | ({"minor": int(device[1])} if device else {})


def _batch(exporter_gpus: Mapping[str, ExporterGpu], events: Sequence[dict[str, Any]], at: int) -> dict[str, Any]:
    columns = {mapping.column for mapping in _FIELDS.values()}
    return {
        "at": at // PERIOD_S * PERIOD_S,
        "period": PERIOD_S,
        "n": 1,
        "gpus": list(exporter_gpus),
        "columns": {
            column: [[gpu.values.get(column)] for gpu in exporter_gpus.values()]
            for column in sorted(columns)
            if any(column in gpu.values for gpu in exporter_gpus.values())
        },
        "events": events,
    }


def _events(agent: Agent, exporter_gpus: Mapping[str, ExporterGpu], now: float) -> list[dict[str, Any]]:
    """Return facts if the GPUs changed, and Xids that the gauges show since the last poll."""
    rows = Gpu.objects.filter(agent=agent, gone_at=None).only("uuid", "index", "model", "counters")
    rows_by_uuid = {gpu.uuid: gpu for gpu in rows}
    previous = {uuid: (gpu.index, gpu.model) for uuid, gpu in rows_by_uuid.items()}
    found: list[dict[str, Any]] = []
    if previous != {uuid: (gpu.index, gpu.identity["name"]) for uuid, gpu in exporter_gpus.items()}:
        about = {"agent": VERSION, "gpus": [gpu.facts() for gpu in exporter_gpus.values()]}
        found.append({"kind": "facts", "at": now, **about})
    for uuid, gpu in exporter_gpus.items():
        counters = rows_by_uuid[uuid].counters if uuid in rows_by_uuid else {}
        last = counters.get(LAST_XID)
        if gpu.xid is None or gpu.xid == last:
            continue
        found.append({"kind": "gpu.counters", "at": now, "gpu": uuid, **counters, LAST_XID: gpu.xid})
        if gpu.xid and last is not None:  # at the first poll its time is unknown
            text = "dcgm-exporter reports a new last Xid, without its text; earlier ones may be missing."
            found.append({"kind": "xid", "at": now, "gpu": uuid, "xid": gpu.xid, "text": text})
    return found
