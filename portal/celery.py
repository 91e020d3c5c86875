"""The Celery application, imported explicitly by asgi.py, manage.py and worker (`portal/__init__.py` stays empty)."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

app = Celery("vigil")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["jobs", "nodes", "portal"])
app.set_default()
