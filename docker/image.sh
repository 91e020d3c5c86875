#!/bin/sh
# What the Dockerfile runs, and docker/check.sh without an engine.
#   image.sh packages VENV      what Vigil depends on; with torch unless VIGIL_TORCH=no
#   image.sh code VENV          Vigil itself, compiled; downloads nothing
# Nothing is left beside: neither pip's cache, nor its log, which says where packages came from.
set -eu
cd "$(dirname "$0")/.."
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
export PIP_NO_CACHE_DIR=1 VIGIL_INSTALL_LOG="$log/install.log"

case $1 in
packages) VIGIL_PROJECT=no sh docker/install.sh "$2" run ;;
code)
    VIGIL_TORCH=no sh docker/install.sh "$2" run
    rm -rf ./*.egg-info
    # By content, not by time: nobody writes here later, and layers are copied about.
    "$2/bin/python" -m compileall -q --invalidation-mode unchecked-hash \
        console diagnosis gpus jobs nodes portal training vigil_cli vigil_core vigil_report.py
    ;;
*)
    echo "image.sh packages VENV, or image.sh code VENV" >&2
    exit 2
    ;;
esac
