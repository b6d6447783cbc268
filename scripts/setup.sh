#!/usr/bin/env bash
# Debian packages, then .venv in the checkout with the locked versions and this project, editable.
# Quick when nothing changed: a stamp in .venv holds a hash of everything that goes in.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/debian.sh

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.11 python3.12 python3.13 /usr/bin/python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "setup: Python 3.11 or newer is needed; set PYTHON to one: make setup PYTHON=/usr/bin/python3.11" >&2
    return 1
}

setup_venv() {
    local python stamp=.venv/setup-stamp wanted
    python=$(find_python)
    wanted=$( (echo "$PWD" "$python"; "$python" --version; cat pyproject.toml requirements/dev.txt "$0"; find engine fuse gateway lakefs -name "*.pyx" -o -name "*.pxd" -o -name "*.h" | sort | xargs -r cat) | sha256sum)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    echo "setup: making .venv with $("$python" --version)"
    # A moved checkout or another interpreter leaves a .venv whose scripts point elsewhere.
    if [ -d .venv ] && ! grep -qsxF "executable = $(readlink -f "$python")" .venv/pyvenv.cfg; then
        rm -rf .venv
    fi
    "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
    echo "$wanted" > "$stamp"
}

setup_debian setup debian-packages.txt
setup_venv
