"""Serve the documentation of the running version: docs/README.md is the index, each file below it a page."""

from __future__ import annotations

import posixpath
import re
from functools import cache

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from diagnosis import runbook
from portal import markdown
from vigil_core import installation

FOLDER = installation.site_files("docs")
DIVISIONS = ("roles", "tutorials", "how-to", "explanations", "reference")
INDEX = "README"
PAGES = frozenset(
    path.relative_to(FOLDER).with_suffix("").as_posix() for name in DIVISIONS for path in FOLDER.glob(f"{name}/*.md")
)
"""Names of the pages: `tutorials/first-job`."""
FORMER = {"scripting": "reference/cli"}
"""Pages of version 0.1 that now have another name. Links in old e-mails and bookmarks still lead to them."""
_PICTURE = re.compile(r"([a-z-]+/)?[a-z-]+\.svg")
FILES = frozenset({"monitoring/alerts.yml", "monitoring/grafana.json"})
"""Files that pages link to for download."""


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    return render(request, "portal/docs.html", {"section": "docs", "html": html_of(INDEX)})


@login_required
@require_safe
def page(request: HttpRequest, name: str) -> HttpResponse:
    """Show one file as a page, or send a picture or a file that pages link to."""
    if _PICTURE.fullmatch(name) and (FOLDER / name).is_file():
        return HttpResponse((FOLDER / name).read_bytes(), content_type="image/svg+xml")
    if name in FILES:
        return HttpResponse((FOLDER / name).read_bytes(), content_type="text/plain; charset=utf-8")
    if name not in PAGES:
        return redirect("doc", page_of_former_name(name), permanent=True)
    context = {"section": "docs", "title": title_of(name), "html": html_of(name)}
    return render(request, "portal/doc.html", context)


def page_of_former_name(name: str) -> str:
    """Return the page that had this name before the pages were divided; raises Http404 if there was none."""
    moved = (f"{division}/{name}" for division in ("reference", "how-to", "explanations"))
    page = FORMER.get(name) or next((page for page in moved if page in PAGES), None)
    if page is None:
        raise Http404
    return page


@cache
def title_of(name: str) -> str:
    """Return the first heading of a file."""
    with (FOLDER / f"{name}.md").open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip().replace("`", "")


@cache
def html_of(name: str) -> SafeString:
    """Return a file as HTML, without its first heading. The files change only with the version."""
    text = runbook.without_title((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    return markdown.render_document(text, link=lambda href: address(href, posixpath.dirname(name)))


def address(href: str, folder: str = "") -> str:
    """Return the portal's address of a link in a file of `folder`; "" if the portal does not serve its target."""
    if href.startswith(("#", "http:", "https:")):
        return href
    path, hash_sign, anchor = href.partition("#")
    target = posixpath.normpath(posixpath.join(folder, path))
    if target.removesuffix(".md") in PAGES:
        return reverse("doc", args=[target.removesuffix(".md")]) + hash_sign + anchor
    if target == f"{INDEX}.md":
        return reverse("docs") + hash_sign + anchor
    if _PICTURE.fullmatch(target) or target in FILES:
        return reverse("doc", args=[target])
    code = runbook.linked_cause(target.removeprefix("runbooks/"))
    return reverse("runbook", args=[code]) if code else ""
