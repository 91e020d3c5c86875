from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("nodes", "0021_indexes_for_long_histories")]

    operations = [
        migrations.AddField(
            model_name="agent",
            name="plant",
            field=models.JSONField(
                blank=True,
                default=dict,
                editable=False,
                help_text="The fault that a game day wants planted: {}: none.",
            ),
        ),
        migrations.AddField(
            model_name="healthentry",
            name="is_planted",
            field=models.BooleanField(default=False, help_text="All its evidence was planted by a game day."),
        ),
        migrations.AlterField(
            model_name="nodeevent",
            name="code",
            field=models.IntegerField(
                blank=True, help_text="The number of an Xid, SXid or planted fault.", null=True
            ),
        ),
    ]
