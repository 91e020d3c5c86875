# Everything here works on a fresh Debian or Ubuntu machine with Python 3.11+ and make: each target installs what it needs.
VENV ?= .venv
PYTHON_OF_VENV = $(VENV)/bin/python
UV = var/uv/bin/uv pip compile -q --python-version 3.11 --no-emit-index-url --no-emit-find-links --generate-hashes
INSTALL = sh docker/install.sh $(VENV)
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: run demo install dev test test-fast test-slurm soak check format bench lock clean help \
	check-code check-types check-imports check-templates check-migrations check-assets

run: install ## start the portal on http://127.0.0.1:8000 (VIGIL_PORT, VIGIL_HOME: docs/settings.md)
	@exec $(PYTHON_OF_VENV) -m portal.up --with-parent

demo: install ## the same with a made-up lab to look around in
	@exec $(PYTHON_OF_VENV) -m portal.up --with-parent --demo

install:
	@$(INSTALL) run

dev:
	@$(INSTALL) dev

# The second run repeats what touches the database on PostgreSQL, in a private cluster that the tests start.
test: dev ## every test: on SQLite, then what touches the database on PostgreSQL (up to 15 minutes)
	@$(PYTHON_OF_VENV) -m pytest -q -n 2 --dist loadscope --no-loadscope-reorder --durations 10
	@TEST_DATABASE=postgres $(PYTHON_OF_VENV) -m pytest -q -n 2 --dist loadscope -m "not slow" tests/portal tests/jobs tests/nodes

test-fast: dev ## the quick tests, under a minute
	@$(PYTHON_OF_VENV) -m pytest -q -n 2 --dist loadscope -m "not slow"

test-slurm: dev ## what needs a whole Slurm, on two of its releases, which the tests unpack and start (as root, on Debian)
	@$(PYTHON_OF_VENV) -m tests.slurm.release
	@TEST_SLURM=$${TEST_SLURM:-1} $(PYTHON_OF_VENV) -m pytest -q -n 4 --dist loadscope --durations 10 tests/slurm

soak: dev ## every layout on up to 32 ranks, then twenty kills of each kind in one job each (an hour)
	@TEST_COMBINATIONS=all $(PYTHON_OF_VENV) -m pytest -q --timeout 1800 tests/training/parallel
	@TEST_KILLS=20 $(PYTHON_OF_VENV) -m pytest -q --timeout 1200 tests/portal/test_up_kill.py tests/training/launch/test_launch_elastic.py

check: dev ## lint, format, types, import rules, templates, migrations
	@$(MAKE) --no-print-directory --keep-going check-code check-types check-imports check-templates check-migrations check-assets

check-code:
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
check-types:
	@$(VENV)/bin/mypy
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

bench: dev ## every benchmark; each prints a ratio measured in one run
	@$(PYTHON_OF_VENV) -m bench

lock: dev ## resolve requirements*.in again
	@$(PYTHON_OF_VENV) -m venv var/uv && var/uv/bin/pip -q install uv
	@$(UV) requirements.in -o requirements.lock
	@$(UV) -c requirements.lock requirements-dev.in -o requirements-dev.lock
	@echo 'torch ; sys_platform == "none"' >var/without-torch.txt # which build of it suits is the machine's business
	@$(UV) --override var/without-torch.txt -c requirements-dev.lock requirements-extras.in -o requirements-extras.lock

clean: ## remove the environment and the caches (data in var/ stays)
	rm -rf $(VENV) .mypy_cache .ruff_cache .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -not -path './var/*' -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  %-16s %s\n' "$$name" "$$text"; done
