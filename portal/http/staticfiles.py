"""Static files: hashed names and compressed copies, made once by collectstatic."""

from typing import Any

from whitenoise.storage import CompressedManifestStaticFilesStorage

# What ninja has for a page that we do not show, and for reading the code of the one that we do: 5 MB.
UNUSED = ["redoc.*", "swagger-ui-bundle.js.map"]


class Storage(CompressedManifestStaticFilesStorage):
    """Modules that import each other keep doing so: collectstatic writes the hashed names into their imports.

    Only ours do, and looking for imports in others' megabytes would take two thirds of a first start.
    """

    support_js_module_import_aggregation = True
    manifest_strict = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._patterns["js/*.js"] = self._patterns.pop("*.js")

    def stored_name(self, name: str) -> str:
        """The hashed name, or the plain one where nothing was collected (tests, and a file that is missing)."""
        hashed: str | None = self.hashed_files.get(self.hash_key(self.clean_name(name)))
        return hashed or name
