"""Run a management command of Django's or ours: `python -m console.manage check`."""

import os
import sys


def main(arguments: list[str]) -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")
    from django.core.management import execute_from_command_line

    try:
        import portal.settings  # noqa: F401
    except OSError as error:
        raise SystemExit(
            f"vigil: {error.filename} cannot be used: {error.strerror}. Create VIGIL_HOME as a folder of this user, or"
            " set another."
        ) from None
    import portal.celery  # noqa: F401  (binds shared tasks to our broker)

    execute_from_command_line(["vigil-manage", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
