#!/bin/sh
# Test prefed with the oldest and the newest of all packages that pyproject.toml allows, on each Python:
#
#   scripts/matrix.sh [PYTHON ...]      # 3.11 3.12 3.13 3.14, unless some are named
#
# A cell is a new environment with the wheel of the last commit and the packages of prefed[all,test], of which only
# wheels are taken, and the tests that meet other libraries. Prints a line for each cell: its counts and the
# tests that fail, or why it was skipped. The exit code is 1 if a cell fails.
#
# TORCH  the PyTorch of all cells, e.g. torch==2.13.0 (default: the oldest and the newest, 3 to 8 GB each)
#
# Needs uv (`pip install "prefed[release]"`), whose settings apply: UV_FIND_LINKS=FOLDER takes wheels from a
# folder, UV_PYTHON_DOWNLOADS=never only the Pythons that are here.
set -u
cd "$(dirname "$0")/.." || exit 1
[ $# -gt 0 ] || set -- 3.11 3.12 3.13 3.14

# What prefed calls in other libraries: transformers and PEFT, files of data, trackers, judges, ε, secure sums,
# NVIDIA FLARE, the page that collects, the command line, and a whole run.
tests="tests/golden/test_models.py tests/golden/test_adapters.py tests/golden/test_small_numbers.py tests/golden/test_losses_trl.py
tests/unit/test_config.py tests/unit/test_data_files.py tests/unit/test_tracking.py tests/unit/test_endpoint_judge.py tests/unit/test_accountant.py
tests/unit/test_secure.py tests/unit/test_federation_parts.py tests/unit/test_collect_page.py
tests/unit/test_compare_page.py tests/unit/test_topology.py tests/unit/test_terminal.py tests/cli/test_exit_codes.py
tests/engines/test_tracked_runs.py tests/engines/test_frozen_runs.py"
# A plain import of what no test above loads.
imports="import bitsandbytes, nvflare, ray"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
git archive HEAD | tar -x -C "$work/source"
cd "$work/source" || exit 1
uv build --quiet --wheel --out-dir "$work" . || exit 1
mv src unused # the tests import the installed wheel
failed=0

cell() { # PYTHON RESOLUTION: fills the environment; prints why it cannot
    rm -rf "$work/venv"
    uv venv --quiet --python "$1" "$work/venv" 2>"$work/log" || { echo "no Python $1 here"; return 1; }
    uv pip install --quiet --python "$work/venv" --no-build --resolution "$2" -r pyproject.toml --extra all \
        --extra test ${TORCH:+"$TORCH"} 2>"$work/log" || {
        echo "its packages cannot be installed: $(grep -v '^ *$' "$work/log" | tail -n 1)"
        return 1
    }
    uv pip install --quiet --python "$work/venv" --no-deps "$work"/*.whl 2>"$work/log" || { cat "$work/log"; return 1; }
}

for python; do
    for resolution in lowest-direct highest; do
        name="Python $python, $(case $resolution in lowest-direct) echo oldest ;; *) echo newest ;; esac)"
        if ! why=$(cell "$python" "$resolution"); then
            echo "$name: skipped: $why"
            continue
        fi
        versions=$("$work/venv/bin/python" -c 'from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "numpy")), sep=", ")')
        "$work/venv/bin/python" -c "$imports" >"$work/log" 2>&1 || { tail -n 1 "$work/log"; failed=1; }
        # shellcheck disable=SC2086
        OMP_NUM_THREADS=1 "$work/venv/bin/python" -m pytest -v -p no:cacheprovider --tb=line -rfEs --color=no \
            $tests >"$work/log" 2>&1
        code=$?
        [ $code -eq 0 ] || failed=1
        echo "$name: $(tail -n 1 "$work/log") ($versions)"
        grep -E '^(FAILED|ERROR|SKIPPED)|^/.*(Error|Exception)' "$work/log" | cut -c1-160 | sort -u | sed 's/^/  /'
    done
done
exit $failed
