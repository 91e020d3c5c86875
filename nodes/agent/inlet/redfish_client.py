"""Read JSON resources of a BMC over Redfish (DMTF DSP0266), within limits of time, bytes and requests.

Only HTTPS, and only resources below /redfish/ of that BMC: redirects are not followed. The certificate must be signed
by a trusted authority and name the host, or be in the site's own file: BMCs often have one that names nothing.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import ssl
import stat
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

ROOT = "/redfish/v1/"
MAX_BYTES = 1024 * 1024
"""Of one resource."""
MAX_CREDENTIALS = 1024
MAX_REQUESTS = 60
DEADLINE_S = 15.0
SOCKET_S = 5.0
"""For one answer of the socket."""
CHUNK = 65_536
MISSING = (403, 404)
_PATH = re.compile(r"/redfish/[!-~]{0,500}")
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class RedfishError(Exception):
    """The BMC cannot be read; the message says why, and never contains the credentials."""


class ResourceMissing(RedfishError):
    """The BMC links to a resource that it does not have, does not show to this account, or fails to deliver."""


class TooManyResources(RedfishError):
    """As many resources as allowed were read."""


class RedfishClient:
    """A connection to one BMC. `get` raises RedfishError for whatever goes wrong.

    `first_failure` says which resource the BMC has and failed to deliver; "" if none.
    """

    def __init__(self, url: str, credentials: Path, authority: Path | None, *, deadline: float = DEADLINE_S) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 443
        self._headers = {"Accept": "application/json", "Authorization": f"Basic {_read_credentials(credentials)}"}
        self._pinned = _certificates(authority) if authority is not None else frozenset()
        self._context = _context(authority)
        self._connection: http.client.HTTPSConnection | None = None
        self._until = time.monotonic() + deadline
        self._requests = 0
        self.first_failure = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.close()

    def get(self, path: str) -> dict[str, Any]:
        """Return a resource. Raises RedfishError."""
        if not _PATH.fullmatch(path):
            raise RedfishError("The BMC links to something that is no Redfish resource.")
        self._requests += 1
        if self._requests > MAX_REQUESTS:
            raise TooManyResources(f"More than {MAX_REQUESTS} resources were read without finding the sensor.")
        try:
            body = self._fetch(path)
        except ssl.SSLCertVerificationError as error:
            raise RedfishError(
                f"Its certificate is not trusted: {error.verify_message}. Name the authority, or the BMC's own"
                " certificate, in VIGIL_AGENT_REDFISH_CA_FILE."
            ) from None
        except TimeoutError:
            raise RedfishError("It does not answer in time.") from None
        except (OSError, http.client.HTTPException) as error:
            raise RedfishError(f"It cannot be reached: {_reason(error)}.") from None
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            raise RedfishError(f"{path} is not JSON.") from None
        if not isinstance(found, dict):
            raise RedfishError(f"{path} is not a JSON object.")
        return found

    def _fetch(self, path: str) -> bytes:
        if self._connection is None or self._connection.sock is None:
            self._connection = self._connect()
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        if answer.status != 200:
            self._connection.close()  # instead of reading the rest
            if answer.status == 401:
                raise RedfishError("It refuses the credentials (401).")
            problem = f"{path} answers with {answer.status}."
            if answer.status not in MISSING:
                self.first_failure = self.first_failure or problem
            raise ResourceMissing(problem)
        body = bytearray()
        while chunk := answer.read(CHUNK):
            body += chunk
            if len(body) > MAX_BYTES:
                raise RedfishError(f"{path} is larger than {MAX_BYTES // 1024} KiB.")
            if time.monotonic() > self._until:
                raise TimeoutError
        if time.monotonic() > self._until:
            raise TimeoutError
        return bytes(body)

    def _connect(self) -> http.client.HTTPSConnection:
        """Connect; to a certificate that is in the site's file, whatever host it names."""
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=SOCKET_S, context=self._context)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError:
            connection.close()
            if not self._pinned:
                raise
            connection = self._connect_pinned()
        connection.auto_open = 0  # it would connect again without this check
        return connection

    def _connect_pinned(self) -> http.client.HTTPSConnection:
        # Nothing is sent before the very certificate was compared.
        unnamed = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unnamed.check_hostname, unnamed.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=SOCKET_S, context=unnamed)
        connection.connect()
        presented = connection.sock.getpeercert(binary_form=True)
        if presented not in self._pinned:
            connection.close()
            raise RedfishError(
                "Its certificate is neither signed for this host by an authority of VIGIL_AGENT_REDFISH_CA_FILE nor in"
                " that file."
            )
        return connection


def _read_credentials(file: Path) -> str:
    """Return `user:password` for the header, from a file that only its owner can read."""
    try:
        with open(file, "rb") as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & 0o077:
                raise RedfishError(f"Others can read {file}. Give it mode 0600.")
            text = opened.read(MAX_CREDENTIALS + 1)
    except OSError as error:
        raise RedfishError(f"{file}: {error.strerror}.") from None
    line = text.strip()
    if len(text) > MAX_CREDENTIALS or b":" not in line or b"\n" in line or b"\r" in line:
        raise RedfishError(f"{file} must have one line, user:password.")
    return base64.b64encode(line).decode()


def _context(authority: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if authority is None else str(authority))
    except (OSError, ssl.SSLError) as error:
        raise RedfishError(f"{authority}: {_reason(error)}.") from None


def _certificates(file: Path) -> frozenset[bytes]:
    """Return the certificates of a PEM file as DER."""
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            text = opened.read(MAX_BYTES)
    except OSError as error:
        raise RedfishError(f"{file}: {error.strerror}.") from None
    try:
        return frozenset(ssl.PEM_cert_to_DER_cert(found) for found in _PEM.findall(text))
    except ValueError:
        raise RedfishError(f"{file} has a certificate that is damaged.") from None


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in str(text))[:120].rstrip(".")
