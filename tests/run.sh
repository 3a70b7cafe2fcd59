#!/usr/bin/env bash
# Sets up .venv (and what the tests need), then runs the linter, the type checker and every test.
# Arguments go to pytest, and then pytest alone runs: bash tests/run.sh tests/unit/config -k batch
set -euo pipefail
cd "$(dirname "$0")/.."
{ : <&0; } 2> /dev/null || exec < /dev/null # the first file that a process opens would be its standard input
. examples/setup.sh
setup_environment --extra test

if [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest "$@"
fi
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
# Three files at a time: on two cores, two of them left one core idle for an eighth of the time, since tests also wait
# (for ranks, for a limit to pass). In the order of the folders, which are those with the long files first, so that none
# of them is what remains for one process at the end.
check "pytest" pytest -n 3 --dist loadfile --no-loadscope-reorder
wait "$types" || failed="$failed mypy"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
