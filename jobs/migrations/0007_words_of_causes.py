
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('jobs', '0006_indexes_of_disk'),
    ]

    operations = [
        migrations.AlterField(
            model_name='attempt',
            name='cause',
            field=models.CharField(blank=True, help_text='Why it ended, in one word: completed, stopped, exception …', max_length=32),
        ),
    ]
