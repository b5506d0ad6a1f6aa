#!/usr/bin/env bash
# Runs every kernel on small cases on a Hopper GPU under two tools of NVIDIA's compute-sanitizer: memcheck (accesses
# outside an allocation) and racecheck (shared memory that two threads access without a barrier between them). By default
# racecheck leaves out the kernels for Hopper, see below.
#
#   scripts/sanitize.sh                 all cases of tests/gpu/sanitize_cases.py
#   scripts/sanitize.sh portable expand cases whose name contains one of these words
#   RECORDS=benchmarks/results/sanitize.jsonl scripts/sanitize.sh    appends what each tool found to this file
#
# PYTHON chooses the Python, which needs torch and triton (default: that of .venv, else python3). compute-sanitizer
# comes with the CUDA toolkit and with `pip install nvidia-cuda-sanitizer-api`.
if [ "${1:-}" = --help ]; then sed -n '2,/^[^#]/s/^#\( \|$\)//p' "$0" && exit; fi
set -euo pipefail
trap 'exit 130' INT TERM
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$REPOSITORY/.venv/bin/python
    if [ ! -x "$PYTHON" ]; then PYTHON=python3; fi
fi
CASES=("$PYTHON" "$REPOSITORY/tests/gpu/sanitize_cases.py" "$@")

find_sanitizer() {
    "$PYTHON" - <<'END'
import shutil, sys
from glob import glob
found = [shutil.which("compute-sanitizer"), *sorted(glob("/usr/local/cuda*/bin/compute-sanitizer"))]
for folder in sys.path:  # of the wheels
    found += glob(f"{folder}/nvidia/*/bin/compute-sanitizer")
print(next(filter(None, found), ""))
END
}

SANITIZER=$(find_sanitizer)
if [ -z "$SANITIZER" ]; then
    echo "No compute-sanitizer on PATH, in /usr/local/cuda*/bin or among Python's packages:" \
        "install the CUDA toolkit, or run 'pip install nvidia-cuda-sanitizer-api'." >&2
    exit 2
fi
LOG=$(mktemp)
trap 'rm -f "$LOG"' EXIT

failed=
COMMAND="scripts/sanitize.sh${*:+ $*}"
# Appends a record of a tool: what it found, and how long it took.
record() {
    PYTHONPATH=$REPOSITORY/scripts:$PYTHONPATH "$PYTHON" - "$RECORDS" "$COMMAND" "$@" <<'END'
import re, sys
from bench.records import write_record
path, command, tool, summary, seconds, *words = sys.argv[1:]
case = {"tool": tool, "cases": " ".join(words) or "all"}
found = int(re.search(r"(\d+) (error|hazard)", summary)[1])
write_record(path, bench="sanitize", impl="hybrid_mla", case=case, found=found, seconds=int(seconds), command=command)
END
}
# Runs a command; prints its name, the last line that matters and the time, and after a failure all that it printed.
check() {
    local name=$1 start=$SECONDS status=0 summary
    shift
    "$@" >"$LOG" 2>&1 || status=$?
    summary=$(grep -o '[A-Z]* SUMMARY:.*' "$LOG" | tail -1 || true)
    if [ "$status" -ne 0 ]; then
        failed=yes
        cat "$LOG"
        summary="FAILED with status $status. $summary"
    fi
    echo "$name: ${summary:-passed} ($((SECONDS - start)) s)"
    if [ -n "${RECORDS:-}" ] && [[ "$summary" == *SUMMARY* ]]; then
        record "$name" "$summary" $((SECONDS - start)) "${CASES[@]:2}"
    fi
}
# First without a tool: this compiles the kernels into Triton's cache and checks their results.
check "no tool" "${CASES[@]}"
[ -z "$failed" ] || exit 1
# Every tensor gets an allocation of its own, or memcheck cannot see where it ends. Failing driver calls are ignored: torch
# or Triton raises where one matters, and the others are torch asking what the driver can do.
check memcheck env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$SANITIZER" --tool memcheck --report-api-errors no \
    --error-exitcode 1 --target-processes application-only "${CASES[@]}"
# Without the kernels for Hopper, unless a word asks for them. Racecheck reports two false positives in the naive one: what
# Triton passes to its specialised warps, whose named barriers the tool does not follow; and consumers that clear the same
# values behind a prefix's end, each before its own product, where every one writes zero or what is there already. The
# absorb kernels have specialised warps, too.
if [ $# -eq 0 ]; then CASES+=(portable expand); fi
check racecheck "$SANITIZER" --tool racecheck --error-exitcode 1 --target-processes application-only "${CASES[@]}"
[ -z "$failed" ]
