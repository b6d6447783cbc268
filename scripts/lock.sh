#!/usr/bin/env bash
# Writes requirements/runtime.txt, demo.txt and dev.txt: what the ranges of pyproject.toml resolve to today,
# each from a clean virtual environment, as bare NAME==VERSION lines.  `scripts/lock.sh clients` writes
# requirements/clients.txt instead.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

wanted() {
    python3 - "$@" <<'PY'
import sys
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(line for extra in sys.argv[1:] for line in extras[extra]), sep="\n")
PY
}

lock() {
    local target=$1
    shift
    python3 -m venv "$scratch/$target"
    wanted "$@" > "$scratch/$target.in"
    "$scratch/$target/bin/python" -m pip install --quiet --disable-pip-version-check -r "$scratch/$target.in"
    {
        echo "# Written by scripts/lock.sh from pyproject.toml; do not edit."
        # setuptools is part of the lock where it was asked for: it builds the project itself.
        "$scratch/$target/bin/python" -m pip freeze --all --disable-pip-version-check |
            grep -E '^[A-Za-z0-9._-]+==' | grep -vE '^(pip|wheel)==' |
            { if [ "$target" = runtime ]; then grep -v '^setuptools=='; else cat; fi; }
    } > "requirements/$target.txt"
}

# The clients' ranges are wide and their pins many: resolving takes minutes, torch first and for the CPU where it can be.
lock_clients() {
    python3 -m venv "$scratch/clients"
    local pip=("$scratch/clients/bin/python" -m pip --disable-pip-version-check)
    "${pip[@]}" install --quiet torch==2.13.0
    python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"], sep="\n")' > "$scratch/clients.in"
    "${pip[@]}" install --quiet -r "$scratch/clients.in"
    {
        echo "# Written by scripts/lock.sh from pyproject.toml; do not edit."
        "${pip[@]}" freeze | sed 's/+cpu$//' | grep -E '^[A-Za-z0-9._-]+=='
    } > requirements/clients.txt
}

if [ "${1:-}" = clients ]; then
    lock_clients
else
    lock runtime
    lock demo demo
    lock dev dev
fi
