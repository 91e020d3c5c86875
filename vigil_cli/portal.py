"""The portal's HTTP client for the command line: address, token and responses. No Django here."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vigil_core import installation, kinds

if TYPE_CHECKING:
    import ssl

    import httpx

HOW_TO = (
    "No portal is configured. Start one on this machine with `vigil up`, or create a token on the portal's page /me/"
    " and set VIGIL_URL and VIGIL_TOKEN, or write url and token into ~/.config/vigil/cli.toml."
)
RETRY_S = 1.0


class CliError(Exception):
    """Raised when the portal refuses or does not answer. The message is for people; `problem` is the JSON problem."""

    def __init__(self, message: str, *, status: int = 0, problem: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem or {"title": "Failed", "status": status, "detail": message, "errors": []}


class _ResponseObject(dict[str, Any]):
    """A JSON object of a response. A missing key means another release, or a server that is not Vigil."""

    def __init__(self, url: str, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._url = url

    def __missing__(self, key: str) -> Any:
        raise CliError(
            f"The answer from {self._url} lacks {key!r}. If it is a Vigil portal, it is of another release: use the "
            "`vigil` command of that release."
        )


class _UnreadableConfig(CliError):
    """Raised for a configuration file that we may not read."""


@dataclass
class Portal:
    """A portal: its address and a token."""

    url: str
    token: str = field(repr=False)
    source: str = field(default="VIGIL_URL", repr=False, compare=False)  # where the address is configured
    _http: httpx.Client | None = field(default=None, repr=False)
    _has_shown_announcements: bool = field(default=False, repr=False, compare=False)

    @property
    def http(self) -> httpx.Client:
        if self._http is None:
            import httpx

            headers = {"Authorization": f"Bearer {self.token}", "User-Agent": "vigil-cli"}
            timeout = httpx.Timeout(30.0, connect=5.0)
            # Loading every authority takes a third of a command's time, and only https needs them.
            verify = self.url.startswith("https:") and _authorities()
            # Proxies in the environment are for the internet, not for a portal in the lab.
            self._http = httpx.Client(
                base_url=f"{self.url}/api/v1/", headers=headers, timeout=timeout, trust_env=False, verify=verify
            )
        return self._http

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the response as JSON; retry once if the portal does not answer."""
        return self._json(self.request("GET", path, tries=2, params=_without_none(parameters)))

    def post(self, path: str, *, json: Any = None, key: str | None = None, **options: Any) -> Any:
        """Send a request and return its JSON. Retried only with an idempotency key."""
        headers = {"Idempotency-Key": key} if key else {}
        answer = self.request("POST", path, tries=5 if key else 1, json=json, headers=headers, **options)
        return self._json(answer) if answer.content else None

    def patch(self, path: str, *, json: Any) -> Any:
        """Change a resource; idempotent, so it is retried once."""
        return self._json(self.request("PATCH", path, tries=2, json=json))

    def _json(self, answer: httpx.Response) -> Any:
        """Return the response's JSON object; raise CliError if it is none."""
        try:
            body = answer.json(object_hook=partial(_ResponseObject, self.url))
        except (ValueError, RecursionError) as error:
            raise self._not_vigil() from error
        if not isinstance(body, dict):
            raise self._not_vigil()
        return body

    def request(self, method: str, path: str, *, tries: int = 1, **options: Any) -> httpx.Response:
        """Send a request and return the response; raise CliError with a remedy for every failure."""
        import httpx

        for left in reversed(range(tries)):
            try:
                answer = self.http.request(method, path, **options)
            except httpx.TransportError as error:
                if not left or isinstance(error, httpx.UnsupportedProtocol):
                    raise self._no_response(error) from error
            except httpx.DecodingError as error:
                raise self._not_vigil() from error
            except httpx.InvalidURL as error:
                raise self._bad_address(error) from error
            else:
                self._check_redirect(answer)
                if answer.status_code < 400:
                    self._show_announcements(answer.headers.get("Vigil-Announcements", ""))
                    return answer
                if answer.status_code == 401:
                    raise self._unauthorized()
                if answer.status_code not in {429, 503} or not left:
                    raise _error_of(answer)
            time.sleep(RETRY_S)
        raise AssertionError("unreachable")

    def _show_announcements(self, header: str) -> None:
        """Print on stderr what the portal announces to everybody, once per command."""
        if header and not self._has_shown_announcements:
            from vigil_cli.announcement_header import show

            self._has_shown_announcements = True
            show(header)

    def stream(self, path: str, **parameters: Any) -> Iterator[str]:
        """Yield a long text piece by piece."""
        import httpx

        try:
            with self.http.stream("GET", path, params=_without_none(parameters)) as answer:
                self._check_redirect(answer)
                if answer.status_code >= 400:
                    answer.read()
                    raise self._unauthorized() if answer.status_code == 401 else _error_of(answer)
                yield from answer.iter_text()
        except httpx.TransportError as error:
            raise self._no_response(error) from error
        except httpx.DecodingError as error:
            raise self._not_vigil() from error
        except httpx.InvalidURL as error:
            raise self._bad_address(error) from error

    def _check_redirect(self, answer: httpx.Response) -> None:
        """Refuse redirects: the token must not go to an address that a response names."""
        if 300 <= answer.status_code < 400:
            to = answer.headers.get("Location", "nowhere")
            raise CliError(f"{self.url} redirects to {to}. Set that address in {self.source}.")

    def _not_vigil(self) -> CliError:
        return CliError(f"The server at {self.url} is not a Vigil portal. Correct the address in {self.source}.")

    def _unauthorized(self) -> CliError:
        where = "VIGIL_TOKEN" if os.environ.get("VIGIL_TOKEN") else self.source
        remedy = f"Create one on {self.url}/me/ and put it in {where}."
        return CliError(f"{self.url} rejected the token: it is wrong, expired or revoked. {remedy}", status=401)

    def _no_response(self, error: Exception) -> CliError:
        from vigil_cli.connection_errors import explain

        return CliError(explain(self.url, self.source, error))

    def _bad_address(self, error: Exception) -> CliError:
        return CliError(f"{self.url!r} is not an address ({error}). Correct it in {self.source}.")

    def items(self, path: str, *, most: int | None = None, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Yield every item of a list, page by page."""
        cursor, given = None, 0
        while True:
            page = self.get(path, cursor=cursor, **parameters)
            for item in page["items"]:
                yield item
                given += 1
                if given == most:
                    return
            cursor = page.get("next")
            if not cursor:
                return


def node_path(name: str) -> str:
    """Return the path of a node, whatever its name contains."""
    from urllib.parse import quote

    return f"nodes/{quote(name, safe='')}"


def kind_of(portal: Portal, job_id: int) -> kinds.JobKind:
    """Return the job's kind, which says what it counts."""
    return kinds.by_name(portal.get(f"jobs/{job_id}")["kind"])


def find_portal() -> Portal:
    """Find the portal by VIGIL_URL and VIGIL_TOKEN, or by the first cli.toml; CliError says how to configure one."""
    url, token = os.environ.get("VIGIL_URL", "").strip().rstrip("/"), os.environ.get("VIGIL_TOKEN", "").strip()
    if not (token.isascii() and token.isprintable()):
        raise CliError("VIGIL_TOKEN contains characters that no token has. Copy it again, starting at vgl_.")
    if url and token:
        return Portal(url, token)
    unreadable: _UnreadableConfig | None = None
    for path in _files():
        try:
            config = _read(path)
        except _UnreadableConfig as error:  # the portal's own, as on a login node: ours may come next
            unreadable = unreadable or error
            continue
        # A token is only sent to the portal that issued it.
        if config and (not url or url == config.url):
            return Portal(config.url, token or config.token, "VIGIL_URL" if url else config.source)
    if unreadable:
        raise unreadable
    if url:
        raise CliError(f"No token for {url}. Create one at {url}/me/ and set VIGIL_TOKEN.")
    raise CliError(HOW_TO)


def _files() -> Iterator[Path]:
    yield installation.default_home() / "cli.toml"
    config = os.environ.get("XDG_CONFIG_HOME")
    yield (Path(config) if config else Path.home() / ".config") / "vigil" / "cli.toml"


def _read(path: Path) -> Portal | None:
    try:
        config = tomllib.loads(path.read_text())
        return Portal(str(config["url"]).rstrip("/"), str(config["token"]), str(path))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise _UnreadableConfig(f"{path} belongs to somebody else. Set VIGIL_URL and VIGIL_TOKEN.") from error
    except (ValueError, KeyError, OSError, RecursionError) as error:
        raise CliError(f"{path} must contain url and token: {error}.") from error


def _authorities() -> ssl.SSLContext:
    """Return the trusted authorities: this machine's (or SSL_CERT_FILE's, as a lab may sign its own) and certifi's."""
    import ssl

    import certifi

    trusted = ssl.create_default_context()
    trusted.load_verify_locations(certifi.where())
    return trusted


def _error_of(answer: httpx.Response) -> CliError:
    try:
        problem = answer.json()
        detail = str(problem["detail"])
        for error in problem.get("errors") or []:
            str(error["field"]), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return CliError(f"The portal answered {answer.status_code} {answer.reason_phrase}.", status=answer.status_code)
    return CliError(detail, status=answer.status_code, problem=problem)


def _without_none(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None and value != ""}
