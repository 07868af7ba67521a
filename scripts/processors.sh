#!/bin/sh
# Run the tests of numbers as other processors would compute them:
#
#   scripts/processors.sh [TESTS ...]     # tests/golden tests/laws tests/unit, unless some are named
#
# Six settings choose the instructions of PyTorch, MKL and oneDNN, and the number of threads. Prints the counts and
# the failures of each, then the comparisons that differ between settings and use more than a tenth of their
# tolerance: an error analysis has to say why they cannot exceed it. The exit code is 1 if a test fails.
#
# PYTHON  the interpreter (default: .venv/bin/python)
# JOBS    processes at a time (default: 2)
set -u
cd "$(dirname "$0")/.." || exit 1
[ $# -gt 0 ] || set -- tests/golden tests/laws tests/unit
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
while read -r name settings; do
    echo "== $name: $settings"
    # shellcheck disable=SC2086 # several settings
    env $settings PREFED_CLOSENESS="$work/$name" PYTHONPATH="tests${PYTHONPATH:+:$PYTHONPATH}" \
        "${PYTHON:-.venv/bin/python}" -m pytest -p closeness -p no:cacheprovider --numprocesses "${JOBS:-2}" "$@" \
        </dev/null >"$work/log" 2>&1 || failed=1
    grep -E '^(FAILED|ERROR)' "$work/log"
    tail -n 1 "$work/log"
done <<END
plain OMP_NUM_THREADS=1
scalar OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default
avx2 OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=avx2
mkl OMP_NUM_THREADS=1 MKL_CBWR=AVX2
onednn OMP_NUM_THREADS=1 DNNL_MAX_CPU_ISA=AVX2
threads OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
END
"${PYTHON:-.venv/bin/python}" tests/closeness.py "$work"/plain "$work"/scalar "$work"/avx2 "$work"/mkl "$work"/onednn "$work"/threads
exit $failed
