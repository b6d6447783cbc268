# Functions of the scripts that install Debian packages; sourced by them, in the root of the checkout.
# shellcheck shell=bash

missing_packages() {
    local package
    for package in "$@"; do
        dpkg-query -W -f '${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || echo "$package"
    done
}

# may_be_root: this is root, or sudo makes it root, perhaps after a password.
may_be_root() {
    [ "$(id -u)" = 0 ] && return
    command -v sudo >/dev/null || return
    sudo -n true 2>/dev/null || { [ -t 0 ] && sudo -v; }
}

# purpose_of PACKAGE: what goes without it, of those of debian-packages.txt.
purpose_of() {
    case $1 in
        fuse3 | libfuse3-dev | pkg-config) echo "lake mount" ;;
        gcc | libc6-dev | python3-dev) echo "the engine (its native modules are compiled); clients work without" ;;
        libisal-dev) echo "lakes of several devices" ;;
        libssl-dev) echo "the fast door of S3" ;;
        python3 | python3-venv) echo "all: there is no .venv without it" ;;
        *) echo "tests and checks" ;;
    esac
}

# name_what_needs_root WHO PACKAGE...: say what each package is for, and how root installs them.
name_what_needs_root() {
    local who=$1 package
    shift
    echo "$who: this is not root and may not become it by sudo; only root can install these Debian packages:" >&2
    for package in "$@"; do
        echo "$who:   $package, for $(purpose_of "$package")" >&2
    done
    echo "$who: going on without them; when root has done this, run it again: apt-get install $*" >&2
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

# setup_debian WHO LIST: installs what is missing of the packages that a file lists.  A user who cannot become root is
# told what each is for, and `without_root` is set: what can be made in a virtual environment is made.
without_root=
setup_debian() {
    local who=$1 list=$2 wanted missing
    mapfile -t wanted < <(sed 's/#.*//' "$list" | awk 'NF { print $1 }')
    if ! command -v dpkg-query >/dev/null; then
        echo "$who: not a Debian system; make sure that it has what these packages bring: ${wanted[*]}" >&2
        return
    fi
    mapfile -t missing < <(missing_packages "${wanted[@]}")
    [ "${#missing[@]}" -gt 0 ] || return 0
    if ! may_be_root; then
        name_what_needs_root "$who" "${missing[@]}"
        without_root=yes
        return 0
    fi
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
