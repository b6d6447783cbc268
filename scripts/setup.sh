#!/usr/bin/env bash
# setup.sh [demo]: Debian packages, then .venv in the checkout with the locked versions and this project, editable.
# With `demo` only what it takes to run it, and to show that; else also what tests, checks and benchmarks need.
# A user without root or sudo gets as far as that goes: what root has to install is named, and the rest is made.
# Quick when nothing changed: stamps in .venv hold hashes of everything that goes in.
set -euo pipefail
cd "$(dirname "$0")/.."
level=${1:-dev}
[ "$level" = demo ] || [ "$level" = dev ] || { echo "setup: no such set: $level; there are demo and dev" >&2; exit 64; }

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

say() {
    echo "setup: $* ($SECONDS s)"
}

hash_of() {
    (echo "$PWD" "$python"; "$python" --version; cat "$@") | sha256sum
}

is_done() { # is_done STAMP HASH
    [ -f ".venv/$1" ] && [ "$(cat ".venv/$1")" = "$2" ]
}

install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"
}

# Installs the project, editable: its native modules are compiled beside their sources, two at a time.  CFLAGS replaces
# Python's own flags, so they are named again.  Debug information takes a third of the time.
install_project() {
    local flags
    flags=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("CFLAGS") or "-O2")')
    CFLAGS="$flags ${CFLAGS:-} -g0" install --no-deps --no-build-isolation -e . > .venv/project.log 2>&1 ||
        { cat .venv/project.log >&2; echo "setup: the project could not be installed, see above" >&2; return 1; }
}

setup_venv() {
    local python wanted_packages wanted_natives natives requirements installing=
    python=$(find_python)
    mapfile -t natives < <(find engine fuse gateway lakefs -name "*.pyx" -o -name "*.pxd" -o -name "*.h" | sort)
    wanted_packages=$(hash_of "$0" "requirements/$level.txt")
    wanted_natives=$(hash_of "$0" pyproject.toml requirements/runtime.txt "${natives[@]}")
    # The set `dev` has all of `demo`.
    if is_done stamp-natives "$wanted_natives" && { is_done "stamp-$level" "$wanted_packages" ||
        is_done stamp-dev "$(hash_of "$0" requirements/dev.txt)"; }; then
        return
    fi
    # A moved checkout or another interpreter leaves a .venv whose scripts point elsewhere.
    if [ -d .venv ] && ! grep -qsxF "executable = $(readlink -f "$python")" .venv/pyvenv.cfg; then
        rm -rf .venv
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv || { rm -rf .venv; echo "setup: a .venv needs the package python3-venv" >&2; return 1; }
    rm -f ".venv/stamp-$level"
    install "$(grep -ix 'cython==.*' requirements/demo.txt)" "$(grep -x 'setuptools==.*' requirements/demo.txt)"
    requirements=requirements/$level.txt
    if [ -n "$without_root" ] && ! pkg-config --exists fuse3 2>/dev/null; then
        say "without pyfuse3, which lake mount needs: it is built against libfuse3-dev"
        requirements=.venv/requirements.txt
        grep -vi '^pyfuse3==' "requirements/$level.txt" > "$requirements"
    fi
    say "fetching $(grep -c == "$requirements") packages"
    if ! is_done stamp-natives "$wanted_natives"; then
        say "compiling native modules beside that"
        install_project &
        installing=$!
    fi
    install -r "$requirements"
    [ -z "$installing" ] || wait "$installing"
    if [ -n "$without_root" ]; then
        say "done, as far as it goes without root; .venv/bin/lake doctor says what works"
        return
    fi
    echo "$wanted_natives" > .venv/stamp-natives
    echo "$wanted_packages" > ".venv/stamp-$level"
    say "done"
}

setup_debian setup debian-packages.txt
[ "$level" = demo ] || setup_debian setup debian-packages-dev.txt
setup_venv
