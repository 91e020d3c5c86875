from django.db import migrations

FILL = """
    INSERT INTO jobs_listing
        (id, attempt_id, project_id, owner_id, kind, name, state, created_at, started_at, ended_at)
    SELECT j.id, j.latest_id, j.project_id, j.owner_id, j.kind, j.name, COALESCE(a.state, ''), j.created_at,
           COALESCE(a.started_at, '{never}'), COALESCE(a.ended_at, '{never}')
    FROM jobs_job j LEFT JOIN jobs_attempt a ON a.id = j.latest_id
    ORDER BY j.id"""


def fill(apps, schema_editor):
    """Before there are indexes: a million lines take seconds then."""
    never = "1970-01-01 00:00:00" + ("+00" if schema_editor.connection.vendor == "postgresql" else "")
    schema_editor.execute(FILL.format(never=never))


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0002_listing'),
    ]

    operations = [
        migrations.RunPython(fill, migrations.RunPython.noop, elidable=True),
    ]
