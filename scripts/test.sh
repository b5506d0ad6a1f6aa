#!/usr/bin/env bash
# Installs what the tests need into .venv, then runs the checks and the tests.
#
#   scripts/test.sh                        lint, types, and all tests that need no GPU
#   scripts/test.sh tests/unit -k planner  one pytest run with these arguments
#   scripts/test.sh -m gpu tests/gpu       the tests on a Hopper GPU
#
# Every step prints its own summary, and all of them run; the exit status is that of the whole. The server tests run
# from the start beside the other steps, since they wait for their servers most of the time; what they print is kept
# and shown as the last step.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
trap 'exit 130' INT TERM
cd "$REPOSITORY"
prepare_environment dev
# A warning of sentencepiece's types that Python would print after pytest's summary.
export PYTHONWARNINGS="ignore:builtin type:DeprecationWarning"

failed=
niceness=0
# Runs one step; a failure is remembered, and the other steps still run.
step() {
    local name=$1
    say "$name${failed:+ (failed so far:$failed)}"
    shift
    "$@" || failed="$failed $name,"
}
# Kernel tests run Triton's interpreter, which must be chosen before Triton is imported: a process of their own.
run_pytest() {
    case " $* " in
        *" tests/kernels"*) TRITON_INTERPRET=1 nice -n "$niceness" "$PYTHON" -m pytest "$@" ;;
        *) nice -n "$niceness" "$PYTHON" -m pytest "$@" ;;
    esac
}

if [ $# -gt 0 ]; then
    run_pytest -m "not gpu" "$@"
    exit
fi
niceness=10 # servers that wait for the processor take chats one by one that were sent together
server_output=$(mktemp)
"$PYTHON" -m pytest -m "not gpu" tests/server >"$server_output" 2>&1 &
server_tests=$!
# SIGTERM, because a background job ignores Ctrl-C; pytest then stops its servers.
trap '{ kill $server_tests 2>/dev/null && wait $server_tests; } || true; rm -f "$server_output"' EXIT
finish_server_tests() {
    local status=0
    wait $server_tests || status=$?
    cat "$server_output"
    return $status
}

step "Lint" "$PYTHON" -m ruff check
step "Format" "$PYTHON" -m ruff format --check
step "Types" "$PYTHON" -m mypy
for folder in tests/unit tests/kernels; do
    step "$folder" run_pytest -m "not gpu" -n auto --maxprocesses 4 --dist loadfile "$folder"
done
step tests/server finish_server_tests
[ -z "$failed" ]
