#!/bin/sh
# Write lock.txt: the tested versions of all packages that prefed[all] installs on Python 3.11 to 3.14, with
# hashes. PyTorch and the CUDA libraries of its default Linux build are left out: PyTorch is installed first,
# from wherever suits the machine. Needs uv: `pip install "prefed[release]"`.
set -eu
cd "$(dirname "$0")/.."

torch=$(mktemp)
trap 'rm -f "$torch"' EXIT
sed -n 's/^TORCH *?= *//p' Makefile >"$torch"

compile() {
    uv pip compile pyproject.toml --extra all --constraint constraints.txt --constraint "$torch" --quiet \
        --universal --python-version 3.11 --no-header --no-annotate "$@"
}

set -- --generate-hashes --output-file lock.txt
for package in $(compile | grep -oE '^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)='); do
    set -- "$@" --no-emit-package "${package%=}"
done
compile "$@" >/dev/null
echo "lock.txt: $(grep -c '==' lock.txt) packages"
