# Sourced by the launchers: goes to the checkout, chooses the Python, and puts the settings together.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ ! -x .venv/bin/python ] || PYTHON=${PYTHON:-.venv/bin/python}    # made by quickstart.sh or tests/run.sh
PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("torch") is None)'; then
    echo "error: $PYTHON has no torch: bash examples/quickstart.sh makes a .venv that has, or name another one: PYTHON=... bash $0" >&2
    exit 2
fi

# merge_settings OWN... -- GIVEN...   leaves both in SETTINGS, without those of OWN that GIVEN gives again: what is typed
# behind the launcher's name wins. (pretrain_gpt.py would take the last one too, and say so about each.)
merge_settings() {
    local own=() given=" " keep=1 word
    while [ "$1" != -- ]; do own+=("$1"); shift; done
    shift
    for word in "$@"; do given+="${word%%=*} "; done
    SETTINGS=()
    for word in "${own[@]}"; do
        case $word in --*) keep=1; case $given in *" $word "*) keep=0 ;; esac ;; esac
        [ $keep = 0 ] || SETTINGS+=("$word")
    done
    SETTINGS+=("$@")
    case $given in *" --help "* | *" --print-config "*) exec "$PYTHON" pretrain_gpt.py "${SETTINGS[@]}" ;; esac
}

# check_settings PROCESSES   before any of them starts, so that each mistake is one line and not a report of every rank.
check_settings() {
    "$PYTHON" - "$1" "${SETTINGS[@]}" <<'END'
import sys

from megatron.config import check_world
from megatron.errors import MegatronError
from megatron.training.settings import read_settings

try:
    check_world(read_settings(sys.argv[2:]), int(sys.argv[1]))
except MegatronError as error:
    print("\n".join(f"error: {line}" for line in error.lines), file=sys.stderr)
    sys.exit(error.exit_code)
END
}
