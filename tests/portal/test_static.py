"""Test static files as browsers receive them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from django.core.files.base import ContentFile
from django.http import HttpResponse
from django.test import RequestFactory

from portal.http.middleware import StaticFiles
from portal.http.staticfiles import Storage


@pytest.fixture
def served(tmp_path: Path) -> StaticFiles:
    (tmp_path / "a.js").write_text("export const a = 1;")
    middleware = StaticFiles(lambda request: HttpResponse(status=404))
    path = str(tmp_path / "a.js")
    middleware.files["/static/a.js"] = middleware.get_static_file(path, "/static/a.js", {path: os.stat(path)})
    return middleware


def test_a_file_is_answered_whole_with_its_type(served: StaticFiles) -> None:
    answer = served(RequestFactory().get("/static/a.js"))
    assert (answer.status_code, answer.content) == (200, b"export const a = 1;")
    assert not answer.streaming
    assert answer.headers["Content-Type"].startswith("text/javascript")
    assert answer.headers["Content-Length"] == "19"


def test_parts_and_unchanged_files_are_not_sent_again(served: StaticFiles) -> None:
    whole = served(RequestFactory().get("/static/a.js"))
    part = served(RequestFactory().get("/static/a.js", headers={"range": "bytes=0-5"}))
    assert (part.status_code, part.content) == (206, b"export")
    since = {"if-modified-since": whole.headers["Last-Modified"]}
    assert served(RequestFactory().get("/static/a.js", headers=since)).status_code == 304
    assert served(RequestFactory().head("/static/a.js")).content == b""
    assert served(RequestFactory().get("/static/b.js")).status_code == 404


def test_scripts_of_ours_go_out_without_their_comments(tmp_path: Path) -> None:
    storage = Storage(location=tmp_path, base_url="/static/")
    script = b'// Why.\n/** What. */\nconst a = "//x"; // kept\n  // indented\nconst b = 1 // 2;\n'
    for name in ("js/a.js", "vendor/a.js"):
        content = ContentFile(script)
        content.read()  # as collectstatic has read it
        storage.save(name, content)
    assert (tmp_path / "js/a.js").read_bytes() == b'const a = "//x"; // kept\nconst b = 1 // 2;\n'
    assert (tmp_path / "vendor/a.js").read_bytes() == script
