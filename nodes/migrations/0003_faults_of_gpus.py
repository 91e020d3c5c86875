"""What a GPU's counters say is broken, as a column: the map of thousands of GPUs reads it."""

from django.db import migrations, models


def fill(apps, schema_editor):
    """An agent reports counters only when they change, so those that are stored have to speak for themselves."""
    gpus = apps.get_model("nodes", "Gpu").objects
    faults = (
        ("ecc_uncorrected", "has had uncorrectable memory errors and needs a reset"),
        ("recovery_action", "asks for a repair"),
        ("sram_threshold_exceeded", "has had more SRAM errors than its maker allows and has to be replaced"),
        ("remapped_failed", "could not remap a row of its memory and has to be replaced"),
    )
    for name, fault in faults:  # the worst comes last
        gpus.filter(**{f"counters__{name}__gt": 0}).update(fault=fault)


class Migration(migrations.Migration):
    dependencies = [("nodes", "0002_machines_tell_of_themselves")]

    operations = [
        migrations.AddField(
            model_name="gpu",
            name="fault",
            field=models.CharField(
                blank=True, help_text="The worst that its counters show (gpus.health), as a page says it.", max_length=200
            ),
        ),
        migrations.RunPython(fill, migrations.RunPython.noop, elidable=True),
    ]
