#!/bin/sh
# Create a virtual environment with everything that Vigil needs, or update it; does nothing if it is up to date.
# Shared by `make`, the image and CI:  docker/install.sh VENV [run|dev]
#   PYTHON=python3.12      use this interpreter instead of looking for one
#   VIGIL_TORCH=no         do not install torch (only the trainer needs it, the portal never imports it)
#   VIGIL_TORCH=cpu|cuda   the build of torch; default: CUDA if there is an NVIDIA driver, otherwise CPU
#   VIGIL_PROJECT=no       install only the dependencies
#   VIGIL_EXTRAS=yes       also install packages for optional settings of the trainer (FP8, LoRA, tokenizer files); dev: always
#   TORCH_PIP_ARGS=…       additional arguments for torch's `pip install`; they alone then choose the build
#   TORCH_CPU_INDEX=…      the index for the CPU build instead of PyTorch's
set -eu

venv=${1:?usage: docker/install.sh VENV [run|dev]}
flavour=${2:-run}
torch=torch==2.13.0
here=$(cd "$(dirname "$0")/.." && pwd)
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
log=${VIGIL_INSTALL_LOG:-$here/var/install.log}
cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

say() { printf '%s\n' "$*"; }
refuse() { say "Vigil cannot be installed: $*" >&2; exit 1; }

# Print one line and write everything else to the log, whose end is shown on failure.
step() {
    say "$1 …"
    shift
    printf '\n$ %s\n' "$*" >>"$log"
    "$@" </dev/null >>"$log" 2>&1 || failed
}
failed() {
    tail -n 20 "$log" >&2
    refuse "the step above failed. The whole log is in $log."
}

# The same for `pip install`, with the progress of its downloads.
install() {
    say "$1 …"
    shift
    printf '\n$ pip install %s\n' "$*" >>"$log"
    "$venv/bin/python" "$here/docker/progress.py" "$log" \
        "$venv/bin/python" -m pip --disable-pip-version-check --no-input install "$@" || failed
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

has_driver() { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1; }

# Succeed if pip has a wheel of torch without querying any index: in a folder of --find-links, or one that it built itself.
at_hand() {
    built=$(pip cache list --format=abspath torch 2>/dev/null | head -n 1)
    pip install --no-index --no-deps --dry-run --ignore-installed --quiet ${built:+--find-links "$(dirname "$built")"} \
        "$torch" </dev/null >>"$log" 2>&1
}

# Succeed if the index answers within seconds and has this version of torch: pip itself would retry for minutes.
index_has_torch() {
    timeout 8 "$venv/bin/python" -c 'import sys, urllib.request
page = urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=4).read().decode()
sys.exit("/torch-%s" % sys.argv[2] not in page and ">torch-%s" % sys.argv[2] not in page)' \
        "${cpu_index%/}" "${torch#torch==}" >>"$log" 2>&1
}

install_torch() {
    if [ -n "${TORCH_PIP_ARGS:-}" ]; then
        # shellcheck disable=SC2086
        install "Installing $torch for the trainer, as TORCH_PIP_ARGS says" $TORCH_PIP_ARGS "$torch"
    elif at_hand; then
        install "Installing $torch for the trainer from the wheel that pip has at hand" --no-index --no-deps \
            ${built:+--find-links "$(dirname "$built")"} "$torch"
        install "Installing what it needs" "$torch"
    elif [ "${VIGIL_TORCH:-yes}" = cuda ] || { [ "${VIGIL_TORCH:-yes}" != cpu ] && has_driver; }; then
        install "Installing $torch for the trainer, with CUDA (the largest download: gigabytes)" "$torch"
    elif index_has_torch; then
        install "Installing $torch for the trainer: the CPU build, as there is no NVIDIA driver here" \
            --extra-index-url "$cpu_index" "$torch"
    else
        say "PyTorch's index of CPU builds ($cpu_index) does not answer, or lacks $torch: taking the ordinary index."
        install "Installing $torch for the trainer (often the build with CUDA, gigabytes; TORCH_PIP_ARGS names another index)" \
            "$torch"
    fi
}

mkdir -p "$(dirname "$venv")"
(umask 077 && mkdir -p "$(dirname "$log")") # by default var/, where the portal's data will be
if command -v flock >/dev/null 2>&1; then
    exec 9>"$(dirname "$log")/install.lock"
    flock 9 # serialise concurrent runs of make
fi

# After a checkout is moved, the scripts of its environment point to the old location.
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
        install "Installing the locked packages, including those for tests and checks (a minute or two)" \
            --require-hashes --requirement "$here/requirements-dev.lock"
        mark dev "$dev_lock"
        mark run "$run_lock"
    fi
elif ! is_current run "$run_lock"; then
    install "Installing the locked packages (about a minute)" \
        --require-hashes --requirement "$here/requirements.lock"
    mark run "$run_lock"
fi

if [ "${VIGIL_TORCH:-yes}" != no ] && ! is_current torch "$torch"; then
    # Not in the lock files: the right build of torch depends on the machine (CPU, CUDA version).
    install_torch
    mark torch "$torch"
fi

[ "$flavour" != dev ] || VIGIL_EXTRAS=${VIGIL_EXTRAS:-yes}
if [ "${VIGIL_TORCH:-yes}" != no ] && [ "${VIGIL_EXTRAS:-no}" = yes ]; then
    extras_lock=$(digest "$here/requirements-extras.lock")
    if ! is_current extras "$extras_lock"; then
        # Without dependencies: the lock lists all of them except torch, which is already installed.
        install "Installing what optional settings of the trainer need (half a minute)" \
            --no-deps --require-hashes --requirement "$here/requirements-extras.lock"
        mark extras "$extras_lock"
    fi
fi

[ "${VIGIL_PROJECT:-yes}" != no ] || exit 0
project=$(digest "$here/pyproject.toml")
if ! is_current project "$here $project"; then
    # compat: one plain path entry, so that tests and benchmarks can be imported as well.
    step "Installing Vigil itself" pip install --no-deps --no-build-isolation --config-settings editable_mode=compat \
        --editable "$here"
    mark project "$here $project"
fi
