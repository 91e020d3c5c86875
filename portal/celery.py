"""The Celery application, imported explicitly by asgi.py, manage.py and worker (`portal/__init__.py` stays empty)."""

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")
# `manage.py prepare` runs the checks; here they would load every page, half of the time that a worker's start takes.
os.environ.setdefault("CELERY_SKIP_CHECKS", "1")

app = Celery("vigil")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["jobs", "nodes", "portal"])
app.set_default()
