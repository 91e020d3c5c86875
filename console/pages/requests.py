"""Tell a request for a page from htmx's request for its live part."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse


def vary_on_fragment(response: HttpResponse) -> HttpResponse:
    """Mark the response as varying: page and fragment share an address, and no cache may mix them up."""
    response.headers["Vary"] = "HX-Request, HX-Target, Cookie"
    return response


def is_fragment(request: HttpRequest) -> bool:
    """Return whether only the live part of the page is requested."""
    return request.headers.get("HX-Target") == "live"
