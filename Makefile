# Every target works on a fresh Debian or Ubuntu machine with Python 3.11+ and make: it installs what it needs.
VENV ?= .venv
PYTHON_OF_VENV = $(VENV)/bin/python
UV = var/uv/bin/uv pip compile -q --python-version 3.11 --no-emit-index-url --no-emit-find-links --generate-hashes
INSTALL = sh docker/install.sh $(VENV)
export OMP_NUM_THREADS ?= 1
# If it were set, each of the thousands of processes started by the tests would compile our code again.
unexport PYTHONDONTWRITEBYTECODE

PYTEST = $(PYTHON_OF_VENV) -m pytest -q
QUICK = --dist loadscope --ignore tests/slurm
BUT_TRAINING = $(filter-out tests/training tests/slurm,$(patsubst %/__init__.py,%,$(wildcard tests/*/__init__.py)))
# EXHAUSTIVE=yes (set by test-all) also runs tests that repeat, in more layouts, what smaller tests prove.
NOT_EXHAUSTIVE = $(if $(filter yes,$(EXHAUSTIVE)),, and not exhaustive)
# Set by `.ci/run` if it does not run as root: a private Slurm needs root.
AS_ROOT ?=

.DEFAULT_GOAL := help
.PHONY: run demo install dev test test-fast test-quick test-ranks test-portal test-postgres test-slurm test-image test-all soak check \
	format bench lock clean help check-image check-code check-types check-imports check-templates check-migrations check-assets

run: install ## start the portal on http://127.0.0.1:8000 (VIGIL_PORT, VIGIL_HOME: docs/reference/settings.md)
	@exec $(PYTHON_OF_VENV) -m console.up --with-parent

demo: install ## the same with a demo lab
	@exec $(PYTHON_OF_VENV) -m console.up --with-parent --demo

install:
	@$(INSTALL) run

dev:
	@$(INSTALL) dev

# Two lanes run in parallel: CPU-bound tests with two workers, tests that mostly wait with three. var/seconds/ has the
# duration of each folder of tests, var/lanes/ the output of each stage.
test: dev ## all tests that need no Slurm: SQLite, PostgreSQL, browser, ranks, kill -9 (12 minutes on two cores)
	@$(PYTHON_OF_VENV) -m tests.lanes test-quick,test-postgres test-ranks test-portal

test-fast: dev ## the quick tests without the longest (90 seconds)
	@TEST_STAGE=$@ $(PYTEST) -n 3 $(QUICK) -m "not slow and not lengthy"

test-quick: dev ## the quick tests
	@TEST_STAGE=$@ $(PYTEST) -n 2 $(QUICK) -m "not slow"

test-ranks: dev ## the trainer with real ranks and launchers
	@TEST_STAGE=$@ $(PYTEST) -n 2 --dist loadscope --no-loadscope-reorder --durations 10 -m "slow$(NOT_EXHAUSTIVE)" tests/training

test-portal: dev ## complete portals, kill -9 of each of their processes, a browser; mostly waiting
	@TEST_STAGE=$@ $(PYTEST) -n 3 --dist loadscope --no-loadscope-reorder --durations 10 -m "slow$(NOT_EXHAUSTIVE)" $(BUT_TRAINING)

test-postgres: dev ## the quick tests that use the database, on a private PostgreSQL that they start
	@TEST_STAGE=$@ TEST_DATABASE=postgres TEST_PART=$(POSTGRES_PART) $(PYTEST) -n 2 $(QUICK) -m "database and not slow" $(BUT_TRAINING)

test-slurm: dev ## tests with a real Slurm, which they unpack and start (as root, on Debian): TEST_SLURM=24.11, or all releases
	@$(AS_ROOT) $(PYTHON_OF_VENV) -m tests.slurm.release $(filter-out 1,$(TEST_SLURM))
	@$(AS_ROOT) env TEST_STAGE=$@ TEST_TURN=$(if $(TEST_TURN),$(shell expr $(TEST_TURN) / 3)) TEST_SLURM=$(or $(TEST_SLURM),1) $(PYTEST) -n 4 --dist loadscope --durations 10 tests/slurm

check-image: ## check the image's steps and roles, as far as possible without a container engine
	@sh docker/check.sh

# As in .ci/run, a failed test is repeated once and listed under RERUN: among 15,000 tests of an hour some run out of time.
test-all: dev ## everything: every layout, three kills of each kind, three Slurms, the image (an hour)
	@PYTEST_ADDOPTS="$(PYTEST_ADDOPTS) --reruns 1 --max-suite-reruns 5 --rerun-show-tracebacks" EXHAUSTIVE=yes TEST_KILLS=3 TEST_SLURM=1 $(PYTHON_OF_VENV) -m tests.lanes \
		check,test-quick,test-ranks,test-postgres test-portal,test-slurm,check-image,test-image
	@$(PYTHON_OF_VENV) -m tests.landing.affected --record

test-image: dev ## build the images without a container engine and run every service of the compose file (as root, on Debian)
	@$(PYTHON_OF_VENV) -m tests.image

soak: dev ## every layout on up to 32 ranks, then twenty kills of each kind, in one job per kind (an hour)
	@TEST_COMBINATIONS=all $(PYTHON_OF_VENV) -m pytest -q --timeout 1800 tests/training/parallel
	@TEST_KILLS=20 $(PYTHON_OF_VENV) -m pytest -q --timeout 1200 tests/portal/test_up_kill.py tests/training/launch/test_launch_elastic.py

check: dev ## lint, format, types, import rules, templates, migrations
	@$(MAKE) --no-print-directory --keep-going --jobs 4 --output-sync=target \
		check-types check-migrations check-imports check-code check-templates check-assets

check-code:
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
# mypy's workers must start within three seconds; on a machine too busy for that (exit code 2), run it without workers.
check-types:
	@$(VENV)/bin/mypy --num-workers 2 || { [ $$? = 2 ] && $(VENV)/bin/mypy; }
check-imports:
	@$(VENV)/bin/lint-imports --no-cache >var/imports.log || { cat var/imports.log; exit 1; }
	@tail -n 1 var/imports.log
check-templates:
	@git ls-files -z -- 'templates/*.html' | xargs -0r $(VENV)/bin/djade --target-version 5.2 --check
check-migrations:
	@$(PYTHON_OF_VENV) manage.py makemigrations --check --dry-run
check-assets:
	@if command -v biome >/dev/null; then biome ci static/js static/css; else echo "biome is not installed: JavaScript and CSS were not checked"; fi

format: dev ## format code and templates
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .
	@git ls-files -z -- 'templates/*.html' | xargs -0r $(VENV)/bin/djade --target-version 5.2

bench: dev ## every benchmark, each against its limits
	@$(PYTHON_OF_VENV) -m bench

lock: dev ## update the lock files from requirements*.in
	@$(PYTHON_OF_VENV) -m venv var/uv && var/uv/bin/pip -q install uv
	@$(UV) requirements.in -o requirements.lock
	@$(UV) -c requirements.lock requirements-dev.in -o requirements-dev.lock
	@echo 'torch ; sys_platform == "none"' >var/without-torch.txt # the right build depends on the machine
	@$(UV) --override var/without-torch.txt -c requirements-dev.lock requirements-extras.in -o requirements-extras.lock

clean: ## remove the environment and the caches (data in var/ stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './var/*' -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done
