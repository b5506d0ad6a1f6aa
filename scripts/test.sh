#!/usr/bin/env bash
# Installs what the tests need into .venv, then runs the checks and the tests.
#
#   scripts/test.sh                        lint, types, and all tests that need no GPU and are not marked slow, with the
#                                          newest SGLang that is supported; those about SGLang also with the oldest, in
#                                          an environment of its own
#   scripts/test.sh tests/unit -k planner  one pytest run with these arguments
#   scripts/test.sh -m gpu tests/gpu       the tests on a Hopper GPU
#   SGLANG_OF_TESTS=0.5.17 scripts/test.sh ...  one pytest run with this SGLang
#
# Every step prints its own summary, and all of them run; the exit status is that of the whole. The server tests run
# from the start beside the other steps, since they wait for their servers most of the time; what they print is kept
# and shown as the last steps.
if [ "${1:-}" = --help ]; then sed -n '2,/^[^#]/s/^#\( \|$\)//p' "$0" && exit; fi
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
trap 'exit 130' INT TERM
cd "$REPOSITORY"
OLDEST=0.5.17
UNIT_OF_OLDEST=(tests/unit/adapter/test_plugin.py # what differs between releases
    tests/unit/adapter/launch/test_{dp_routing,examine,features,mixed_steps_at_launch,models_at_launch}.py
    tests/unit/adapter/step/test_{admission,backend_interface,hooks,mixed}.py
    tests/unit/adapter/latent/test_{host_cache,latent_pool,tree_on_host}.py
    tests/unit/adapter/compat/test_{contract,contract_reads,shared_nodes,syntax,traffic,tree_view}.py)
SERVERS_OF_OLDEST=(tests/server/test_answers.py tests/server/test_launch.py::test_launch_stops
    tests/server/test_mixed_steps.py::test_tokens_are_mixed_with_running_requests
    tests/server/test_two_ranks.py::test_ranks_with_requests_of_their_own_answer_as_one) # all others by hand
if [ $# = 0 ]; then
    prepare_environment dev $OLDEST
    OLDEST_PYTHON=$PYTHON
fi
prepare_environment dev "${SGLANG_OF_TESTS:-}"
# A warning of sentencepiece's types that Python would print after pytest's summary.
export PYTHONWARNINGS="ignore:builtin type:DeprecationWarning"
# Some three dozen processes import SGLang: the first of them compiles it for all.
unset PYTHONDONTWRITEBYTECODE
# Tests fill the cores by themselves: threads of one that wait for each other take the time of the others.
export OMP_NUM_THREADS=1

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
server_output=$(mktemp -d)
# $1 is a name for what they print; then an environment's Python, and the tests.
run_server_tests() {
    "$2" -m pytest -m "not gpu and not slow" "${@:3}" >"$server_output/$1" 2>&1 &
    child=$!
    wait $child || touch "$server_output/failed-$1"
}
# One environment after the other, so that no server waits for another's.
run_all_server_tests() {
    local child
    trap 'kill $child 2>/dev/null && wait $child; exit 143' TERM
    run_server_tests $SGLANG_VERSION "$PYTHON" tests/server
    run_server_tests $OLDEST "$OLDEST_PYTHON" "${SERVERS_OF_OLDEST[@]}"
}
run_all_server_tests &
server_tests=$!
# SIGTERM, because a background job ignores Ctrl-C; pytest then stops its servers.
trap '{ kill $server_tests 2>/dev/null && wait $server_tests; } || true; rm -rf "$server_output"' EXIT
# The server tests with one SGLang.
finish_server_tests() {
    wait $server_tests 2>/dev/null || true
    cat "$server_output/$1"
    [ ! -e "$server_output/failed-$1" ]
}

step "Lint" "$PYTHON" -m ruff check
step "Format" "$PYTHON" -m ruff format --check
step "Spelling" "$PYTHON" -m codespell_lib
step "Markdown" "$PYTHON" -m pymarkdown scan --recurse README.md CHANGELOG.md docs configs scripts
step "Types" "$PYTHON" -m mypy
# In one process: another would import SGLang for itself, which takes longer than it would save.
PYTHON=$OLDEST_PYTHON step "SGLang $OLDEST: tests/unit" run_pytest -m "not slow" "${UNIT_OF_OLDEST[@]}"
# Last, because these use all cores when the server tests have ended.
for folder in tests/unit tests/kernels; do
    step "$folder" run_pytest -m "not gpu and not slow" -n auto --maxprocesses 4 --dist loadfile "$folder"
done
step tests/server finish_server_tests $SGLANG_VERSION
step "SGLang $OLDEST: tests/server" finish_server_tests $OLDEST
[ -z "$failed" ]
