from django.apps import AppConfig
from django.db.models.signals import post_migrate, pre_migrate


class JobsConfig(AppConfig):
    name = "jobs"
    verbose_name = "Jobs"

    def ready(self) -> None:
        from jobs.listing import triggers

        pre_migrate.connect(triggers.before_migrations, sender=self)
        post_migrate.connect(triggers.after_migrations, sender=self)
