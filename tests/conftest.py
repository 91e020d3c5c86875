"""Fixtures for every test: `portal_up` is a real portal shared by slow tests, `make_stack` makes portals to break."""

import fcntl
import gc
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

import portal.celery  # noqa: F401  (binds shared tasks to our broker, as every process of ours does)
from tests import migrated
from tests.examples import examples
from tests.landing import plugin as landing
from tests.missing_attributes import _no_missing_attributes  # noqa: F401
from tests.stack import Stack

# The same examples in every run, however loaded the machine: a failure is a change's, never the day's.
hypothesis.settings.register_profile(
    "vigil", max_examples=examples(100), derandomize=True, deadline=None, database=None
)
hypothesis.settings.load_profile("vigil")


# Without one of these pytest-django lets no test reach the database.
OPENS_DATABASE = {"db", "transactional_db", "django_db_reset_sequences", "django_db_serialized_rollback"}


def pytest_configure(config: pytest.Config) -> None:
    landing.register(config)


DATABASE_WORDS = re.compile(rf"\bdjango_db|\b(?:{'|'.join(OPENS_DATABASE)})\b|/outbox/")
"""Matches the path or text of files with database tests: by mark, fixture, or a folder whose fixtures use it."""


def _may_use_database(path: Path) -> bool:
    return DATABASE_WORDS.search(f"{path}\n{path.read_text()}") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without tests of this stage: importing them all takes each worker ten CPU seconds and more."""
    selection = config.option.markexpr
    if collection_path.suffix != ".py" or not selection.startswith(("slow", "database")):
        return None
    is_slow = selection.startswith("slow")
    has_tests = "mark.slow" in collection_path.read_text() if is_slow else _may_use_database(collection_path)
    return None if has_tests else True


def pytest_collection(session: pytest.Session) -> None:
    """Collect without the garbage collector: the many thousand test items are all still in use."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that use the database, and run files with many slow tests first, so that quick ones fill the end."""
    landing.leave_out(config, items)
    database = set[Path]()
    for item in items:
        if item.get_closest_marker("django_db") or OPENS_DATABASE & set(getattr(item, "fixturenames", ())):
            item.add_marker("database")
            database.add(item.path)
    missed = [str(path) for path in sorted(database) if not _may_use_database(path)]
    assert not missed, f"`make test-postgres` would skip {missed}: DATABASE_WORDS finds no use of the database there"
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Restore signal handlers, because processes started by later tests would inherit ignored or handled signals."""
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in watched}
    yield
    changed = [number for number in watched if signal.getsignal(number) != before[number]]
    for number in changed:
        signal.signal(number, before[number])
    assert not changed, f"left changed: {', '.join(number.name for number in changed)}"


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    django_db_modify_db_settings: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Share one worker's migrated database with the other workers, and drop PostgreSQL's whoever still uses it."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TEST_DATABASE") == "postgres":
            migrated.drop_with_sessions(patch)
        if "PYTEST_XDIST_WORKER" in os.environ:
            migrated.share(tmp_path_factory.getbasetemp().parent, patch)
        yield


@pytest.fixture(scope="session")
def prepared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home after a first start, to copy. All workers share it: migrating takes longer than everything else."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    home = folder / "prepared-home"
    with (folder / "prepared-home.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            stack = Stack()
            try:
                stack.prepare()
                shutil.copytree(stack.home, home)
            finally:
                stack.close()
    return home


@pytest.fixture(scope="session")
def portal_up(prepared_home: Path) -> Iterator[Stack]:
    """Return a running `vigil up`. It is shared: leave it running, and read only what your test created."""
    stack = Stack(prepared_home, VIGIL_LOCAL_TRUST="everyone")
    try:
        stack.start()
        yield stack
    finally:
        stack.close()


@pytest.fixture
def make_stack(request: pytest.FixtureRequest) -> Iterator[Callable[..., Stack]]:
    """Return a function that makes separate portals, not yet started; keyword arguments are environment variables."""
    created: list[Stack] = []

    def make(*, fresh: bool = False, **environment: str) -> Stack:
        created.append(Stack(None if fresh else request.getfixturevalue("prepared_home"), **environment))
        return created[-1]

    yield make
    for stack in created:
        stack.close()
