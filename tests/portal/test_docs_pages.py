"""The documentation on the portal: every file is a page, and no link of a page leads nowhere."""

from __future__ import annotations

import re
from html import unescape

import pytest
from django.test import Client

from console.pages import docs
from portal import markdown
from tests import lab

pytestmark = pytest.mark.django_db


@pytest.fixture
def reader() -> Client:
    return lab.signed_in(lab.person("yuki"))


def test_every_file_is_in_the_index_once(reader: Client) -> None:
    files = sorted(path.stem for path in docs.FOLDER.glob("*.md"))
    assert sorted(name for names in docs.GROUPS.values() for name in names) == files
    index = reader.get("/docs").text
    assert all(f'href="/docs/{name}">' in index for name in files)
    assert "A job&#x27;s specification" in index


def test_links_pictures_and_anchors_lead_somewhere(reader: Client) -> None:
    articles = {name: docs.html_of(name) for name in docs.PAGES}
    found = [
        (name, *unescape(address).partition("#")[::2])
        for name, html in articles.items()
        for address in re.findall(r'(?:href|src)="([^"]*)"', html)
        if not address.startswith("http")
    ]
    for path in {path for _, path, _ in found if path}:
        assert reader.get(path).status_code == 200, path
    for name, path, anchor in found:
        if anchor and not path.startswith("/runbooks/"):
            assert f'id="{anchor}"' in articles[path.removeprefix("/docs/") or name], f"{name}: {path}#{anchor}"
    assert 'src="/docs/compare.svg"' in articles["compare"]
    assert 'href="/runbooks/' in articles["federated"]


def test_what_is_no_page_is_not_there(reader: Client) -> None:
    for name in ("nowhere", "..%2Fmanage.py", "screenshot.png", "template", "nowhere.svg"):
        assert reader.get(f"/docs/{name}").status_code == 404
    assert Client().get("/docs").status_code == 302


def test_a_link_that_leads_nowhere_is_text() -> None:
    html = markdown.render_document(
        "# A b, c\n\n[x](gone.md) [y](here.md)", link=lambda href: "/h" * (href == "here.md")
    )
    assert html == '<h1 id="a-b-c">A b, c</h1>\n<p>x <a href="/h">y</a></p>\n'
