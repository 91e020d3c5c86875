"""The portal as the command line sees it: where it is, who asks, and its answers. No Django here."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vigil_core import kinds

if TYPE_CHECKING:
    import ssl

    import httpx

HOW_TO = (
    "No portal is known here. Start one on this machine with `vigil up`, or make a token on the portal's page /me/ and"
    " set VIGIL_URL and VIGIL_TOKEN, or write url and token into ~/.config/vigil/cli.toml."
)
RETRY_S = 1.0
CHECKOUT = Path(__file__).resolve().parents[1]


class Trouble(Exception):
    """The portal said no, or nothing. The message is for people; `problem` is its document, if it sent one."""

    def __init__(self, message: str, *, status: int = 0, problem: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem or {"title": "Failed", "status": status, "detail": message, "errors": []}


class _Answer(dict[str, Any]):
    """An object of an answer. What it lacks, a portal of another release or nobody's has not said."""

    def __init__(self, url: str, said: dict[str, Any]) -> None:
        super().__init__(said)
        self._url = url

    def __missing__(self, key: str) -> Any:
        raise Trouble(
            f"The answer from {self._url} says nothing of {key!r}. If a portal of Vigil is there, it is of another "
            "release: take the `vigil` command that belongs to it."
        )


class _Closed(Trouble):
    """A file that says where a portal is, but not to us."""


@dataclass
class Portal:
    """A portal, by its address and a token."""

    url: str
    token: str = field(repr=False)
    source: str = field(default="VIGIL_URL", repr=False, compare=False)  # what says where it is
    _http: httpx.Client | None = field(default=None, repr=False)

    @property
    def http(self) -> httpx.Client:
        if self._http is None:
            import httpx

            headers = {"Authorization": f"Bearer {self.token}", "User-Agent": "vigil-cli"}
            timeout = httpx.Timeout(30.0, connect=5.0)
            # Reading every authority takes a third of a command's time, and without https nobody asks them.
            verify = self.url.startswith("https:") and _authorities()
            # Environment proxies are for the world outside, not for a portal of the lab.
            self._http = httpx.Client(
                base_url=f"{self.url}/api/v1/", headers=headers, timeout=timeout, trust_env=False, verify=verify
            )
        return self._http

    def get(self, path: str, **parameters: Any) -> Any:
        """The answer as JSON; asked a second time if the portal did not answer."""
        return self._said(self.ask("GET", path, tries=2, params=_without_none(parameters)))

    def post(self, path: str, *, json: Any = None, key: str | None = None, **options: Any) -> Any:
        """Sends a request, again where it fails and has a key; without one it is sent once."""
        headers = {"Idempotency-Key": key} if key else {}
        answer = self.ask("POST", path, tries=5 if key else 1, json=json, headers=headers, **options)
        return self._said(answer) if answer.content else None

    def patch(self, path: str, *, json: Any) -> Any:
        """Changes what is there; the same twice is the same once."""
        return self._said(self.ask("PATCH", path, tries=2, json=json))

    def _said(self, answer: httpx.Response) -> Any:
        """The JSON of an answer that is one of Vigil's."""
        try:
            said = answer.json(object_hook=partial(_Answer, self.url))
        except (ValueError, RecursionError) as error:
            raise self._foreign() from error
        if not isinstance(said, dict):
            raise self._foreign()
        return said

    def ask(self, method: str, path: str, *, tries: int = 1, **options: Any) -> httpx.Response:
        import httpx

        for left in reversed(range(tries)):
            try:
                answer = self.http.request(method, path, **options)
            except httpx.TransportError as error:
                if not left or isinstance(error, httpx.UnsupportedProtocol):
                    raise self._silent(error) from error
            except httpx.DecodingError as error:
                raise self._foreign() from error
            except httpx.InvalidURL as error:
                raise self._no_address(error) from error
            else:
                self._check_redirect(answer)
                if answer.status_code < 400:
                    return answer
                if answer.status_code == 401:
                    raise self._stranger()
                if answer.status_code not in {429, 503} or not left:
                    raise _trouble(answer)
            time.sleep(RETRY_S)
        raise AssertionError("unreachable")

    def stream(self, path: str, **parameters: Any) -> Iterator[str]:
        """A long text, piece by piece."""
        import httpx

        try:
            with self.http.stream("GET", path, params=_without_none(parameters)) as answer:
                self._check_redirect(answer)
                if answer.status_code >= 400:
                    answer.read()
                    raise _trouble(answer)
                yield from answer.iter_text()
        except httpx.TransportError as error:
            raise self._silent(error) from error
        except httpx.DecodingError as error:
            raise self._foreign() from error
        except httpx.InvalidURL as error:
            raise self._no_address(error) from error

    def _check_redirect(self, answer: httpx.Response) -> None:
        """Trouble where the answer is that to ask elsewhere: the token goes to nobody whom an answer names."""
        if 300 <= answer.status_code < 400:
            to = answer.headers.get("Location", "nowhere")
            raise Trouble(f"{self.url} sends on to {to}. Write that address in {self.source}.")

    def _foreign(self) -> Trouble:
        return Trouble(f"What answers at {self.url} is no Vigil portal. Mend the address in {self.source}.")

    def _stranger(self) -> Trouble:
        where = "VIGIL_TOKEN" if os.environ.get("VIGIL_TOKEN") else self.source
        remedy = f"Make one on {self.url}/me/ and put it in {where}."
        return Trouble(f"{self.url} does not know this token: it is wrong, expired or revoked. {remedy}", status=401)

    def _silent(self, error: Exception) -> Trouble:
        from vigil_cli.connection_errors import why

        return Trouble(why(self.url, self.source, error))

    def _no_address(self, error: Exception) -> Trouble:
        return Trouble(f"{self.url!r} is not an address ({error}). Mend it in {self.source}.")

    def items(self, path: str, *, most: int | None = None, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Everything that a list holds, page by page."""
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


def kind_of(portal: Portal, job_id: int) -> kinds.Kind:
    """What kind of job it is: what it counts."""
    return kinds.of(portal.get(f"jobs/{job_id}")["kind"])


def find_portal() -> Portal:
    """Finds the portal by VIGIL_URL and VIGIL_TOKEN, else by the first cli.toml; Trouble says how to get one."""
    url, token = os.environ.get("VIGIL_URL", "").strip().rstrip("/"), os.environ.get("VIGIL_TOKEN", "").strip()
    if not (token.isascii() and token.isprintable()):
        raise Trouble("VIGIL_TOKEN holds what no token does. Copy it once more, from vgl_ on.")
    if url and token:
        return Portal(url, token)
    closed: _Closed | None = None
    for path in _files():
        try:
            known = _read(path)
        except _Closed as trouble:  # of whoever runs the portal, as on a login node: our own may come next
            closed = closed or trouble
            continue
        # A token goes to the portal that it was made by, and to no other.
        if known and (not url or url == known.url):
            return Portal(known.url, token or known.token, "VIGIL_URL" if url else known.source)
    if closed:
        raise closed
    if url:
        raise Trouble(f"No token for {url}. Make one at {url}/me/ and set VIGIL_TOKEN.")
    raise Trouble(HOW_TO)


def home() -> Path:
    """The folder in which `vigil up` keeps its data."""
    return Path(os.environ.get("VIGIL_HOME") or CHECKOUT / "var")


def _files() -> Iterator[Path]:
    yield home() / "cli.toml"
    config = os.environ.get("XDG_CONFIG_HOME")
    yield (Path(config) if config else Path.home() / ".config") / "vigil" / "cli.toml"


def _read(path: Path) -> Portal | None:
    try:
        known = tomllib.loads(path.read_text())
        return Portal(str(known["url"]).rstrip("/"), str(known["token"]), str(path))
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise _Closed(f"{path} belongs to somebody else. Set VIGIL_URL and VIGIL_TOKEN.") from error
    except (ValueError, KeyError, OSError, RecursionError) as error:
        raise Trouble(f"{path} should hold url and token: {error}.") from error


def _authorities() -> ssl.SSLContext:
    """Whom to trust: this machine's authorities (or SSL_CERT_FILE's, as a lab may sign its own) and the well-known."""
    import ssl

    import certifi

    trusted = ssl.create_default_context()
    trusted.load_verify_locations(certifi.where())
    return trusted


def _trouble(answer: httpx.Response) -> Trouble:
    try:
        problem = answer.json()
        detail = str(problem["detail"])
        for error in problem.get("errors") or []:
            str(error["field"]), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Trouble(f"The portal answered {answer.status_code} {answer.reason_phrase}.", status=answer.status_code)
    return Trouble(detail, status=answer.status_code, problem=problem)


def _without_none(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None and value != ""}
