#!/usr/bin/env bash
# .venv-clients: the S3 clients of other people that the tests drive, in their locked versions.  Nothing of the product
# is in it, and nothing of it is in the product.  Quick when nothing changed: a stamp holds a hash of what goes in.
set -euo pipefail
cd "$(dirname "$0")/.."

target=.venv-clients
lock=requirements/clients.txt
npm_lock=requirements/clients-npm.txt
python=${PYTHON:-python3}
wanted=$( (echo "$PWD"; "$python" --version; cat "$lock" "$npm_lock" "$0") | sha256sum)
if [ -f "$target/stamp" ] && [ "$(cat "$target/stamp")" = "$wanted" ]; then
    exit 0
fi
echo "clients: making $target; 3.2 GB, a few minutes"
rm -rf "$target"
"$python" -m venv "$target"
pip=("$target/bin/python" -m pip install --quiet --disable-pip-version-check)
# torch before the others and with what it depends on: a build for the CPU is taken where there is one.
"${pip[@]}" "$(grep -x 'torch==.*' "$lock")"
"${pip[@]}" --no-deps -r "$lock"
mapfile -t packages < <(grep -v '^#' "$npm_lock" | sed 's/==/@/')
"$target/bin/npm" install --silent --no-audit --no-fund --prefix "$target" "${packages[@]}"
echo "$wanted" > "$target/stamp"
