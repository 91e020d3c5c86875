"""Test the web process before it serves."""

import os

import pytest
import uvicorn
from django.conf import LazySettings

from console import web
from console.site import migrations


def test_what_serves_people_does_not_know_where_slurm_s_key_is(
    monkeypatch: pytest.MonkeyPatch, settings: LazySettings
) -> None:
    secrets = {"VIGIL_SLURM_KEY_FILE": "/etc/vigil/jwt.key", "VIGIL_SLURM_TOKEN_COMMAND": "/usr/local/bin/token"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
        setattr(settings, name, value)
    served: list[str] = []

    def serve(server: uvicorn.Server) -> None:
        served.extend(os.environ.get(name, "") + getattr(settings, name) for name in secrets)
        server.started = True

    monkeypatch.setattr(uvicorn.Server, "run", serve)
    monkeypatch.setattr(migrations, "migrate_older_database", lambda: None)
    web.main(["--port", "0"])
    assert served == ["", ""]
