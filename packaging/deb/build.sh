#!/bin/sh
# Build Debian packages:  packaging/deb/build.sh site|agent OUTPUT-FOLDER
#   site   vigil: the portal with its Python packages in /opt/vigil, systemd units and a user `vigil`; must be built on its
#          target release of Debian or Ubuntu, because it contains a virtual environment of that release's Python
#   agent  vigil-agent: the node agent as one file, and its unit; for every release with Python 3.11 or newer
# PYTHON selects an interpreter other than /usr/bin/python3, which the packages then need at the same path; pip reads its
# settings from its environment variables.
set -eu

kind=${1:?usage: packaging/deb/build.sh site|agent OUTPUT-FOLDER}
output=${2:?usage: packaging/deb/build.sh site|agent OUTPUT-FOLDER}
here=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-/usr/bin/python3}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/pyproject.toml" | head -n 1)
mkdir -p "$output"
output=$(cd "$output" && pwd)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"

control() { # control PACKAGE ARCHITECTURE DEPENDS DESCRIPTION
    mkdir -p "$root/DEBIAN"
    cat >"$root/DEBIAN/control" <<END
Package: $1
Version: $version
Architecture: $2
Maintainer: Vigil <vigil@localhost>
Depends: $3
Section: science
Priority: optional
Description: $4
END
}
script() { # script NAME: write a maintainer script from stdin. DPKG_ROOT is the root into which dpkg installs.
    cat >"$root/DEBIAN/$1"
    chmod 755 "$root/DEBIAN/$1"
}

case $kind in
site)
    units="vigil.service vigil-web.service vigil-worker@.service vigil-beat.service"
    "$python" -m venv "$root/opt/vigil"
    "$root/opt/vigil/bin/python" -m pip --disable-pip-version-check --quiet install \
        --require-hashes --requirement "$here/requirements.lock"
    wheels=$(mktemp -d)
    # Build from a copy, because a build writes next to its sources.
    mkdir "$wheels/source"
    tar -C "$here" --exclude=./var --exclude=./.venv --exclude=./.git --exclude=./tests --exclude=./build -cf - . |
        tar -C "$wheels/source" -xf -
    "$root/opt/vigil/bin/python" -m pip --disable-pip-version-check --quiet wheel \
        --no-deps --wheel-dir "$wheels" "$wheels/source"
    "$root/opt/vigil/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps "$wheels"/*.whl
    rm -rf "$wheels"
    # Make scripts refer to the interpreter's final location rather than to the build folder.
    grep -rlI "$root/opt/vigil" "$root/opt/vigil/bin" "$root/opt/vigil/pyvenv.cfg" | xargs -r sed -i "s#$root##g"
    find "$root/opt/vigil" -name __pycache__ -prune -exec rm -rf {} +
    install -d "$root/lib/systemd/system" "$root/usr/lib/sysusers.d" "$root/usr/bin"
    for unit in $units; do install -m 644 "$here/packaging/systemd/$unit" "$root/lib/systemd/system/"; done
    echo 'u vigil - "Vigil" /var/lib/vigil /usr/sbin/nologin' >"$root/usr/lib/sysusers.d/vigil.conf"
    install -D -m 640 "$here/packaging/deb/vigil.env" "$root/etc/vigil/vigil.env"
    ln -s /opt/vigil/bin/vigil "$root/usr/bin/vigil"
    mkdir -p "$root/DEBIAN"
    echo /etc/vigil/vigil.env >"$root/DEBIAN/conffiles"
    python_package=$("$python" -c 'import sys; print("python3.%d" % sys.version_info[1])')
    control vigil "$(dpkg --print-architecture)" "$python_package, redis-server, systemd" \
        "portal for model training: submit, watch, explain and resume jobs on Slurm"
    script postinst <<'END'
#!/bin/sh
set -e
if [ "$1" = configure ]; then
    systemd-sysusers ${DPKG_ROOT:+--root="$DPKG_ROOT"} vigil.conf
    [ -n "${DPKG_ROOT:-}" ] || chgrp vigil /etc/vigil/vigil.env
    if [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
        systemctl daemon-reload
        systemctl try-restart vigil.service vigil-web.service 'vigil-worker@*.service' vigil-beat.service
    fi
fi
END
    script prerm <<'END'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
    systemctl disable --now vigil.service vigil-web.service vigil-beat.service
    systemctl stop 'vigil-worker@*.service'
fi
END
    script postrm <<'END'
#!/bin/sh
set -e
# Keep the data: no package command should delete a lab's history.
if [ "$1" = purge ] && [ -d "${DPKG_ROOT:-}/var/lib/vigil" ]; then
    echo "Vigil's data is still in /var/lib/vigil."
fi
END
    ;;
agent)
    if ! "$python" -c 'import pynvml' 2>/dev/null; then # the bundle contains NVIDIA's bindings
        tools=$(mktemp -d)
        trap 'rm -rf "$root" "$tools"' EXIT
        "$python" -m venv "$tools"
        python=$tools/bin/python
        awk '/^nvidia-ml-py==/ { found = 1 } found; found && !/\\$/ { exit }' "$here/requirements.lock" >"$tools/bindings.txt"
        "$python" -m pip --disable-pip-version-check --quiet install --require-hashes --requirement "$tools/bindings.txt"
    fi
    cd "$here"
    "$python" -c 'import sys; from pathlib import Path; from nodes.agent.bundle import write_bundle; write_bundle(Path(sys.argv[1]))' \
        "$root/vigil-agent.pyz"
    install -D -m 755 "$root/vigil-agent.pyz" "$root/usr/lib/vigil-agent/vigil-agent.pyz"
    rm "$root/vigil-agent.pyz"
    install -d "$root/lib/systemd/system"
    sed 's#/opt/vigil-agent.pyz#/usr/lib/vigil-agent/vigil-agent.pyz#' "$here/docs/agent/vigil-agent.service" \
        >"$root/lib/systemd/system/vigil-agent.service"
    install -D -m 600 "$here/packaging/deb/agent.env" "$root/etc/vigil-agent/environment"
    mkdir -p "$root/DEBIAN"
    echo /etc/vigil-agent/environment >"$root/DEBIAN/conffiles"
    control vigil-agent all "python3 (>= 3.11)" "Vigil's agent on a node: GPU telemetry, Xids, mounts and processes"
    script postinst <<'END'
#!/bin/sh
set -e
if [ "$1" = configure ] && [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl try-restart vigil-agent.service
fi
END
    script prerm <<'END'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -z "${DPKG_ROOT:-}" ] && [ -d /run/systemd/system ]; then
    systemctl disable --now vigil-agent.service
fi
END
    ;;
*)
    echo "usage: packaging/deb/build.sh site|agent OUTPUT-FOLDER" >&2
    exit 2
    ;;
esac
dpkg-deb --root-owner-group -Zgzip -z6 --build "$root" "$output" >/dev/null
ls "$output"/*.deb
