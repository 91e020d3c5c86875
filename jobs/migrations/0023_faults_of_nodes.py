import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("jobs", "0022_game_days"), ("nodes", "0022_planted_faults")]

    operations = [
        migrations.AddField(
            model_name="drill",
            name="entry",
            field=models.ForeignKey(
                blank=True,
                db_index=False,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to="nodes.healthentry",
            ),
        ),
        migrations.AddField(
            model_name="drill",
            name="in_service_s",
            field=models.FloatField(blank=True, help_text="Until the drained node was back in service.", null=True),
        ),
        migrations.AddField(
            model_name="drill",
            name="slurm",
            field=models.CharField(blank=True, help_text="The node's version of Slurm.", max_length=64),
        ),
        migrations.AlterField(
            model_name="drill",
            name="cause",
            field=models.CharField(
                blank=True, help_text="The verdict, or the health rule that noticed it.", max_length=64
            ),
        ),
    ]
