# Sourced by quickstart.sh and tests/run.sh, which then call: setup_environment [--extra test]
# Executed, it only sets up: bash examples/setup.sh [--extra test]
# It leaves a Python with everything installed in $PYTHON. Set PYTHON beforehand to choose which one it starts from.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Prints the Python to start from: the first that really runs (version managers leave commands on the PATH that do
# not) and is 3.11 to 3.13, one that has torch before one that has not.
find_python() {
    local name found first="" names=(python3 python python3.13 python3.12 python3.11)
    [ -z "${PYTHON:-}" ] || names=("$PYTHON")
    for name in "${names[@]}"; do
        found=$("$name" -c '
import sys
if (3, 11) <= sys.version_info[:2] <= (3, 13):
    import importlib.util
    print("torch" if importlib.util.find_spec("torch") else "plain")' 2>/dev/null) || continue
        case $found in
            torch) echo "$name"; return ;;
            plain) first=${first:-$name} ;;
        esac
    done
    if [ -z "$first" ]; then
        echo "error: no Python 3.11, 3.12 or 3.13 runs here (looked for: ${names[*]}): install one, or name it: PYTHON=/path/to/python3 bash $0" >&2
        return 2
    fi
    echo "$first"
}

# Installs the packages and builds the C++ parts. These need no package and compile meanwhile: pip keeps one core busy.
setup_environment() {
    local base ahead failed=0
    base=$(find_python) || return 2
    nice "$base" "$ROOT/csrc/build.py" >/dev/null 2>&1 &
    ahead=$!
    trap 'kill "$ahead" 2>/dev/null; exit 130' INT
    "$base" "$ROOT/tools/setup_environment.py" "$@" || failed=$?
    if [ "$failed" -ne 0 ]; then
        kill "$ahead" 2>/dev/null || :
        return "$failed"
    fi
    trap - INT
    PYTHON=$ROOT/.venv/bin/python
    wait "$ahead" || :
    "$PYTHON" -u "$ROOT/csrc/build.py" 2>&1 | tee -a "$ROOT/.venv/setup.log" | grep -E '^(kernels|index builders):' ||
        echo "C++ parts: not built, see $ROOT/.venv/setup.log; numpy and PyTorch's own operations are used (slower)"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    setup_environment "$@" || exit
    echo "source .venv/bin/activate"
fi
