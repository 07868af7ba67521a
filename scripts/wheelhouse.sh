#!/bin/sh
# Make a folder from which prefed is installed without a network:
#
#   scripts/wheelhouse.sh FOLDER [EXTRA]     # EXTRA: site (the default), hub, research, all
#
# It holds the wheels with a file of their hashes, the documentation, the files of deploy/, an SBOM (CycloneDX),
# checksums, and install.sh, which verifies and installs. It suits the Python and the platform that it was made with.
#
# PYTHON  the interpreter (default: python3)
# TORCH   the PyTorch to hold (default: the tested version), e.g. a CPU build's wheel
#
# Needs the packages of prefed[release] and prefed[docs] (`make wheelhouse` installs them).
set -eu
[ $# -ge 1 ] || {
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p;}' "$0" >&2
    exit 2
}
here=$(cd "$(dirname "$0")/.." && pwd)
out=$1 extra=${2:-site}
[ ! -e "$out" ] || {
    echo "wheelhouse: $out exists; name a new folder" >&2
    exit 1
}
torch=${TORCH:-$(sed -n 's/^TORCH *?= *//p' "$here/Makefile")}
mkdir -p "$(dirname "$out")"
out=$(cd "$(dirname "$out")" && pwd)/$(basename "$out")
final=$out out=$out.unfinished
work=$(mktemp -d)
trap 'rm -rf "$work" "$out"' EXIT
rm -rf "$out"
mkdir -p "$out/wheels"

"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
python -m build --wheel --outdir "$work" "$here" >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    exit 1
}

# Downloaded at the versions of the lock, built where a package has no wheel, then compared with its hashes.
sed -n 's/ \\$//; /^[A-Za-z0-9].*==/p' "$here/lock.txt" >"$work/versions.txt"
pip install wheel setuptools
mkdir "$work/files"
pip download --no-build-isolation --dest "$work/files" --constraint "$work/versions.txt" "$torch" \
    "$(ls "$work"/*.whl)[$extra]"
for file in "$work"/files/*; do
    case ${file##*/} in
    prefed-* | torch-* | triton-* | nvidia_* | cuda_*) ;;
    *)
        grep -q "$(sha256sum "$file" | cut -d' ' -f1)" "$here/lock.txt" || {
            echo "wheelhouse: ${file##*/} is not in lock.txt" >&2
            exit 1
        }
        ;;
    esac
    case $file in
    *.whl) mv "$file" "$out/wheels" ;;
    *) pip wheel --no-deps --no-build-isolation --wheel-dir "$out/wheels" "$file" ;;
    esac
done

"$work/venv/bin/python" - "$out" <<'PYTHON'
import hashlib, sys
from pathlib import Path

folder = Path(sys.argv[1])
lines = []
for wheel in sorted((folder / "wheels").iterdir()):
    name, version = wheel.name.split("-")[:2]
    lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
(folder / "requirements.txt").write_text("".join(lines))
(folder / "python").write_text("%d.%d\n" % sys.version_info[:2])
PYTHON
cp "$here/scripts/wheelhouse-install.sh" "$out/install.sh"
cp -r "$here/deploy" "$out"
(cd "$here" && NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet --site-dir "$out/docs")

sums() { (cd "$out" && find . -type f ! -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum >SHA256SUMS); }

# What a site will install, as it will install it.
sums
PYTHON="$work/venv/bin/python" sh "$out/install.sh" "$work/clean" >/dev/null
for package in setuptools pip; do # Python's own, unless required
    grep -q "^$package==" "$out/requirements.txt" || "$work/clean/bin/python" -m pip uninstall --quiet --yes $package
done
cyclonedx-py environment "$work/clean/bin/python" --pyproject "$here/pyproject.toml" --output-reproducible \
    --gather-license-texts --output-file "$out/sbom.cdx.json" >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    exit 1
}
python "$here/scripts/sbom.py" "$out"
sums
mv "$out" "$final"
out=$final
trap 'rm -rf "$work"' EXIT
echo "$out: prefed[$extra] for Python $(cat "$out/python"), $(ls "$out/wheels" | wc -l) wheels, $(du -sm "$out" | cut -f1) MB"
echo "sha256 of its SHA256SUMS: $(sha256sum "$out/SHA256SUMS" | cut -d' ' -f1)"
