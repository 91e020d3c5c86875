"""Static files: hashed names and compressed copies, made once by collectstatic."""

from whitenoise.storage import CompressedManifestStaticFilesStorage


class Storage(CompressedManifestStaticFilesStorage):
    manifest_strict = False
