"""Create what an attempt leaves in its folder, and return the verdict on its end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.utils import timezone

from jobs.following import ending
from jobs.following.end_causes.cause import AttemptEnd
from jobs.models import Attempt, Incident
from jobs.postmortem import incidents

ALONE = "step 1 loss 2.0\nstep 2 loss 1.9\n"
GONE = "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:9885\n"
OOM = "Memory cgroup out of memory: Killed process 4242 (python) total-vm:9437184kB, anon-rss:8388608kB"
XID = "NVRM: Xid (PCI:0000:ab:00): 79, pid=41833, name=python, GPU has fallen off the bus."


@dataclass
class Left:
    """An attempt on two nodes, and the files that its ranks and launchers leave."""

    attempt: Attempt
    folder: Path
    failure: dict[str, Any]

    def write(self, name: str, content: object) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def ends(self, node: int = 0, *, incarnation: int = 0, **ranks: tuple[int | None, int | None, float]) -> None:
        """Write how ranks ended: r3=(exit code, signal, seconds before now)."""
        now = timezone.now().timestamp()
        reports = [
            {
                "rank": int(name[1:]), "pid": 4000 + int(name[1:]), "exit_code": code, "signal": number,
                "ended_at": now - ago, "seconds": 60.0, "peak_mib": 2048, "by_us": number == 9 and ago == 0,
            }
            for name, (code, number, ago) in ranks.items()
        ]  # fmt: skip
        about = {"version": 1, "incarnation": incarnation, "node": "anything", "node_rank": node}
        self.write(f"ends/{incarnation}.{node}.json", {**about, "ranks": reports})

    def write_snapshot(self, node: int = 0, *, incarnation: int = 0, **more: Any) -> None:
        payload = {
            "version": 1, "at": timezone.now().timestamp(), "incarnation": incarnation, "node": "anything",
            "node_rank": node, "gpus": [], "kernel": [], "nvidia_smi": "", "not_seen": {},
            "memory": {"version": 2, "path": "/", "oom_kills": 0, "peak_mib": 900, "limit_mib": 1024},
            "shm": {"total_mib": 64, "most_mib": 1},
            "disk": {"total_mib": 9000, "free_mib": 500, "inodes": 100, "inodes_free": 50, "problem": ""},
        }  # fmt: skip
        self.write(f"looks/{incarnation}.{node}.json", payload | more)

    def diagnosed(self, ended: AttemptEnd | None = None) -> tuple[Incident, dict[str, Any]]:
        assert ending.end(self.attempt, ended or AttemptEnd("failed", 1, result=self.failure))
        incident = Incident.objects.get(attempt=self.attempt)
        assert incidents.diagnose(incident.pk)
        incident.refresh_from_db()
        diagnosis = incident.diagnoses.first()
        assert diagnosis is not None
        return incident, diagnosis.verdict


def texts(verdict: dict[str, Any], role: str) -> list[str]:
    return [item["text"] for item in verdict["evidence"] if item["role"] == role]
