"""The ASGI application: reports by their own short way, Django for other requests, Channels for sockets."""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

from channels.routing import ProtocolTypeRouter  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402

_django = get_asgi_application()  # sets Django up, before anything below imports models

import portal.celery  # noqa: E402, F401  (binds shared tasks to our broker)
from jobs.api.reports import Intake  # noqa: E402
from portal.limits import BodyLimit  # noqa: E402

application = ProtocolTypeRouter({"http": Intake(BodyLimit(_django))})
