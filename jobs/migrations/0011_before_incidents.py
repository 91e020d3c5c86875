"""What was before there were incidents, in the words of today."""

from django.db import migrations
from django.db.models import Exists, OuterRef


def leave_out(apps, schema_editor):
    """What had closed counts as counted: how often it failed, nobody has noted."""
    apps.get_model("jobs", "Attempt").objects.exclude(closed_at=None).update(is_counted=True)


def say_which_start_back(apps, schema_editor):
    """Those that Vigil set back were told by how the one before them had ended."""
    attempts = apps.get_model("jobs", "Attempt").objects
    before = attempts.filter(job=OuterRef("job"), number=OuterRef("number") - 1, cause__in=("diverged", "corruption"))
    back = attempts.filter(Exists(before), origin="restarted", resume_from__isnull=False)
    attempts.filter(pk__in=list(back.values_list("pk", flat=True))).update(starts_back=True)


class Migration(migrations.Migration):
    dependencies = [("jobs", "0010_failures")]

    operations = [
        migrations.RunPython(leave_out, migrations.RunPython.noop, elidable=True),
        migrations.RunPython(say_which_start_back, migrations.RunPython.noop, elidable=True),
    ]
