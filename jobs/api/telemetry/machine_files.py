"""REST: every sample of a node's curves as a CSV or Parquet file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from django.http import StreamingHttpResponse
from ninja import Query
from numpy.typing import NDArray

from jobs.api.telemetry.machines import NO_AGENT, MachineSeriesQuery, agent_of, chosen, span
from jobs.listing.telemetry_access import TelemetryAccess, access_of
from nodes.api import agents
from nodes.models import Agent, Gpu
from nodes.telemetry import read
from nodes.telemetry.fields import GPU_FIELDS, gpu_owner, host_owner
from nodes.telemetry.intake import AHEAD_S
from nodes.telemetry.thin import RETENTION_S, TENS
from portal.http import csv_file, parquet
from portal.http.api import ApiRequest, stream
from portal.http.download import as_download
from portal.http.openapi import described
from portal.models import User
from vigil_core import csv_text

router = agents.machines  # shared with a machine's other addresses
POINTS = 200_000  # part of one curve read at a time
COLUMNS: dict[str, parquet.Kind] = {
    "node": "text", "gpu": "whole", "name": "text", "time": "whole", "value": "number"
}  # fmt: skip


@router.get(
    "/{str:name}/series.csv",
    summary="Every sample of some curves as CSV",
    openapi_extra=described(csv_file.description(tuple(COLUMNS)), errors=NO_AGENT),
)
def csv(request: ApiRequest, name: str, query: Query[MachineSeriesQuery]) -> StreamingHttpResponse:
    """Download every sample; those already merged into minutes are their means. `points` is ignored."""
    lines = _lines(_pieces(request.auth, agent_of(name), query))
    return csv_file.csv_stream(request, "telemetry.csv", tuple(COLUMNS), lines)


@router.get(
    "/{str:name}/series.parquet",
    summary="Every sample of some curves as Parquet",
    openapi_extra=parquet.openapi(COLUMNS, NO_AGENT),
)
def as_parquet(request: ApiRequest, name: str, query: Query[MachineSeriesQuery]) -> StreamingHttpResponse:
    """Download the same as series.csv. `gpu` is null if a curve belongs to the node; `time` is in Unix seconds."""
    rows = (piece.columns() for piece in _pieces(request.auth, agent_of(name), query))
    return as_download(stream(request, parquet.pieces(COLUMNS, rows), parquet.MEDIA_TYPE), "telemetry.parquet")


@dataclass(frozen=True)
class _MachineSamples:
    """Neighbouring samples of one curve; NaN where none is finite."""

    node: str
    gpu: int | None
    name: str
    time: NDArray[np.int64]
    value: NDArray[np.float64]

    def columns(self) -> dict[str, parquet.Column]:
        return {"node": self.node, "gpu": self.gpu, "name": self.name, "time": self.time, "value": self.value}


def _pieces(user: User, agent: Agent, query: MachineSeriesQuery) -> Iterator[_MachineSamples]:
    """Check the request now and read the samples later. Raises Problem."""
    (start, end), gpus = span(query), chosen(agent, query.gpu)
    now = int(time.time())  # otherwise times without data would be searched piece by piece
    start, end = max(start, now - RETENTION_S - TENS.block_s), min(end, now + int(AHEAD_S))
    access = access_of(user, [gpu.pk for gpu in gpus], start, end + TENS.seconds)
    return _read(agent, gpus, query.name, start, end, access)


def _read(
    agent: Agent, gpus: list[Gpu], names: list[str], start: int, end: int, access: TelemetryAccess
) -> Iterator[_MachineSamples]:
    """Yield the points a few days at a time, so that no response is held in memory."""
    for name in dict.fromkeys(names):
        owners: list[Gpu | None] = [*gpus] if name in GPU_FIELDS else [None]
        for gpu in owners:
            owner = gpu_owner(gpu.pk) if gpu else host_owner(agent.pk)
            for at in range(start, end + 1, POINTS):
                until = min(end, at + POINTS - 1)
                outline = read.curves(agent, [(owner, name)], start=at, end=until, points=None)[owner, name].outline
                outline = access.outline(gpu.pk, outline) if gpu else outline
                values = np.where(outline.n == 1, outline.min, outline.mean())
                yield _MachineSamples(agent.node, gpu.index if gpu else None, name, outline.first, values)


def _lines(pieces: Iterator[_MachineSamples]) -> Iterator[str]:
    for piece in pieces:
        head = csv_text.write([[piece.node, piece.gpu, piece.name, ""]]).removesuffix("\n")
        pairs = zip(piece.time.tolist(), piece.value.tolist(), strict=True)
        yield "".join(f"{head}{step},{value:g}\n" for step, value in pairs)
