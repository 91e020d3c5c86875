"""Render people's Markdown as HTML that is safe to embed: their own HTML is shown as text, and nothing is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from urllib.parse import urlsplit

from django.utils.safestring import SafeString
from markdown_it import MarkdownIt
from markdown_it.token import Token

MAX_CHARACTERS = 20_000  # that are read
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def render(text: str, *, deeper: int = 1, link: Callable[[str], str] | None = None) -> SafeString:
    """Return the HTML. Headings are `deeper` levels down, so never the page's own <h1>; `link` rewrites addresses.

    Raw HTML, pictures, and addresses other than web, e-mail and this site come out as the original text.
    """
    parser = _parser()
    tokens = parser.parse(text[:MAX_CHARACTERS])
    for token in _all(tokens):
        if token.type in {"heading_open", "heading_close"}:
            token.tag = f"h{min(max(int(token.tag[1]) + deeper, 2), 6)}"
        if token.type == "link_open":
            _secure_link(token, link)
    return SafeString(parser.renderer.render(tokens, parser.options, {}))


def render_document(text: str, *, link: Callable[[str], str]) -> SafeString:
    """Return one of Vigil's own documents as HTML: of any length, with pictures, its headings as anchors.

    `link` rewrites the addresses of links and pictures. A link for which it returns "" is shown as plain text.
    """
    parser = _document_parser()
    tokens = parser.parse(text)
    for place, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrs["id"] = anchor(tokens[place + 1].content)
        for child in token.children or ():
            if child.type == "image":
                child.attrs["src"] = link(str(child.attrs["src"]))
        _unlink(token.children or [], link)
    return SafeString(parser.renderer.render(tokens, parser.options, {}))


def anchor(heading: str) -> str:
    """Return the id of a heading, as GitHub makes it: "Run directories" is `run-directories`."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _unlink(tokens: Sequence[Token], link: Callable[[str], str]) -> None:
    """Rewrite the links of a line, and hide the tags of those whose rewritten address is empty."""
    is_dead = False
    for token in tokens:
        if token.type == "link_open":
            _secure_link(token, link)
            is_dead = not token.attrs["href"]
        if token.type in {"link_open", "link_close"}:
            token.hidden = is_dead


@cache
def _parser() -> MarkdownIt:
    return _document_parser().disable("image")


def _document_parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.validateLink = _is_harmless  # type: ignore[method-assign]
    return parser


def _all(tokens: Sequence[Token]) -> list[Token]:
    return [child for token in tokens for child in (token, *(token.children or ()))]


def _secure_link(token: Token, link: Callable[[str], str] | None) -> None:
    href = str(token.attrs.get("href", ""))
    if link is not None:
        href = link(href)
        token.attrs["href"] = href
    if urlsplit(href).netloc:
        token.attrs["rel"] = "noopener noreferrer nofollow"


def _is_harmless(url: str) -> bool:
    scheme = _SCHEME.match(url.strip())
    return scheme is None or scheme[0].lower() in {"http:", "https:", "mailto:"}
