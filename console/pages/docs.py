"""The documentation of the version that runs, docs/*.md, as pages for everybody who is signed in."""

from __future__ import annotations

import re
from functools import cache

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from diagnosis import runbook
from portal import markdown
from vigil_core import installation

FOLDER = installation.site_files("docs")
GROUPS = {
    "Start here": ("jobspec", "lifecycle", "why", "scripting", "notices"),
    "Training": (
        "data", "finetuning", "checkpoints", "guards", "measuring", "parallelism", "communication", "compare", "export",
    ),
    "Federated training": ("federated", "federated-gallery"),
    "When something fails": ("postmortems", "reliability"),
    "For sysadmins": ("install", "settings", "slurm", "agent", "cluster", "metrics", "security"),
    "How it works": ("protocols", "benchmarks"),
}  # fmt: skip
"""The pages of each group, by the name of the file without `.md`, in the order of the index."""
PAGES = frozenset(name for names in GROUPS.values() for name in names)
_LINK = re.compile(r"([a-z-]+)\.md(#.*)?")
_PICTURE = re.compile(r"[a-z-]+\.svg")


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    groups = [(title, [(name, title_of(name)) for name in names]) for title, names in GROUPS.items()]
    return render(request, "portal/docs.html", {"section": "docs", "groups": groups})


@login_required
@require_safe
def page(request: HttpRequest, name: str) -> HttpResponse:
    """Show one file as a page, or send a picture that a page shows."""
    if _PICTURE.fullmatch(name) and (FOLDER / name).is_file():
        return HttpResponse((FOLDER / name).read_bytes(), content_type="image/svg+xml")
    if name not in PAGES:
        raise Http404
    context = {"section": "docs", "title": title_of(name), "html": html_of(name)}
    return render(request, "portal/doc.html", context)


@cache
def title_of(name: str) -> str:
    """Return the first heading of a file."""
    with (FOLDER / f"{name}.md").open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip().replace("`", "")


@cache
def html_of(name: str) -> SafeString:
    """Return a file as HTML, without its first heading. The files change only with the version."""
    text = runbook.without_title((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    return markdown.render_document(text, link=address)


def address(href: str) -> str:
    """Return where a link of a file leads on the portal; "" where the portal does not have it."""
    if href.startswith(("#", "http:", "https:")):
        return href
    if (found := _LINK.fullmatch(href)) and found[1] in PAGES:
        return reverse("doc", args=[found[1]]) + (found[2] or "")
    if _PICTURE.fullmatch(href):
        return reverse("doc", args=[href])
    code = runbook.linked_cause(href.removeprefix("runbooks/"))
    return reverse("runbook", args=[code]) if code else ""
