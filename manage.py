#!/usr/bin/env python
"""Django's command-line door."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")
    from django.core.management import execute_from_command_line

    import portal.celery  # noqa: F401  (binds shared tasks to our broker)

    execute_from_command_line(sys.argv)
