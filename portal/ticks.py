"""Run beat as its own small application, which sends periodic tasks.

    python -m portal.ticks beat --schedule FILE

It only sends the names of tasks at their times, so it loads neither Django's applications, nor our code, nor Celery's
command line: half the memory and half a second less at each start. A tick that waited too long is dropped: the next one
does its work.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from celery import Celery
from django.conf import settings

from portal.broker import Broker
from portal.run.heartbeat import Pulse

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

SCHEDULE: dict[str, dict[str, Any]] = {
    "follow": {"task": "jobs.tasks.follow", "schedule": 2.0, "options": {"expires": 2}},
    "diagnose": {"task": "jobs.tasks.diagnose", "schedule": 10.0, "options": {"expires": 10}},
    "send": {"task": "portal.tasks.send", "schedule": 5.0, "options": {"expires": 5}},
    "verify": {"task": "jobs.tasks.verify", "schedule": 10.0, "options": {"expires": 10}},
    "compact": {"task": "jobs.tasks.compact", "schedule": 15.0, "options": {"expires": 15}},
    "apply-rounds": {"task": "jobs.tasks.apply_rounds", "schedule": 30.0, "options": {"expires": 30}},
    "merge-telemetry": {"task": "nodes.tasks.merge", "schedule": 30.0, "options": {"expires": 30}},
    "alert-hardware": {"task": "nodes.tasks.alert", "schedule": 15.0, "options": {"expires": 15}},
    "health": {"task": "nodes.tasks.health", "schedule": 5.0, "options": {"expires": 5}},
    "thin-telemetry": {"task": "nodes.tasks.thin", "schedule": 3600.0, "options": {"expires": 3600}},
    "waste": {"task": "jobs.tasks.waste", "schedule": 60.0, "options": {"expires": 60}},
    "reliability": {"task": "jobs.tasks.reliability", "schedule": 60.0, "options": {"expires": 60}},
    "temperatures": {"task": "nodes.tasks.temperatures", "schedule": 60.0, "options": {"expires": 30}},
    "game-days": {"task": "jobs.tasks.game_days", "schedule": 5.0, "options": {"expires": 5}},
    "assess": {"task": "jobs.tasks.assess", "schedule": 300.0, "options": {"expires": 120}},
    "acceptances": {"task": "jobs.tasks.advance_acceptances", "schedule": 20.0, "options": {"expires": 20}},
    "forget-telemetry": {"task": "nodes.tasks.forget", "schedule": 24 * 3600.0, "options": {"expires": 24 * 3600}},
    "measure": {"task": "jobs.tasks.measure", "schedule": 60.0, "options": {"expires": 60}},
    "remove-spools": {"task": "jobs.tasks.remove_spools", "schedule": 3600.0, "options": {"expires": 3600}},
    "remove-checkpoints": {"task": "jobs.tasks.remove_checkpoints", "schedule": 3600.0, "options": {"expires": 3600}},
    "empty-trash": {"task": "jobs.tasks.empty_trash", "schedule": 3600.0, "options": {"expires": 3600}},
    "tidy": {"task": "portal.tasks.tidy", "schedule": 24 * 3600.0, "options": {"expires": 24 * 3600}},
}
if settings.VIGIL_REPORTS == "tail":
    SCHEDULE["tail"] = {"task": "jobs.tasks.tail", "schedule": 1.0, "options": {"expires": 1}}
if settings.VIGIL_DCGM_EXPORTERS:
    SCHEDULE["pull"] = {"task": "nodes.tasks.pull", "schedule": 10.0, "options": {"expires": 10}}

TICK = "vigil_tick"
"""Header of every scheduled message: a worker that receives one knows that beat and Redis work."""
for _entry in SCHEDULE.values():
    _entry["options"]["headers"] = {TICK: "1"}

app = Celery("vigil", fixups=[], amqp=Broker)
app.config_from_object("django.conf:settings", namespace="CELERY")
app.conf.worker_log_format = "%(asctime)s %(levelname)s %(name)s: %(message)s"
app.conf.beat_schedule = SCHEDULE


def main() -> None:
    parser = argparse.ArgumentParser("portal.ticks", description="Send scheduled tasks when they are due.")
    parser.add_argument("role", choices=["beat"], help="names this process in process lists")
    parser.add_argument("-s", "--schedule", required=True, metavar="FILE", help="file that records what was sent when")
    options = parser.parse_args()
    Pulse().start()
    app.Beat(schedule=options.schedule, scheduler_cls="portal.beat:Scheduler", loglevel="WARNING", quiet=True).run()


if __name__ == "__main__":
    main()
