"""Define the Celery application, imported explicitly by asgi.py, manage.py and worker (`portal/__init__.py` is empty).

Celery's own fixes for Django are left out: they would run its checks, which load every page (half of a worker's
start-up time), and reopen the database for every task (most of an idle tick's cost). `console.worker` sets up Django
and keeps the connections.
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
