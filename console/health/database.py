"""Check that the database answers."""

from __future__ import annotations

from collections.abc import Iterator

from django.db import DatabaseError, connection

from console.health.finding import Finding


def check() -> Iterator[Finding]:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError as error:
        connection.close()
        yield Finding(
            "database",
            "database",
            "error",
            "The database does not answer.",
            " ".join(str(error).split())[:300],
            "Start the database server, or correct DATABASE_URL; for SQLite, check if its disk is full or read-only.",
        )
