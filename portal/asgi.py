"""The ASGI application: Django for requests, Channels for sockets."""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

from channels.routing import ProtocolTypeRouter  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402

import portal.celery  # noqa: E402, F401  (binds shared tasks to our broker)

application = ProtocolTypeRouter({"http": get_asgi_application()})
