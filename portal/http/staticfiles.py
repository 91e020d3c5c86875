"""Store static files under hashed names with compressed copies, made once by collectstatic."""

from __future__ import annotations

import re
from typing import Any

from django.core.files.base import ContentFile, File
from whitenoise.storage import CompressedManifestStaticFilesStorage

# Files that ninja ships for a page that is not shown, and for debugging the one that is: 5 MB.
UNUSED = ["redoc.*", "swagger-ui-bundle.js.map"]
COMMENTS = re.compile(rb"^[ \t]*(?://.*|/\*\*.*\*/)\n", re.MULTILINE)


class Storage(CompressedManifestStaticFilesStorage):
    """Keep modules' imports of each other working: collectstatic writes the hashed names into them.

    Only our modules import each other; searching megabytes of others' code would take two thirds of a first start.
    """

    support_js_module_import_aggregation = True
    manifest_strict = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._patterns["js/*.js"] = self._patterns.pop("*.js")

    def _save(self, name: str, content: File[Any]) -> str:
        """Save our own scripts without comment lines, a sixth of everything sent."""
        if name.startswith("js/"):
            content = ContentFile(COMMENTS.sub(b"", b"".join(content.chunks())))
        saved: str = super()._save(name, content)
        return saved

    def stored_name(self, name: str) -> str:
        """Return the hashed name, or the plain one if nothing was collected (in tests, or for a missing file)."""
        hashed: str | None = self.hashed_files.get(self.hash_key(self.clean_name(name)))
        return hashed or name
