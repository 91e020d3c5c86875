"""Test that a number that no row can have is answered like any other that is unknown."""

from __future__ import annotations

import pytest

from tests.lab import bearer, signed_in, sysadmin

pytestmark = pytest.mark.django_db
TOO_LARGE = 2**63


@pytest.mark.parametrize("address", ["acceptances/{}", "burnins/{}", "gameday/{}"])
def test_pages(address: str) -> None:
    assert signed_in(sysadmin("ops")).get(f"/{address.format(TOO_LARGE)}").status_code == 404


@pytest.mark.parametrize(
    "address",
    ["announcements/{}/withdraw", "maintenance/{}/cancel", "nodes/dgx-01/notes/{}/remove", "burnins/{}/cancel"],
)
def test_posts(address: str) -> None:
    assert signed_in(sysadmin("ops")).post(f"/{address.format(TOO_LARGE)}").status_code == 404


@pytest.mark.parametrize("address", ["acceptances/{}", "burnins/{}", "gamedays/{}", "health/{}"])
def test_reads_of_the_api(address: str) -> None:
    assert bearer(sysadmin("ops"), "admin").get(f"/api/v1/{address.format(TOO_LARGE)}").status_code == 404


@pytest.mark.parametrize("address", ["maintenance/{}/cancel", "announcements/{}/withdraw"])
def test_posts_to_the_api(address: str) -> None:
    assert bearer(sysadmin("ops"), "admin").post(f"/api/v1/{address.format(TOO_LARGE)}").status_code == 404
