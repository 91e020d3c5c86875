"""Which cause of an incident the machine or the scheduler itself supports. Verdicts from before are taken to be so."""

from django.db import migrations, models
from django.db.models import F

OF_SYSADMINS = (
    "gpu.ecc", "gpu.off_bus", "gpu.firmware", "gpu.nvlink", "gpu.thermal", "network.fabric", "storage.full", "storage.io",
    "numerics.corruption", "environment.driver", "scheduler.node_fail", "scheduler.launch",
)


def confirm(apps, schema_editor):
    incidents = apps.get_model("jobs", "Incident").objects.filter(overruled_at=None)
    incidents.filter(cause__in=OF_SYSADMINS).update(confirmed_cause=F("cause"))


class Migration(migrations.Migration):
    dependencies = [("jobs", "0016_refused_combinations_of_sweeps")]

    operations = [
        migrations.AddField(
            model_name="incident",
            name="confirmed_cause",
            field=models.CharField(
                blank=True,
                default="",
                help_text="What sysadmins must act on by the word of the machine or the scheduler, whatever people say.",
                max_length=32,
            ),
            preserve_default=False,
        ),
        migrations.RunPython(confirm, migrations.RunPython.noop, elidable=True),
    ]
