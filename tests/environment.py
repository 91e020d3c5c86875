"""Give every test process a home of its own; loaded before Django (see `-p` in pyproject.toml).

TEST_DATABASE=postgres runs on a private PostgreSQL; TEST_DATABASE_URL names an existing one.
"""

import atexit
import os
import shutil
import signal
import sys
import tempfile

# As in a terminal, whoever runs the tests: in the background a shell makes every process ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")
_home = tempfile.mkdtemp(prefix="vigil-test-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
os.environ["VIGIL_HOME"] = _home
os.mkdir(os.path.join(_home, "static"))  # whitenoise warns where there is none
os.environ["SECRET_KEY"] = "a key for tests only, as long as a real one would be"

if os.environ.get("TEST_DATABASE") == "postgres" and "TEST_DATABASE_URL" not in os.environ:
    from tests.postgres import NoPostgres, postgres

    # The workers of xdist inherit the variable and so share this one cluster, each with a database of its own.
    _cluster = postgres()
    try:
        os.environ["TEST_DATABASE_URL"] = _cluster.__enter__()
    except NoPostgres as error:
        sys.exit(str(error))
    atexit.register(_cluster.__exit__, None, None, None)

# Settings of a developer's own portal are none of ours.
for _name in ("DATABASE_URL", "REDIS_URL", *(name for name in os.environ if name.startswith("VIGIL_"))):
    if _name == "VIGIL_HOME":
        continue
    if f"TEST_{_name}" in os.environ:
        os.environ[_name] = os.environ[f"TEST_{_name}"]
    else:
        os.environ.pop(_name, None)
