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
echo "== ruff"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
echo "== mypy"
"$PYTHON" -m mypy
echo "== pytest"
exec "$PYTHON" -m pytest
