#!/usr/bin/env bash
# Sets up .venv (and what the tests need), then runs the linter, the type checker and every test.
# Arguments go to pytest, and then pytest alone runs: bash tests/run.sh tests/unit/config -k batch
set -euo pipefail
cd "$(dirname "$0")/.."
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
check "mypy" mypy
check "pytest" pytest
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
