#!/usr/bin/env bash
# Debian packages, then .venv in the checkout with the locked versions and this project, editable.
# Quick when nothing changed: a stamp in .venv holds a hash of everything that goes in.
set -euo pipefail
cd "$(dirname "$0")/.."

missing_packages() {
    local package
    for package in "$@"; do
        dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || echo "$package"
    done
}

install_packages() {
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

update_package_lists() {
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" apt-get update -q
}

setup_debian() {
    local wanted missing
    mapfile -t wanted < <(sed 's/#.*//' debian-packages.txt | awk 'NF { print $1 }')
    if ! command -v dpkg-query >/dev/null; then
        echo "setup: not a Debian system; make sure that it has what these packages bring: ${wanted[*]}" >&2
        return
    fi
    mapfile -t missing < <(missing_packages "${wanted[@]}")
    [ "${#missing[@]}" -gt 0 ] || return 0
    echo "setup: installing Debian packages: ${missing[*]}"
    # The lists of a new machine may be empty or old: refresh them only when the first try fails.
    install_packages "${missing[@]}" || { update_package_lists && install_packages "${missing[@]}"; } || true
    mapfile -t missing < <(missing_packages "${missing[@]}")
    if [ "${#missing[@]}" -gt 0 ]; then
        echo "setup: these Debian packages are missing and could not be installed: ${missing[*]}" >&2
        echo "setup: install them as root, then run make setup again: apt-get install ${missing[*]}" >&2
        exit 1
    fi
}

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
    wanted=$( (echo "$PWD" "$python"; "$python" --version; cat pyproject.toml requirements/dev.txt "$0"; find engine gateway lakefs -name "*.pyx" -o -name "*.h" | sort | xargs -r cat) | sha256sum)
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

setup_debian
setup_venv
