"""Define the ASGI application: a fast path for reports, Django for other requests, Channels for sockets."""

import gc
import os
from typing import cast

gc.disable()  # nothing loaded here is garbage, and collecting takes a tenth of the start
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from django.core.asgi import get_asgi_application  # noqa: E402

_django = get_asgi_application()  # sets Django up, before anything below imports models

from django.urls import get_resolver, path, re_path  # noqa: E402

import portal.celery  # noqa: E402, F401  (binds shared tasks to our broker)
from jobs.api import reports  # noqa: E402
from jobs.sockets.consumers import JobSocket, JobsSocket, NoSocket  # noqa: E402
from jobs.sockets.machines import ClusterSocket  # noqa: E402
from nodes.api import agents  # noqa: E402
from portal.http.counting import RequestCounter  # noqa: E402
from portal.http.limits import Application, BodyLimit  # noqa: E402
from portal.http.posts import Intake  # noqa: E402
from portal.http.sockets import SocketGate  # noqa: E402

sockets = URLRouter(
    [
        path("ws/jobs/<int:job_id>", JobSocket.as_asgi()),
        path("ws/jobs", JobsSocket.as_asgi()),
        path("ws/cluster", ClusterSocket.as_asgi()),
        re_path(r"", NoSocket.as_asgi()),
    ]
)
application = ProtocolTypeRouter(
    {
        "http": RequestCounter(Intake(BodyLimit(cast(Application, _django)), [reports.FAST_PATH, agents.FAST_PATH])),
        "websocket": SocketGate(sockets),
    },
)

# Everything is loaded now rather than in the first request, and frozen: a full collection that traversed it all
# delayed requests and sockets by 100 ms every few seconds of work.
get_resolver().url_patterns  # noqa: B018
gc.freeze()
gc.enable()
