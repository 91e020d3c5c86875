"""Static files: hashed names and compressed copies, made once by collectstatic."""

from __future__ import annotations

import re
from typing import Any

from django.core.files.base import ContentFile, File
from whitenoise.storage import CompressedManifestStaticFilesStorage

# What ninja has for a page that we do not show, and for reading the code of the one that we do: 5 MB.
UNUSED = ["redoc.*", "swagger-ui-bundle.js.map"]
COMMENTS = re.compile(rb"^[ \t]*(?://.*|/\*\*.*\*/)\n", re.MULTILINE)


class Storage(CompressedManifestStaticFilesStorage):
    """Modules that import each other keep doing so: collectstatic writes the hashed names into their imports.

    Only ours do, and looking for imports in others' megabytes would take two thirds of a first start.
    """

    support_js_module_import_aggregation = True
    manifest_strict = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._patterns["js/*.js"] = self._patterns.pop("*.js")

    def _save(self, name: str, content: File[Any]) -> str:
        """Our own scripts go out without the lines that are for who writes them: a sixth of all that is sent."""
        if name.startswith("js/"):
            content = ContentFile(COMMENTS.sub(b"", b"".join(content.chunks())))
        saved: str = super()._save(name, content)
        return saved

    def stored_name(self, name: str) -> str:
        """The hashed name, or the plain one where nothing was collected (tests, and a file that is missing)."""
        hashed: str | None = self.hashed_files.get(self.hash_key(self.clean_name(name)))
        return hashed or name
