# Functions of the scripts that install Debian packages; sourced by them, in the root of the checkout.
# shellcheck shell=bash

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

# setup_debian WHO LIST: installs what is missing of the packages that a file lists.
setup_debian() {
    local who=$1 list=$2 wanted missing
    mapfile -t wanted < <(sed 's/#.*//' "$list" | awk 'NF { print $1 }')
    if ! command -v dpkg-query >/dev/null; then
        echo "$who: not a Debian system; make sure that it has what these packages bring: ${wanted[*]}" >&2
        return
    fi
    mapfile -t missing < <(missing_packages "${wanted[@]}")
    [ "${#missing[@]}" -gt 0 ] || return 0
    echo "$who: installing Debian packages: ${missing[*]}"
    # The lists of a new machine may be empty or old: refresh them only when the first try fails.
    install_packages "${missing[@]}" || { update_package_lists && install_packages "${missing[@]}"; } || true
    mapfile -t missing < <(missing_packages "${missing[@]}")
    if [ "${#missing[@]}" -gt 0 ]; then
        echo "$who: these Debian packages are missing and could not be installed: ${missing[*]}" >&2
        echo "$who: install them as root, then run it again: apt-get install ${missing[*]}" >&2
        exit 1
    fi
}
