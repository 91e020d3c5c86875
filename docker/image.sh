#!/bin/sh
# Install steps of the image, called by the Dockerfile and, without a container engine, by docker/check.sh.
#   image.sh packages VENV      install Vigil's dependencies; with torch unless VIGIL_TORCH=no
#   image.sh code VENV          install Vigil itself, compiled; downloads nothing
# Leaves neither pip's cache nor its log behind: the log shows where packages came from.
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
    # unchecked-hash, because copying layers changes file times, and the sources never change later.
    "$2/bin/python" -m compileall -q --invalidation-mode unchecked-hash \
        console diagnosis gpus jobs nodes portal training vigil_cli vigil_core vigil_report.py
    ;;
*)
    echo "image.sh packages VENV, or image.sh code VENV" >&2
    exit 2
    ;;
esac
