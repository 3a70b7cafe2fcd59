# Sourced by the launchers: goes to the checkout, chooses the Python, puts the settings together and starts the ranks.
# Of every launcher, from the environment: GPUS_PER_NODE (8; processes on this machine, gloo ranks on CPUs), and on several
# machines NNODES, NODE_RANK (each its own, from 0), MASTER_ADDR (the first one's name) and MASTER_PORT (6000).
# Started by Slurm's srun, a launcher is one rank, and Slurm says which.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ ! -x .venv/bin/python ] || PYTHON=${PYTHON:-.venv/bin/python}    # made by quickstart.sh or tests/run.sh
PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -c 'import sys, importlib.util as u; sys.exit(u.find_spec("torch") is None)'; then
    echo "error: $PYTHON has no torch: bash examples/quickstart.sh makes a .venv that has, or name another one: PYTHON=... bash $0" >&2
    exit 2
fi

# launch OWN... -- GIVEN...   trains with the launcher's own settings and those typed behind its name. With --dry-run it
# prints the command instead, and what that amounts to once all files are there.
launch() {
    merge_settings "$@"
    case $GIVEN in *" --help "* | *" --print-config "*) exec "$PYTHON" pretrain_gpt.py "${SETTINGS[@]}" ;; esac
    local program=("$PYTHON" -m torch.distributed.run) ranks nodes=${NNODES:-1} processes=${GPUS_PER_NODE:-8}
    if [ "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 ]; then
        exec "$PYTHON" pretrain_gpt.py "${SETTINGS[@]}"
    elif [ "$nodes" = 1 ] && [ -z "${MASTER_ADDR:-}${MASTER_PORT:-}" ]; then
        program+=(--standalone --nproc_per_node "$processes")
    else
        [ "$nodes" != 1 ] || NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-localhost}
        program+=(--nproc_per_node "$processes" --nnodes "$nodes" --node_rank "${NODE_RANK:-\$NODE_RANK}")
        program+=(--master_addr "${MASTER_ADDR:-\$MASTER_ADDR}" --master_port "${MASTER_PORT:-6000}")
    fi
    ranks=$((processes * nodes))
    case $GIVEN in *" --dry-run "*) plan "$ranks" "${program[@]}" ;; esac
    if [ "$nodes" != 1 ] && [ -z "${MASTER_ADDR:+${NODE_RANK:-}}" ]; then
        echo "error: NNODES=$nodes: every machine needs MASTER_ADDR, the name of the first one, and a NODE_RANK of its own, from 0" >&2
        exit 2
    fi
    check_settings "$ranks"
    exec "${program[@]}" pretrain_gpt.py "${SETTINGS[@]}"
}

# merge_settings OWN... -- GIVEN...   leaves both in SETTINGS, without those of OWN that GIVEN gives again: what is typed
# behind the launcher's name wins. (pretrain_gpt.py would take the last one too, and say so about each.)
merge_settings() {
    local own=() keep=1 word
    while [ "$1" != -- ]; do own+=("$1"); shift; done
    shift
    GIVEN=" "
    for word in "$@"; do GIVEN+="${word%%=*} "; done
    SETTINGS=()
    for word in "${own[@]}"; do
        case $word in --*) keep=1; case $GIVEN in *" $word "*) keep=0 ;; esac ;; esac
        [ $keep = 0 ] || SETTINGS+=("$word")
    done
    SETTINGS+=("$@")
}

# check_settings PROCESSES   before any of them starts, so that each mistake is one line and not a report of every rank.
check_settings() {
    "$PYTHON" -m megatron.cli.check_launch "$1" "${SETTINGS[@]}"
}

# plan PROCESSES PROGRAM...   prints the command, then what it amounts to, or which files are not there yet.
plan() {
    local ranks=$1 word words=() absent
    shift
    for word in "${SETTINGS[@]}"; do [ "$word" = --dry-run ] || words+=("$word"); done
    for word in "$@" pretrain_gpt.py "${words[@]}"; do
        case $word in
            '$NODE_RANK' | '$MASTER_ADDR') printf '%s ' "$word" ;;    # to be said on each machine
            '' | *[!A-Za-z0-9_./:=,+-]*) printf '%q ' "$word" ;;
            *) printf '%s ' "$word" ;;
        esac
    done
    echo
    absent=$(check_settings "$ranks") || exit
    if [ -n "$absent" ]; then
        echo "$absent"
        exit 0
    fi
    case $GIVEN in *" --dry-run-ranks "*) ;; *) SETTINGS+=(--dry-run-ranks "$ranks") ;; esac
    exec "$PYTHON" pretrain_gpt.py "${SETTINGS[@]}"
}
