"""Test series as Parquet, read back by pyarrow: the same rows as CSV, whatever the values, and who may read them."""

from __future__ import annotations

import io
import math
import sys
import time
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jobs.api.runs import series
from portal.http import parquet
from portal.models import User
from tests.jobs.reporting import Spooled, attempt_of, frame, job_of, send
from tests.jobs.waste.idling import allocated_job
from tests.lab import bearer, person, sysadmin
from tests.nodes.telemetry.reporting import UUIDS, Machine

pytestmark = pytest.mark.django_db


def read(user: User, address: str) -> Any:
    answer = bearer(user, "read").get(address)
    assert answer.status_code == 200, answer.content
    assert answer.headers["Content-Type"] == "application/vnd.apache.parquet"
    return pyarrow.parquet.read_table(io.BytesIO(b"".join(answer.streaming_content)))


def lines(user: User, address: str) -> list[str]:
    answer = bearer(user, "read").get(address)
    return b"".join(answer.streaming_content).decode().splitlines()


@pytest.fixture
def sam() -> User:
    return sysadmin()


class TestOfAJob:
    def test_every_point_over_attempts(self, sam: User) -> None:
        job = job_of()
        for number, values in ((1, (2.5, math.nan, math.inf)), (2, (-math.inf, 0.1, 1e300))):
            attempt = attempt_of(job, number=number)
            spooled = Spooled()
            for step, value in enumerate(values, 3 * number):
                spooled.log(step, time=1_000.0 + step, loss=value)
            assert send(attempt, frame(spooled)).status_code == 200
        table = read(sam, f"/api/v1/jobs/{job.pk}/series.parquet?name=loss")
        assert table.column_names == ["attempt", "incarnation", "rank", "step", "time", "value"]
        assert table["attempt"].to_pylist() == [1, 1, 1, 2, 2, 2]
        assert table["step"].to_pylist() == [3, 4, 5, 6, 7, 8]
        assert table["time"].to_pylist() == [1003.0, 1004.0, 1005.0, 1006.0, 1007.0, 1008.0]
        np.testing.assert_array_equal(table["value"], [2.5, math.nan, math.inf, -math.inf, 0.1, 1e300])
        csv = lines(sam, f"/api/v1/jobs/{job.pk}/series.csv?name=loss")
        assert [line.split(",")[:5] for line in csv[1:]] == [
            [str(row[name]) for name in table.column_names[:5]] for row in table.to_pylist()
        ]

    def test_a_long_table_comes_in_row_groups(self, sam: User, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parquet, "ROWS", 4)
        monkeypatch.setattr(series, "CSV_ROWS", 2)
        attempt = attempt_of()
        spooled = Spooled()
        for step in range(11):
            spooled.log(step, loss=float(step))
        send(attempt, frame(spooled))
        answer = bearer(sam, "read").get(f"/api/v1/jobs/{attempt.job_id}/series.parquet")
        pieces = list(answer.streaming_content)
        file = pyarrow.parquet.ParquetFile(io.BytesIO(b"".join(pieces)))
        assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4, 4, 3]
        assert len(pieces) == 3, "written as it is read"
        assert file.read()["value"].to_pylist() == [float(step) for step in range(11)]

    def test_nothing_is_a_whole_file_too(self, sam: User) -> None:
        table = read(sam, f"/api/v1/jobs/{attempt_of().job_id}/series.parquet?name=none")
        assert (len(table), len(table.column_names)) == (0, 6)

    def test_only_who_sees_the_job(self) -> None:
        address = f"/api/v1/jobs/{attempt_of().job_id}/series.parquet"
        assert bearer(person("ann"), "read").get(address).status_code == 404
        assert bearer(person("bea"), "read").get(f"{address}?from=9&to=1").status_code == 404
        assert bearer(sysadmin(), "read").get(f"{address}?from=9&to=1").status_code == 422


class TestOfAMachine:
    @pytest.fixture
    def now(self) -> int:
        now = int(time.time())
        machine = Machine(gpus=UUIDS[:2])
        machine.post(machine.facts(now - 100))
        rows = [[10] * 10, [None] * 9 + [20]]
        machine.post(machine.batch(now - 60, gpu_percent=rows, watts=300, host={"cpu_percent": 12.5}))
        return now

    def test_every_sample(self, sam: User, now: int) -> None:
        query = "name=gpu_percent&name=cpu_percent"
        table = read(sam, f"/api/v1/nodes/dgx-01/series.parquet?{query}")
        rows = table.to_pylist()
        assert rows[0] == {"node": "dgx-01", "gpu": 0, "name": "gpu_percent", "time": now - 60, "value": 10.0}
        assert rows[10] == {"node": "dgx-01", "gpu": 1, "name": "gpu_percent", "time": now - 51, "value": 20.0}
        assert rows[11] == {"node": "dgx-01", "gpu": None, "name": "cpu_percent", "time": now - 60, "value": 12.5}
        assert len(rows) == 12
        csv = lines(sam, f"/api/v1/nodes/dgx-01/series.csv?{query}")
        assert csv[0] == "node,gpu,name,time,value"
        assert csv[12] == f"dgx-01,,cpu_percent,{now - 60},12.5"
        assert len(csv) == 13

    def test_what_is_hidden_stays_hidden(self, now: int, settings: Any) -> None:
        settings.VIGIL_QUEUE_VISIBLE = "own"
        allocated_job("7", [0], user="mira")
        ann = person("ann", slurm_user="ann")
        table = read(ann, "/api/v1/nodes/dgx-01/series.parquet?name=gpu_percent")
        assert set(table["gpu"].to_pylist()) == {1}
        mira = person("mira", slurm_user="mira")
        assert set(read(mira, "/api/v1/nodes/dgx-01/series.parquet")["gpu"].to_pylist()) == {0, 1}

    def test_what_is_not_there(self, sam: User, now: int) -> None:
        request = bearer(sam, "read")
        assert request.get("/api/v1/nodes/dgx-02/series.parquet").status_code == 404
        answer = request.get("/api/v1/nodes/dgx-01/series.parquet?gpu=7")
        assert answer.status_code == 422
        assert "It has 0, 1." in answer.json()["detail"]


@pytest.mark.parametrize("address", ["jobs/{job}/series", "nodes/dgx-01/series"])
def test_a_portal_without_pyarrow_names_what_to_install(
    sam: User, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    attempt = attempt_of()
    Machine().post()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    there = f"/api/v1/{address.format(job=attempt.job_id)}"
    answer = bearer(sam, "read").get(f"{there}.parquet")
    assert answer.status_code == 501
    assert answer.json()["type"] == "urn:vigil:problem:no-parquet"
    assert "pip install 'vigil[parquet]'" in answer.json()["detail"]
    assert bearer(sam, "read").get(f"{there}.csv").status_code == 200
