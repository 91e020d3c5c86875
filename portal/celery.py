"""The Celery application, imported explicitly by asgi.py, manage.py and worker (`portal/__init__.py` stays empty).

Without Celery's own fixes for Django: they would run its checks, which load every page, half of the time that a
worker's start takes, and open the database anew for every task, most of what a tick costs where nothing runs.
`console.worker` sets Django up and keeps the connections.
"""

import os

from celery import Celery

from portal.broker import Broker
from portal.database import RetriedTask

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

app = Celery("vigil", fixups=[], amqp=Broker, task_cls=RetriedTask)
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["jobs", "nodes", "portal"])
app.set_default()
