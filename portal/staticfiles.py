"""Static files: hashed names and compressed copies, made once by collectstatic."""

from whitenoise.storage import CompressedManifestStaticFilesStorage


class Storage(CompressedManifestStaticFilesStorage):
    """Modules that import each other keep doing so: collectstatic writes the hashed names into their imports."""

    support_js_module_import_aggregation = True
    manifest_strict = False

    def stored_name(self, name: str) -> str:
        """The hashed name, or the plain one where nothing was collected (tests, and a file that is missing)."""
        hashed: str | None = self.hashed_files.get(self.hash_key(self.clean_name(name)))
        return hashed or name
