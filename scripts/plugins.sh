#!/usr/bin/env bash
# .venv-plugins: the libraries that the plug-ins are tested with, in their locked versions, and this project, editable.
# Each plug-in has a lock of its own, requirements/plugins-NAME.txt; the environment has all of them.  Quick when
# nothing changed: a stamp holds a hash of what goes in.  hosts/NAME-VERSION has the Python of the releases of
# requirements/kv-hosts.txt, 50 MB each: it is put before the same library of the environment by PYTHONPATH.
set -euo pipefail
cd "$(dirname "$0")/.."

target=.venv-plugins
locks=(requirements/plugins-*.txt)
python=${PYTHON:-python3}
wanted=$( (echo "$PWD"; "$python" --version; cat pyproject.toml requirements/runtime.txt requirements/kv-hosts.txt "${locks[@]}" "$0") | sha256sum)
if [ -f "$target/stamp" ] && [ "$(cat "$target/stamp")" = "$wanted" ]; then
    exit 0
fi
echo "plugins: making $target; 3 GB, a few minutes"
rm -rf "$target"
"$python" -m venv "$target"
pip=("$target/bin/python" -m pip install --quiet --disable-pip-version-check)
# torch before the others and with what it depends on: a build for the CPU is taken where there is one.
"${pip[@]}" "$(grep -hx 'torch==.*' "${locks[@]}" | head -1)"
for lock in requirements/runtime.txt "${locks[@]}"; do
    "${pip[@]}" --no-deps -r "$lock"
done
"${pip[@]}" "$(grep -ix 'cython==.*' requirements/dev.txt)" "$(grep -x 'setuptools==.*' requirements/dev.txt)"
"${pip[@]}" --no-deps --no-build-isolation -e .
grep -v '^#' requirements/kv-hosts.txt | while read -r host; do
    "$target/bin/python" -m pip download --quiet --disable-pip-version-check \
        --no-deps --only-binary :all: --no-cache-dir -d "$target/wheels" "$host" < /dev/null
    "$target/bin/python" - "$target/wheels" "$target/hosts/${host/==/-}" <<'PY'
import pathlib
import sys
import zipfile

[wheel] = pathlib.Path(sys.argv[1]).iterdir()
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(sys.argv[2], [name for name in archive.namelist() if name.endswith((".py", "METADATA"))])
PY
    rm -r "$target/wheels"
done
echo "$wanted" > "$target/stamp"
