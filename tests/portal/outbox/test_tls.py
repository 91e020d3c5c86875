"""Test that TLS verifies the given name, although the connection goes to the address that was checked."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from portal.sending import outside
from tests.portal.outbox import receiving


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl to make a certificate")
def test_the_certificate_must_be_the_name_s(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.VIGIL_WEBHOOK_ALLOW = "127.0.0.0/8"
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    created = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    created += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=hooks.example", "-days", "2"]
    subprocess.run([*created, "-addext", "subjectAltName=DNS:hooks.example"], check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(outside, "_authorities", lambda: trusting)
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *_, **__: [(*here, ("127.0.0.1", port))])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with receiving.web(context) as web:
        there = f"hooks.example:{web.port}"
        assert asyncio.run(outside.post(f"https://{there}/x", b"{}", {})).status == 200
        assert web.got[0].headers["Host"] == there
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            asyncio.run(outside.post(f"https://other.example:{web.port}/x", b"{}", {}))
        assert len(web.got) == 1
