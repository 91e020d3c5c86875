#!/bin/sh
# Makes a virtual environment with everything that Vigil needs, or brings one up to date; does nothing when it is.
# One script for `make`, for the image and for CI:  docker/install.sh VENV [run|dev]
#   PYTHON=python3.12      use this interpreter instead of looking for one
#   VIGIL_TORCH=no         leave the trainer's torch out (the portal itself never imports it)
#   VIGIL_PROJECT=no       only what it depends on
#   VIGIL_EXTRAS=yes       also what some of the trainer's settings need (FP8, LoRA, tokenizer files); dev: always
#   TORCH_PIP_ARGS=…       more arguments for torch's own `pip install`
set -eu

venv=${1:?usage: docker/install.sh VENV [run|dev]}
flavour=${2:-run}
torch=torch==2.13.0
here=$(cd "$(dirname "$0")/.." && pwd)
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
log=${VIGIL_INSTALL_LOG:-$here/var/install.log}

say() { printf '%s\n' "$*"; }
refuse() { say "Vigil cannot be installed: $*" >&2; exit 1; }

# One line for the person, everything else into the log, whose end is shown when it goes wrong.
step() {
    say "$1 …"
    shift
    printf '\n$ %s\n' "$*" >>"$log"
    if ! "$@" </dev/null >>"$log" 2>&1; then
        tail -n 20 "$log" >&2
        refuse "the step above failed. The whole log is in $log."
    fi
}

suits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suits "$PYTHON" || refuse "PYTHON=$PYTHON is not Python 3.11 or newer."
        say "$PYTHON"
        return
    fi
    # 3.11 first: the versions in the locks were resolved and tested on it.
    for candidate in python3.11 python3.12 python3.13 python3; do
        if suits "$candidate"; then
            say "$candidate"
            return
        fi
    done
    refuse "no Python 3.11 or newer found. Install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv), or name it: PYTHON=/path/to/python3.12 make …"
}

is_current() { [ -f "$venv/.vigil-$1" ] && [ "$(cat "$venv/.vigil-$1")" = "$2" ]; }
mark() { printf '%s' "$2" >"$venv/.vigil-$1"; }
digest() { cat "$@" | sha256sum | cut -d ' ' -f 1; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

mkdir -p "$(dirname "$venv")"
(umask 077 && mkdir -p "$(dirname "$log")") # by default var/, where the portal's data will be
if command -v flock >/dev/null 2>&1; then
    exec 9>"$(dirname "$log")/install.lock"
    flock 9 # two makes at once take turns
fi

# A checkout that was moved has an environment whose scripts point to the old place.
if ! is_current place "$venv" || ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        refuse "Python's venv module is missing. Install it: apt-get install $("$python" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')"
    step "Making $venv with $("$python" --version)" "$python" -m venv --clear "$venv"
    mark place "$venv"
fi

run_lock=$(digest "$here/requirements.lock")
dev_lock=$(digest "$here/requirements-dev.lock")
if [ "$flavour" = dev ]; then
    if ! is_current dev "$dev_lock"; then
        step "Installing the locked packages, tests' and checks' included (a minute or two)" \
            pip install --require-hashes --requirement "$here/requirements-dev.lock"
        mark dev "$dev_lock"
        mark run "$run_lock"
    fi
elif ! is_current run "$run_lock"; then
    step "Installing the locked packages (about a minute)" \
        pip install --require-hashes --requirement "$here/requirements.lock"
    mark run "$run_lock"
fi

if [ "${VIGIL_TORCH:-yes}" != no ] && ! is_current torch "$torch"; then
    # Not in the locks: which build of torch suits is the machine's business (CPU, CUDA version).
    # shellcheck disable=SC2086
    step "Installing $torch for the trainer (the largest download)" pip install ${TORCH_PIP_ARGS:-} "$torch"
    mark torch "$torch"
fi

[ "$flavour" != dev ] || VIGIL_EXTRAS=${VIGIL_EXTRAS:-yes}
if [ "${VIGIL_TORCH:-yes}" != no ] && [ "${VIGIL_EXTRAS:-no}" = yes ]; then
    extras_lock=$(digest "$here/requirements-extras.lock")
    if ! is_current extras "$extras_lock"; then
        # Without dependencies: all are in the lock but torch, which is there.
        step "Installing what optional settings of the trainer need (half a minute)" \
            pip install --no-deps --require-hashes --requirement "$here/requirements-extras.lock"
        mark extras "$extras_lock"
    fi
fi

[ "${VIGIL_PROJECT:-yes}" != no ] || exit 0
project=$(digest "$here/pyproject.toml")
if ! is_current project "$here $project"; then
    # compat: one plain path, so that tests and benches are found as well.
    step "Installing Vigil itself" pip install --no-deps --no-build-isolation --config-settings editable_mode=compat \
        --editable "$here"
    mark project "$here $project"
fi
