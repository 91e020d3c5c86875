"""Record what real slurmrestds answer, for the tests in this folder: every REST version of all releases.

    python -m tests.nodes.slurm.record [22.05 24.11 26.05]      as root, some three minutes each; writes recorded/

Each file is one answer: {"status", "type", "body"}, in recorded/<version>/<moment>/<path>.json. Jobs are identified by
their names. No request is stored, and so no token; the name of the machine is replaced by "head".
"""

from __future__ import annotations

import hmac
import json
import shutil
import socket
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from nodes.schedulers.base import Submission
from nodes.schedulers.slurm.request import request
from nodes.schedulers.slurm.versions import OLDEST
from tests.slurm import release as releases
from tests.slurm.cluster import Cluster, cluster
from tests.slurm.config import failing_prolog
from tests.slurm.people import ALICE, BOB, PORTAL

FOLDER = Path(__file__).parent / "recorded"
KEY = "00c0ffee00c0ffee"
SLEEP = "#!/bin/sh\nsleep 900\n"
STUBBORN = "#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 1; done\n"
# Requests that are valid at any moment; {name} is replaced by the id of the job of that name.
BUSY = (
    "slurm/jobs", "slurm/jobs/state", "slurm/job/{gpus}", "slurm/job/{array}", "slurm/job/{finished-array}",
    "slurm/nodes", "slurm/partitions", "slurm/reservations", "slurm/licenses", "slurm/shares", "slurm/diag",
    "slurm/ping", "slurmdb/qos", "slurmdb/associations", "slurmdb/job/{requeued}",
)  # fmt: skip
ENDED = ("slurm/jobs", "slurm/jobs/state", "slurmdb/jobs", "slurmdb/job/{requeued}", "slurmdb/job/{steps}")
OLD, NEWEST = "v0.0.38", "v0.0.45"
FIRST = {"22.05": "v0.0.38", "24.11": "v0.0.40", "26.05": "v0.0.43"}  # that is recorded of each: versions overlap
WHOLE = {OLD, "v0.0.42", NEWEST}
FOR_SOME = {  # of WHOLE alone: they are long, and the same in between
    *ENDED, "slurm/diag", "slurm/ping", "slurm/shares", "slurm/reservations", "slurm/job/{gpus}", "slurm/job/{array}",
    "slurm/job/{finished-array}", "slurmdb/qos", "slurmdb/associations",
} - {"slurm/jobs", "slurm/jobs/state"}  # fmt: skip


class Recorder:
    """Records what one cluster answers, in every version that it serves."""

    def __init__(self, slurm: Cluster) -> None:
        self.slurm, self.ids = slurm, dict[str, str]()
        self.client = httpx.Client(base_url=slurm.url, trust_env=False, timeout=30)
        self.document = self.client.get("/openapi/v3", headers=self.who()).json()
        served = {path.split("/")[2] for path in self.document["paths"] if path.startswith("/slurm/v")}
        first = FIRST[slurm.release.name]
        self.versions = sorted(version for version in served if _number(version) >= max(_number(first), OLDEST))
        for version in self.versions:
            shutil.rmtree(FOLDER / version, ignore_errors=True)
            self.write(version, "openapi", 200, "application/json", {"paths": _paths_of(self.document)})

    def who(self, token: str = "") -> dict[str, str]:
        return {"X-SLURM-USER-NAME": PORTAL, "X-SLURM-USER-TOKEN": token or self.slurm.token(PORTAL)}

    def write(self, version: str, name: str, status: int, kind: str, body: Any) -> None:
        path = FOLDER / version / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _lines({"status": status, "type": kind, "body": body})
        assert "eyJ" not in text, f"{path} would hold a token"
        path.write_text(text.replace(socket.gethostname(), "head").replace(str(self.slurm.layout.folder), "/slurm"))

    def send(
        self, moment: str, path: str, *, name: str = "", method: str = "GET", token: str = "", query: str = "",
        body: Callable[[tuple[int, int, int]], object] | None = None, headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Send one request to every version that has this path."""
        service, _, rest = path.partition("/")
        filled = rest.format(**self.ids)
        for version in self.versions:
            is_between = version not in WHOLE
            if is_between and (moment == "ended" or path in FOR_SOME):
                continue
            if method == "GET" and f"/{service}/{version}/{_template(rest, service)}" not in _plain(self.document):
                continue
            answer = self.client.request(
                method, f"/{service}/{version}/{filled}{query}", headers=headers or self.who(token),
                json=body(_number(version)) if body else None,
            )  # fmt: skip
            kind = answer.headers.get("content-type", "")
            report = answer.json() if "json" in kind else answer.text
            plain = (name or path).replace("/", "-").replace("{", "").replace("}", "")
            self.write(version, f"{moment}/{plain}", answer.status_code, kind, report)

    def batch(self, name: str, *options: str, script: str = SLEEP, user: str = ALICE) -> str:
        words = ("sbatch", "--parsable", f"--job-name={name}", f"--comment=vigil:{KEY}", "--output=/dev/null")
        self.ids[name] = self.slurm.run(*words, *options, stdin=script, user=user).strip()
        return self.ids[name]

    def wait(self, name: str, *states: str) -> None:
        def is_there() -> bool:
            line = self.slurm.run("squeue", "-h", "-t", "all", "-j", self.ids[name], "-o", "%T").split()
            return set(line) <= set(states)

        self.slurm.wait_for(is_there, f"{name} to be {states}")

    def control(self, *words: str) -> None:
        self.slurm.run("scontrol", *words)


def record(name: str) -> None:
    with cluster(name, nodes=8, min_job_age_s=900, slices=7) as slurm:
        recorder = Recorder(slurm)
        _nothing(recorder)
        _refused(recorder)
        _limits(slurm)
        _busy(recorder)
        for path in BUSY:
            recorder.send("busy", path)
        recorder.send("busy", "slurm/jobs", name="unchanged", query=f"?update_time={int(time.time()) + 60}")
        recorder.send("busy", "slurm/job/{held}", name="signalled-pending", method="DELETE", query="?signal=USR1")
        bobs = {"X-SLURM-USER-NAME": BOB, "X-SLURM-USER-TOKEN": slurm.token(BOB)}
        recorder.send("refused", "slurm/job/{held}", name="cancel-of-others", method="DELETE", headers=bobs)
        slurm.start("dgx06")
        _end(recorder)
        for path in ENDED:
            recorder.send("ended", path)
        recorder.send("ended", "slurm/job/{failed}", name="cancel-ended", method="DELETE")
        with slurm.without("slurmdbd"):
            recorder.send("away", "slurmdb/jobs", name="slurmdbd")
        with slurm.without("slurmctld"):
            recorder.send("away", "slurm/jobs", name="slurmctld")


def _nothing(recorder: Recorder) -> None:
    """Record the cluster before the first job."""
    for path in ("slurm/jobs", "slurm/jobs/state", "slurm/nodes", "slurm/reservations", "slurmdb/jobs"):
        recorder.send("nothing", path)


def _refused(recorder: Recorder) -> None:
    for name in ("slurm/job/{unknown}", "slurmdb/job/{unknown}"):
        recorder.ids["unknown"] = "987654"
        recorder.send("refused", name)
    recorder.send("refused", "slurm/job/{unknown}", name="cancel-unknown", method="DELETE")
    wrong, expired = _token(b"another key, not this cluster's one", 600), recorder.slurm.token(PORTAL, life_s=-60)
    for name, token in (("wrong-token", wrong), ("expired-token", expired), ("no-jwt", "rubbish")):
        recorder.send("refused", "slurm/jobs", name=name, token=token)
        recorder.send("refused", "slurmdb/jobs", name=f"{name}-accounts", token=token)
    recorder.send("refused", "slurm/jobs", name="no-token", headers={"X-SLURM-USER-NAME": PORTAL})
    requests: dict[str, dict[str, Any]] = {
        "submitted": {},
        "account": {"account": "speech-lab"},
        "partition": {"partition": "moon"},
        "qos": {"qos": "gold"},
        "gpus": {"gpus_per_node": 64},
        "gpu-type": {"gpus_per_node": 1, "gpu_type": "b200"},
        "cpus": {"cpus_per_node": 100_000},
        "constraint": {"constraint": "a100"},
        "node": {"required_nodes": ("dgx99",)},
        "reservation": {"reservation": "none-such"},
    }
    for name, options in requests.items():
        submission = Submission(
            key=KEY, name=name, user=ALICE, script="/x/batch.sh", directory="/tmp", output="/dev/null",
            time_limit_s=3600, grace_s=30, begin_at=time.time() + 86_400, **options,
        )  # fmt: skip
        body = lambda version, submission=submission: request(submission, "#!/bin/sh\nexit 0\n", version)  # noqa: E731
        recorder.send(
            "refused" if options else "taken", "slurm/job/submit", name=f"submit-{name}", method="POST", body=body
        )
    for version in recorder.versions:
        answer = recorder.client.get(f"/slurm/{version[:-2]}99/jobs", headers=recorder.who())
        recorder.write(
            version, "refused/other-version", answer.status_code, answer.headers.get("content-type", ""), answer.text
        )
    recorder.slurm.run("scancel", f"--user={PORTAL}", f"--user={ALICE}")


def _limits(slurm: Cluster) -> None:
    slurm.run("sacctmgr", "-i", "modify", "qos", "small", "set", "MaxWall=2:00:00", "MaxJobsPerUser=3",
              "MaxSubmitJobsPerUser=9", "GrpTRES=gres/gpu=16,cpu=512", "MaxTRESPerJob=gres/gpu=8",
              "MaxTRESPerNode=gres/gpu=4", "MaxTRESPerAccount=gres/gpu=12", "GrpTRESMins=gres/gpu=60000",
              "Priority=50", "Preempt=normal")  # fmt: skip
    slurm.enroll(BOB, "speech", MaxJobs=5, MaxSubmitJobs=20, MaxWall="1-0", GrpTRES="gres/gpu=10", GrpJobs=7,
                 MaxTRESPerJob="gres/gpu=4,node=2", GrpTRESMins="gres/gpu=1000", Fairshare=4)  # fmt: skip


def _busy(recorder: Recorder) -> None:
    """Create jobs in every state that can be reached, most of which they keep, and record the answers."""
    batch, wait, control = recorder.batch, recorder.wait, recorder.control
    batch("gpus", "-N2", "-w", "dgx01,dgx03", "--ntasks-per-node=1", "--gres=gpu:h100:3", "-t", "90", "-L", "matlab")
    batch("completed", script="#!/bin/sh\nexit 0\n")
    batch("failed", script="#!/bin/sh\nexit 3\n")
    batch("signalled", script="#!/bin/sh\nkill -9 $$\n")
    batch("steps", "-N2", script="#!/bin/sh\nsrun -N2 -n2 true\nsrun -J two -N1 -n1 sh -c 'exit 5'\nexit 5\n")
    batch("timeout", "-t", "1")
    batch("cancelled")
    batch("cancelled-pending", "--hold")
    batch("requeued", "-w", "dgx02")
    batch("requeued-held", "-w", "dgx02")
    batch("finished-array", "--array=0-2", script='#!/bin/sh\nexit "$SLURM_ARRAY_TASK_ID"\n')
    wait("cancelled", "RUNNING")
    recorder.slurm.run("scancel", recorder.ids["cancelled"], user=ALICE)
    recorder.slurm.run("scancel", recorder.ids["cancelled-pending"], user=ALICE)
    for name in ("requeued", "requeued-held"):
        wait(name, "RUNNING")
    control("requeue", recorder.ids["requeued"])
    control("requeuehold", recorder.ids["requeued-held"])
    batch("preempted", "-w", "dgx04", "--exclusive")
    wait("preempted", "RUNNING")
    batch("urgent", "-p", "urgent", "-w", "dgx04", "--exclusive")
    wait("urgent", "RUNNING")
    wait("requeued", "RUNNING")
    batch("array", "--array=0-9%2", "-w", "dgx02")
    recorder.slurm.wait_for(lambda: "RUNNING" in recorder.slurm.state(recorder.ids["array"]), "a task to run")
    batch("held", "--hold")
    batch("held-array", "--hold", "--array=1-7:3")
    batch("dependency", f"--dependency=afterok:{recorder.ids['gpus']}")
    batch("begin", "--begin=now+2hours")
    batch("too-long", "-p", "short", "-t", "30")
    batch("small", "-q", "small", "--gres=gpu:2", "-w", "dgx02")
    wait("small", "RUNNING")
    batch("qos-limit", "-q", "small", "--gres=gpu:1")
    batch("features", "--hold", "-C", "h100", "--mem=4G", "-c", "16", "-t", "1-0")
    failing = failing_prolog(recorder.slurm.layout, "dgx05")
    failing.touch()
    batch("prolog-failed", "-w", "dgx05")
    in_queue = ("squeue", "-h", "-j", recorder.ids["prolog-failed"], "-o", "%r")
    recorder.slurm.wait_for(lambda: "launch failed" in recorder.slurm.run(*in_queue), "a failed prolog to hold its job")
    failing.unlink()
    for node, reason in (("dgx05", "fan 3 is loud"), ("dgx02", "after this job")):
        recorder.slurm.run("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}", user=PORTAL)
    recorder.slurm.kill("dgx06")
    control("create", "reservation", "reservationname=upkeep", "starttime=now", "duration=600", "nodes=dgx07",
            "flags=maint,ignore_jobs", "users=root")  # fmt: skip
    control("create", "reservation", "reservationname=course", "starttime=now+3hours", "duration=120",
            "nodes=dgx01,dgx03", f"users={ALICE}")  # fmt: skip
    control("create", "reservation", "reservationname=kept", "starttime=now", "duration=120", "nodes=dgx08",
            "accounts=speech")  # fmt: skip
    batch("two-kinds", "--hold", "-N1", ":", "--hold", "-N1", "--gres=gpu:h100:1")
    batch("slices", "--reservation=kept", "-w", "dgx08", "--gres=gpu:h100:1,gpu:1g.10gb:2", "-A", "speech", user=BOB)
    wait("slices", "RUNNING")
    batch("resources", "-N3", "--exclusive", "-w", "dgx01")
    time.sleep(8)  # until the scheduler has thought about all of them
    recorder.slurm.wait_for(lambda: "down" in recorder.slurm.node_states()[5], "a node to be down")
    batch("completing", "-w", "dgx03", script=STUBBORN)
    wait("completing", "RUNNING")
    time.sleep(1)
    recorder.slurm.run("scancel", recorder.ids["completing"], user=ALICE)
    wait("completing", "COMPLETING", "CANCELLED")


def _end(recorder: Recorder) -> None:
    deadline = time.monotonic() + 150
    while recorder.slurm.state(recorder.ids["timeout"]) != "TIMEOUT":
        assert time.monotonic() < deadline, "the time limit passes"
        time.sleep(1)
    recorder.slurm.run("scancel", f"--user={ALICE}", f"--user={BOB}")
    recorder.slurm.run("scancel", f"--user={ALICE}")
    recorder.slurm.run("scancel", f"--user={BOB}")
    time.sleep(10)  # for the accounts


def _token(key: bytes, life_s: int) -> str:
    now = int(time.time())
    parts = [{"alg": "HS256", "typ": "JWT"}, {"exp": now + life_s, "iat": now, "sun": PORTAL}]
    text = b".".join(_base64url(json.dumps(part).encode()) for part in parts)
    return (text + b"." + _base64url(hmac.digest(key, text, "sha256"))).decode()


def _base64url(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")


def _paths_of(document: Any) -> dict[str, dict[str, dict[str, str]]]:
    return {path: {method: {} for method in methods} for path, methods in document["paths"].items()}


def _plain(document: Any) -> set[str]:
    return {path.rstrip("/") for path in document["paths"]}


def _template(rest: str, service: str) -> str:
    if rest.startswith("job/{"):
        return "job/{job_id}"
    return rest


def _number(version: str) -> tuple[int, int, int]:
    first, second, third = version.removeprefix("v").split(".")
    return int(first), int(second), int(third)


def _lines(answer: dict[str, Any]) -> str:
    """Format compactly, but with each job or node on a separate line, so that diffs between recordings are readable."""
    body = answer["body"]
    if not isinstance(body, dict):
        return json.dumps(answer) + "\n"
    rows = []
    for name, value in body.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inside = ",\n".join(json.dumps(item, separators=(",", ":")) for item in value)
            rows.append(f"{json.dumps(name)}:[\n{inside}]")
        else:
            rows.append(f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}")
    head = json.dumps({"status": answer["status"], "type": answer["type"]})[:-1]
    return head + ', "body": {\n' + ",\n".join(rows) + "}}\n"


def main(arguments: Sequence[str]) -> int:
    for name in arguments or [release.name for release in releases.RELEASES]:
        record(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
