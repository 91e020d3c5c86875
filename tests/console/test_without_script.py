"""Test that what a dialog asks about can be done without JavaScript, which opens the dialogs."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from jobs.models import SiteEntry
from portal.models import Channel
from tests.lab import a_project, signed_in
from tests.portal import behind_addresses

pytestmark = pytest.mark.django_db
ENTRY = {"name": "x.y", "role": "cause", "cause": "storage.io", "pattern": "tape", "advice": "Wait.", "source": "us"}


@pytest.fixture
def rows() -> behind_addresses.AddressedLab:
    return behind_addresses.fill(a_project())


def form_without_script(client: Client, address: str) -> str:
    """Return the action of the form that the page has for browsers without JavaScript."""
    forms = re.findall(r'<noscript><form [^>]*action="([^"]+)"><input [^>]*><button', client.get(address).text)
    assert len(forms) == 1
    return str(forms[0])


@pytest.mark.parametrize("address", ["/burnins/{burn_in_id}", "/acceptances/{acceptance_id}", "/gameday/{game_day_id}"])
def test_tests_of_nodes_are_cancelled(rows: behind_addresses.AddressedLab, address: str) -> None:
    client = signed_in(rows.ops)
    action = form_without_script(client, rows.path(address))
    assert action == rows.path(f"{address}/cancel")
    assert client.post(action).status_code == 302


def test_channels_and_catalogue_entries_are_removed(rows: behind_addresses.AddressedLab) -> None:
    client = signed_in(rows.ops)
    channel = Channel.objects.create(user=rows.ops, kind="email", address="ops@lab.example")
    SiteEntry.objects.create(**ENTRY)
    client.post(form_without_script(client, f"/channels/{channel.pk}"))
    client.post(form_without_script(client, "/catalogue/entries/x.y"))
    assert not Channel.objects.exists()
    assert not SiteEntry.objects.exists()
