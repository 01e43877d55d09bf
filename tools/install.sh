#!/bin/sh
# Set packfmt up in .venv, beside this folder:
#   sh tools/install.sh        to use it, with torch
#   sh tools/install.sh dev    for the tests too
#   sh tools/install.sh venv   .venv alone, to put a torch of your choice there first
# May be run again at any time. A torch that is in .venv already stays as it is.
set -eu

cd "$(dirname "$0")/.."
case "${1-torch}" in
    torch | dev | venv) wanted=${1-torch} ;;
    *) echo "usage: sh tools/install.sh [dev | venv]" >&2; exit 2 ;;
esac

if ! command -v python3 >/dev/null; then
    echo "install.sh: python3 is missing; packfmt needs Python 3.10 or later" >&2
    exit 1
fi

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    # Debian keeps the part of venv that brings pip in a package of its own.
    if ! python3 -c "import ensurepip, venv" 2>/dev/null; then
        if ! command -v apt-get >/dev/null; then
            echo "install.sh: this Python has no ensurepip, which makes virtual environments; install it first" >&2
            exit 1
        fi
        as_root apt-get update
        as_root apt-get install -y python3-venv
    fi
    python3 -m venv .venv
fi

if [ "$wanted" != venv ]; then
    .venv/bin/python -m pip install --quiet -e ".[$wanted]"
fi
