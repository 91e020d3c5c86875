"""Test the names of files that browsers save."""

from __future__ import annotations

import pytest
from django.http import HttpResponse

from portal.http.download import as_download


@pytest.mark.parametrize(("name", "header"), [
    ("job-7.csv", 'attachment; filename="job-7.csv"'),
    ('rank-0 "a".log', r'attachment; filename="rank-0 \"a\".log"'),
    ("größe.csv", "attachment; filename*=utf-8''gr%C3%B6%C3%9Fe.csv"),
])  # fmt: skip
def test_names_of_downloads_are_quoted(name: str, header: str) -> None:
    assert as_download(HttpResponse(), name).headers["Content-Disposition"] == header
