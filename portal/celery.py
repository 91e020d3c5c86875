"""The Celery application, imported explicitly by asgi.py, manage.py and worker (`portal/__init__.py` stays empty)."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

app = Celery("vigil")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["jobs", "nodes", "portal"])
app.set_default()
# beat only ticks. A tick that waited too long is dropped: the next one finds what it would have done.
app.conf.beat_schedule = {
    "follow": {"task": "jobs.tasks.follow", "schedule": 2.0, "options": {"expires": 2}},
    "verify": {"task": "jobs.tasks.verify", "schedule": 10.0, "options": {"expires": 10}},
    "compact": {"task": "jobs.tasks.compact", "schedule": 15.0, "options": {"expires": 15}},
    "remove-spools": {"task": "jobs.tasks.remove_spools", "schedule": 3600.0, "options": {"expires": 3600}},
    "empty-trash": {"task": "jobs.tasks.empty_trash", "schedule": 3600.0, "options": {"expires": 3600}},
}
