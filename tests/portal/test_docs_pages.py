"""Test the documentation on the portal: every file is a page, and no link on a page is broken."""

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


def test_index_links_to_every_page(reader: Client) -> None:
    files = {path.relative_to(docs.FOLDER).with_suffix("").as_posix() for path in docs.FOLDER.glob("[a-z]*/*.md")}
    assert {name for name in files if not name.startswith(("decisions/", "runbooks/"))} == docs.PAGES
    index = reader.get("/docs").text
    assert [name for name in sorted(docs.PAGES) if f'href="/docs/{name}">' not in index] == []


def test_links_pictures_and_anchors_lead_somewhere(reader: Client) -> None:
    articles = {name: docs.html_of(name) for name in [*docs.PAGES, docs.INDEX]}
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
    assert 'src="/docs/how-to/compare.svg"' in articles["how-to/compare"]
    assert 'href="/runbooks/' in articles["reference/federated"]


def test_unknown_pages_are_not_found(reader: Client) -> None:
    for name in ("nowhere", "..%2Fmanage.py", "images/job.png", "template", "nowhere.svg", "decisions/template"):
        assert reader.get(f"/docs/{name}").status_code == 404
    assert Client().get("/docs").status_code == 302


@pytest.mark.parametrize(("former", "page"), [("jobspec", "reference/jobspec"), ("scripting", "reference/cli")])
def test_addresses_of_version_0_1_redirect(reader: Client, former: str, page: str) -> None:
    answer = reader.get(f"/docs/{former}")
    assert (answer.status_code, answer["Location"]) == (301, f"/docs/{page}")


def test_a_link_that_leads_nowhere_is_text() -> None:
    html = markdown.render_document(
        "# A b, c\n\n[x](gone.md) [y](here.md)", link=lambda href: "/h" * (href == "here.md")
    )
    assert html == '<h1 id="a-b-c">A b, c</h1>\n<p>x <a href="/h">y</a></p>\n'
