#!/bin/sh
# Verify this wheelhouse and install prefed from it into a new virtual environment, without a network:
#
#   sh install.sh VENV
#
# PYTHON names the interpreter (default: python3).
set -eu
[ $# -eq 1 ] || {
    echo "usage: sh install.sh VENV" >&2
    exit 2
}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
wanted=$(cat "$here/python")
[ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "$wanted" ] || {
    echo "install: this wheelhouse is for Python $wanted; name one: PYTHON=python$wanted sh install.sh $1" >&2
    exit 1
}
[ ! -e "$1" ] || {
    echo "install: $1 exists; name a new folder" >&2
    exit 1
}
(cd "$here" && sha256sum --check --quiet --strict SHA256SUMS) || {
    echo "install: the wheelhouse is damaged or was changed; nothing is installed" >&2
    exit 1
}
echo "install: all files are as they were made; installing $(wc -l <"$here/requirements.txt") packages takes some minutes"
umask 022 # other users run it, e.g. that of a service
"$python" -m venv "$1"
"$1/bin/python" -m pip --isolated --disable-pip-version-check install --quiet --no-index \
    --find-links "$here/wheels" --require-hashes --no-deps --requirement "$here/requirements.txt"
"$1/bin/python" -m pip --disable-pip-version-check check
"$1/bin/prefed" --version
