#!/usr/bin/env bash
# Sets up .venv (and what the tests need), then runs the linter, the type checker and every test.
#   bash tests/run.sh --quick               the files of tests/quick.txt: a few minutes
#   bash tests/run.sh --changed [COMMIT]    the tests that a change since COMMIT (HEAD) can affect
# Other arguments go to pytest, and then pytest alone runs: bash tests/run.sh tests/unit/config -k batch
set -euo pipefail
cd "$(dirname "$0")/.."
{ : <&0; } 2> /dev/null || exec < /dev/null # the first file that a process opens would be its standard input
. examples/setup.sh
setup_environment --extra test

workers=$(($("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)))') + 1))
case "${1-}" in
--quick) exec "$PYTHON" -m pytest -n "$workers" --dist loadfile $(grep -v '^#' tests/quick.txt) ;;
--changed)
    affected=$("$PYTHON" tests/changed.py "${2-HEAD}")
    [ -n "$affected" ] || { echo "no test is affected by what changed since ${2-HEAD}"; exit 0; }
    exec "$PYTHON" -m pytest -n "$workers" --dist loadfile $affected
    ;;
?*) exec "$PYTHON" -m pytest "$@" ;;
esac
failed=""
check() {
    echo "== $1"
    shift
    "$PYTHON" -m "$@" || failed="$failed $1"
}
check "ruff check" ruff check .
check "ruff format" ruff format --check .
# The type checker keeps one core busy: it works beside the first tests, and says what it found among their lines.
{ found=$("$PYTHON" -m mypy 2>&1) && code=0 || code=$?; echo "== mypy"; echo "$found"; exit "$code"; } &
types=$!
# One file more at a time than there are cores: with two on two cores, one core was idle for an eighth of the time, since
# tests also wait (for ranks, for a limit to pass). Folders run in order: those with the long files come first, so that
# no long file is left to one process at the end.
check "pytest" pytest -n "$workers" --dist loadfile --no-loadscope-reorder --ignore=tests/release
wait "$types" || failed="$failed mypy"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
