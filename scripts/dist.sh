#!/bin/sh
# Build wheel and sdist of the last commit into dist/, twice in different folders, and check that both builds
# are equal bit for bit. Needs the packages of prefed[release].
set -eu
cd "$(dirname "$0")/.."

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for copy in one another/folder; do
    mkdir -p "$work/$copy"
    git archive HEAD | tar -x -C "$work/$copy"
    python -m build --no-isolation --outdir "$work/$copy/dist" "$work/$copy" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        exit 1
    }
    umask 077
done
diff -r "$work/one/dist" "$work/another/folder/dist"

validate-pyproject "$work/one/pyproject.toml"
twine check --strict "$work"/one/dist/*
check-wheel-contents "$work"/one/dist/*.whl
pyroma --min 10 "$work"/one/dist/*.tar.gz
umask 022
mkdir -p dist
for file in "$work"/one/dist/*; do
    cat "$file" >"dist/${file##*/}"
done
(cd dist && sha256sum -- *.whl *.tar.gz | tee SHA256SUMS)
