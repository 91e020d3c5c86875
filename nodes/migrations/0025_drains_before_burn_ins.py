from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("nodes", "0024_planted_orders")]

    operations = [
        migrations.AddField(
            model_name="burnin",
            name="unknown_since",
            field=models.DateTimeField(
                blank=True, help_text="Since when the scheduler does not know the job, or its state.", null=True
            ),
        ),
        migrations.AddField(
            model_name="burninnode",
            name="was_drained_by_person",
            field=models.BooleanField(
                default=False, help_text="It was drained, and not by one of Vigil's health rules."
            ),
        ),
        migrations.AlterField(
            model_name="burnin",
            name="tried_at",
            field=models.DateTimeField(
                blank=True, help_text="Last call to the scheduler that failed, or that cancelled the tests.", null=True
            ),
        ),
    ]
