"""Configure the admin ("records"), with Vigil's appearance and wording. It holds every app's, for sysadmins only."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.apps import apps
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest
from django.templatetags.static import static
from django.urls import reverse
from unfold.sites import UnfoldAdminSite

from portal.models import User

BACK = (("home", "Home", "home"), ("jobs", "Jobs", "list"), ("nodes", "Nodes", "dns"), ("me", "You", "person"))
OURS = ("jobs", "nodes", "portal")
APPS = {"axes": "portal"}  # the section for records of third-party apps
LABELS = {
    "is made up": "demo data", "heard at": "last report", "sampled at": "newest sample", "asked by": "requested by",
    "asked at": "requested at", "given up": "discarded batches", "boot id": "boot ID",
}  # fmt: skip
WORDS = {
    "cpus": "CPUs", "gpu": "GPU", "gpus": "GPUs", "uuid": "UUID", "mib": "(MiB)", "toml": "TOML", "qos": "QOS",
    "id": "ID", "url": "URL", "mig": "MIG", "nvlink": "NVLink",
}  # fmt: skip
"""Labels of columns: Django writes field names with one capital letter, such as "Cpus"."""


def _label_fields(model: type[Model]) -> None:
    """Give the fields of one of our models labels in plain English. Migrations do not see them."""
    for field in model._meta.fields if model.__module__.split(".")[0] in OURS else ():
        label = str(field.verbose_name)
        field.verbose_name = LABELS.get(label) or " ".join(WORDS.get(word, word) for word in label.split())


class Records(UnfoldAdminSite):
    """Django's admin, restricted to superusers: staff status is not enough."""

    index_title = "Administration"

    def has_permission(self, request: HttpRequest) -> bool:
        return isinstance(request.user, User) and request.user.is_sysadmin

    def admin_view(self, view: Callable[..., Any], cacheable: bool = False) -> Callable[..., Any]:
        """Answer 403 to signed-in people without access; Django would redirect them in a circle."""
        inner = super().admin_view(view, cacheable)

        @wraps(inner)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            if request.user.is_authenticated and not self.has_permission(request):
                raise PermissionDenied("Only sysadmins can open the administration pages.")
            return inner(request, *args, **kwargs)

        return guarded

    def register(self, models: Any, admin_class: Any = None, **options: Any) -> None:
        """Register as Django does; the class's `called` sets the displayed names, singular and plural.

        The names are not stored in the models' Meta, so changing them needs no migration.
        """
        super().register(models, admin_class, **options)
        for model in [models] if isinstance(models, type) else models:
            _label_fields(model)
        if called := getattr(admin_class, "called", None):
            for model in models:
                model._meta.verbose_name, model._meta.verbose_name_plural = called
                if ours := APPS.get(model._meta.app_label):
                    model._meta.app_config.verbose_name = apps.get_app_config(ours).verbose_name

    def get_app_list(self, request: HttpRequest, app_label: str | None = None) -> list[Any]:
        """Return every app's records, those of libraries among ours."""
        found: dict[str, Any] = {app["app_label"]: app for app in super().get_app_list(request)}
        for stranger, ours in APPS.items():
            if stranger in found and ours in found:
                found[ours]["models"] += found.pop(stranger)["models"]
        for app in found.values():
            app["models"].sort(key=lambda model: str(model["name"]).lower())
        label = APPS.get(app_label or "", app_label)
        return [app for app in found.values() if label in {None, app["app_label"]}]

    def each_context(self, request: HttpRequest) -> dict[str, Any]:
        theme = request.COOKIES.get("theme")
        icon = static("favicon.svg")
        appearance = {
            "site_title": "Vigil",
            "site_header": "Vigil",
            "site_subheader": "Administration",
            "site_icon": icon,
            "site_favicons": [{"rel": "icon", "href": icon, "type": "image/svg+xml"}],
            "styles": [static("css/tokens.css"), static("css/records.css")],
            "colors": None,  # set in static/css/records.css
            "theme": theme if theme in {"light", "dark"} else None,
            "sidebar_navigation": self._navigation(request) if self.has_permission(request) else [],
        }
        return {**super().each_context(request), **appearance}

    def _navigation(self, request: HttpRequest) -> list[dict[str, Any]]:
        """Return the navigation: first the link back to the pages, then all records."""
        back: list[dict[str, Any]] = [
            {"title": title, "icon": icon, "link": reverse(name), "active": False} for name, title, icon in BACK
        ]
        groups: list[dict[str, Any]] = [{"title": "Portal", "items": back}]
        for app in self.get_app_list(request):
            items = [{"title": model["name"], "link": model["admin_url"]} for model in app["models"]]
            groups.append({"title": app["name"], "separator": True, "items": items})
        return [{**group, "items": self._get_navigation_items(request, group["items"])} for group in groups]


site = Records(name="admin")
