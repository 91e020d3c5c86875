from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0003_listing_filled'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['state', 'id'], name='listing_state'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['name', 'id'], name='listing_name'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['started_at', 'id'], name='listing_started'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['ended_at', 'id'], name='listing_ended'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['created_at', 'id'], name='listing_created'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['kind', 'id'], name='listing_kind'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['owner_id', 'id'], name='listing_owner'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['project_id', 'id'], name='listing_of_project'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['project_id', 'state', 'id'], name='listing_of_project_state'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['project_id', 'name', 'id'], name='listing_of_project_name'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['project_id', 'started_at', 'id'], name='listing_of_project_started'),
        ),
        migrations.AddIndex(
            model_name='listing',
            index=models.Index(fields=['project_id', 'ended_at', 'id'], name='listing_of_project_ended'),
        ),
    ]
