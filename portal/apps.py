from django.apps import AppConfig


class PortalConfig(AppConfig):
    name = "portal"
    verbose_name = "People and projects"

    def ready(self) -> None:
        from portal.site import checks  # noqa: F401  (registers them)
