"""Loaded before Django (see `-p` in pyproject.toml): every test process gets a home of its own."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
if "VIGIL_TEST_HOME" not in os.environ:
    _home = tempfile.mkdtemp(prefix="vigil-test-")
    atexit.register(shutil.rmtree, _home, ignore_errors=True)
    os.environ["VIGIL_HOME"] = _home
    os.environ["SECRET_KEY"] = "a key for tests only, as long as a real one would be"
for _name in ("DATABASE_URL", "REDIS_URL", "VIGIL_RUNS", "VIGIL_PUBLIC_URL", "VIGIL_PORT"):
    if f"TEST_{_name}" in os.environ:
        os.environ[_name] = os.environ[f"TEST_{_name}"]
    else:
        os.environ.pop(_name, None)
