"""Names in addresses and bodies that no row can have are refused, also by PostgreSQL, which stores no NUL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab import bearer, send, signed_in, sysadmin

pytestmark = pytest.mark.django_db
NUL = "a%00b"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("get", f"/health/rules/{NUL}", None, 404),
        ("put", f"/health/rules/{NUL}", {"is_enabled": False, "version": 0, "reason": "r"}, 404),
        ("delete", f"/health/rules/{NUL}?version=1&reason=r", None, 404),
        ("get", f"/burnins/1/nodes/{NUL}", None, 404),
        ("get", f"/burnins/{10**30}", None, 404),
        ("get", f"/health/{10**30}", None, 404),
        ("post", f"/maintenance/{10**30}/cancel", None, 404),
        ("post", f"/gamedays/{10**30}/cancel", None, 404),
        ("get", f"/acceptances/{10**30}", None, 404),
        ("post", f"/announcements/{10**30}/withdraw", None, 404),
        ("post", f"/spares/{NUL}/remove", None, 404),
        ("post", "/burnins/golden/reset", {"model": "a\0b"}, 422),
        ("post", "/spares", {"node": "a\0b", "partition": "gpu"}, 422),
        ("post", "/burnins", {"nodes": ["dgx-01\n"]}, 422),
        ("post", "/burnins", {"nodes": ["../dgx"] * 10_000}, 422),
        ("post", "/drains", {"nodes": "dgx[0-99999999]", "reason": "r"}, 422),
        ("post", "/drains", {"nodes": "a" + "[1]" * 660, "reason": "r"}, 422),
        ("post", "/drains", {"nodes": "dgx-\u0661/\u202e", "reason": "r"}, 422),
        ("post", "/acceptances", {"nodes": "[" * 1_999}, 422),
        ("post", "/gamedays", {"partition": "a\0b"}, 422),
        ("post", "/announcements", {"text": "\u202e\u2028"}, 422),
        ("post", "/announcements", {"text": "t", "starts_at": "0001-01-01T00:00:00+14:00"}, 422),
        ("post", "/announcements", {"text": "t", "ends_at": "9999-12-31T23:59:59-12:00"}, 422),
        ("post", "/maintenance", {"nodes": "a", "reason": "r", "starts_at": "0001-01-01T00:00:00Z",
                                  "ends_at": "9999-12-31T23:59:59Z"}, 422),
        ("put", "/policies", {"modes": {"a\0b": "act"}, "reason": "r"}, 422),
        ("post", "/health/rules/try", {"toml": "a = " + "[" * 9_000}, 422),
        ("post", "/health/rules/try", {"toml": "a." * 9_000 + "a = 1"}, 422),
        ("post", "/health/rules/try", {"toml": "x = " + "9" * 19_000}, 422),
    ],
)  # fmt: skip
def test_over_rest(method: str, path: str, body: Any, status: int) -> None:
    answer = send(bearer(sysadmin("ops"), "admin"), method, f"/api/v1{path}", body)
    assert answer.status_code == status, answer.content


@pytest.mark.parametrize(
    "path", [f"/health/rules/{NUL}", f"/health/entries?node={NUL}", f"/burnins?node={NUL}", f"/burnins/{10**30}"]
)
def test_pages(path: str) -> None:
    assert signed_in(sysadmin("ops")).get(path).status_code in {200, 404}


@pytest.mark.parametrize(
    "path", [f"/health/rules/{NUL}/off", f"/health/rules/{NUL}/delete", f"/drains/spares/{NUL}/remove"]
)
def test_forms(path: str) -> None:
    assert signed_in(sysadmin("ops")).post(path, {"version": "1", "reason": "r"}).status_code == 404
