"""What every page's frame needs."""

from django.http import HttpRequest


def context(request: HttpRequest) -> dict[str, object]:
    theme = request.COOKIES.get("theme")
    return {"theme": theme if theme in {"light", "dark"} else None}
