"""Measure the submission of one attempt to a real Slurm, compared to the bare POST of the same body.

    python -m bench.submit_slurm [--release 24.11]

In turns, over one connection: `hand_over` of an attempt whose run directory is there already (as in every restart), and
a plain request with the body that it would send. What Vigil adds is the claim of the row, the files of the run
directory, the request's making, the id written down and the token. Bar: ≤ 50 ms more at the median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench import NOT_MEASURED, stage

TIMES = 60
WARM = 5
BAR_MS = 50.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.submit_slurm")
    parser.add_argument("--release", default="24.11", choices=["22.05", "24.11"])
    options = parser.parse_args()
    if not stage.has_slurm(options.release):
        return NOT_MEASURED
    print(stage.machine())
    with stage.site() as place, ExitStack() as stack:
        from tests.slurm.cluster import cluster

        runs = stack.enter_context(tempfile.TemporaryDirectory(prefix="vigil-runs-"))
        os.environ["VIGIL_RUNS"] = runs
        Path(runs).chmod(0o2711)
        stage.django(place)
        slurm = stack.enter_context(cluster(options.release))
        return _measure(slurm, options.release)


def _measure(slurm: Any, release: str) -> int:
    from jobs.disk.prepare import prepare, submission
    from jobs.following.submission.handover import hand_over
    from jobs.models import Attempt
    from nodes.schedulers.slurm.http import SlurmHttp
    from nodes.schedulers.slurm.request import request
    from nodes.schedulers.slurm.rest import SlurmRest
    from nodes.schedulers.slurm.scheduler import Slurm
    from nodes.schedulers.slurm.tokens import KeyFileTokens
    from tests.slurm.people import PORTAL

    tokens = KeyFileTokens(slurm.layout.jwt_key)
    http = SlurmHttp(slurm.url, tokens=tokens, user=PORTAL)
    rest = SlurmRest(http)
    scheduler = Slurm(rest, tokens=tokens, user=PORTAL)
    ours, bare = [], []
    for attempt in _attempts(WARM + TIMES):
        prepare(attempt)
        submitted = submission(attempt, prepare(attempt))
        body = request(submitted, Path(submitted.script).read_text(), rest.version)
        began = time.perf_counter()
        answer = http.post("job/submit", partial(_as_it_is, body), user=PORTAL)
        bare.append(time.perf_counter() - began)
        scheduler.cancel(str(answer["job_id"]), user=PORTAL)
        began = time.perf_counter()
        hand_over(attempt.pk, scheduler)
        ours.append(time.perf_counter() - began)
        taken = Attempt.objects.get(pk=attempt.pk)
        if not taken.scheduler_id:
            raise SystemExit(f"it was not taken: {taken.reason}")
        scheduler.cancel(taken.scheduler_id, user=PORTAL)
    ours, bare = ours[WARM:], bare[WARM:]
    for label, seconds in (("hand_over", ours), ("the bare POST", bare)):
        p50, p95 = statistics.median(seconds) * 1e3, stage.percentile(seconds, 0.95) * 1e3
        print(f"  {label:14} median {p50:6.1f} ms, p95 {p95:6.1f} ms")
    more = (statistics.median(ours) - statistics.median(bare)) * 1e3
    ratio = statistics.median(ours) / statistics.median(bare)
    print(f"  Slurm {release}: ratio {ratio:.2f}")
    bars = {"overhead": stage.bar("more than the bare POST, median", more, BAR_MS, at_least=False, unit=" ms")}
    return stage.result("submit_slurm", bars=bars, release=release, ratio=ratio, overhead_ms=more)


def _as_it_is(body: dict[str, Any], version: object) -> object:
    return body


def _attempts(count: int) -> list[Any]:
    """Create attempts of as many jobs that are due; the jobs would start in a year."""
    from jobs.models import Attempt, Job
    from jobs.spec import JobSpec
    from portal.models import Project, User
    from tests.slurm.people import PORTAL

    owner = User.objects.create(username="sam", is_superuser=True, slurm_user=PORTAL)
    project = Project.objects.create(slug="vision", slurm_account="vision")
    begin = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 300 * 86_400))
    table = {"name": "due", "project": "vision", "resources": {"begin": begin}}
    spec = JobSpec.parse(table).model_dump(mode="json")
    found = []
    for number in range(count):
        job = Job.objects.create(
            project=project, owner=owner, kind="distributed", spec=spec, spec_toml="", name=f"due-{number}"
        )
        attempt = Attempt.objects.create(job=job, number=1, scheduler_user=PORTAL)
        Job.objects.filter(pk=job.pk).update(latest=attempt)
        found.append(attempt)
    return found


if __name__ == "__main__":
    sys.exit(main())
