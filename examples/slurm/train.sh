# Sourced by the batch scripts: train DEFAULT [LAUNCHER] FLAGS... runs a launcher of examples/ on all tasks of the job, one rank each.
#
# Told to stop (SIGUSR1 ahead of the time limit, SIGTERM of a preemption, by whichever way they come), the ranks save after their
# step and end with code 0, and the job is queued again: the same command goes on from what was saved. A run that is done, or that
# fails, is not queued again; its exit code is the job's. A run that is interrupted three times without a new checkpoint fails too.
# Checkpoints are in --save or CHECKPOINT_PATH, by default experiments/ and the launcher's name.

train() {
    local launcher=$1 before code
    shift
    case ${1:---} in --*) ;; *) launcher=$1; shift ;; esac
    if ! command -v srun > /dev/null; then
        echo "error: there is no srun here; submit the script with sbatch where Slurm is, or start bash $launcher" >&2
        exit 2
    fi
    export CHECKPOINT_PATH=${CHECKPOINT_PATH:-experiments/$(basename "$launcher" .sh)}
    CHECKPOINT_PATH=$(value_of --save "$CHECKPOINT_PATH" "$@")
    if [ "$(value_of --load "$CHECKPOINT_PATH" "$@")" != "$CHECKPOINT_PATH" ]; then
        echo "error: --load: a job that is queued again goes on from $CHECKPOINT_PATH, where it saves; leave the flag out" >&2
        exit 2
    fi
    RECORD=$CHECKPOINT_PATH/exit_reason.json TOLD="" STEP=""
    before=$(written)
    trap 'TOLD=yes; tell' USR1 TERM
    srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash "$launcher" "$@" --exit-signal-handler &
    STEP=$!
    [ -z "$TOLD" ] || tell
    while true; do    # a signal ends a wait, and not the step
        code=0
        wait "$STEP" || code=$?
        [ "$code" -gt 128 ] && kill -0 "$STEP" 2>/dev/null || break
    done
    # That of an earlier part counts for nothing, and a run that was killed has removed it.
    if [ "$(written)" = "$before" ] || [ ! -e "$RECORD" ]; then RECORD=/dev/null; fi
    finish "$code"
}

# value_of FLAG DEFAULT WORDS...   what the words say of a flag.
value_of() {
    local flag=$1 value=$2 word previous=""
    shift 2
    for word in "$@"; do
        case $word in "$flag="*) value=${word#*=} ;; esac
        if [ "$previous" = "$flag" ]; then value=$word; fi
        previous=$word
    done
    echo "$value"
}

# SIGUSR1, which srun hands to every task; a SIGTERM would make it kill them.
tell() {
    [ -z "$STEP" ] || kill -USR1 "$STEP" 2>/dev/null || true
}

written() {
    stat -c %y "$RECORD" 2>/dev/null || true
}

# finish CODE   by what the ranks have recorded, where they could: srun's code is the highest of all tasks, and those that lose the
# one that failed, or are ended after it, have higher ones.
finish() {
    local code=$1 recorded
    if grep -q '"reason": "signal"' "$RECORD"; then queue_again; fi
    recorded=$(sed -n 's/.*"exit_code": \([0-9]*\).*/\1/p' "$RECORD")
    if [ "${recorded:-0}" -gt 0 ]; then code=$recorded; fi
    case $code in
        17 | 12[89] | 1[3-9][0-9])    # told to stop, they were killed before they could save, or lost each other in it
            if [ -n "$TOLD" ]; then queue_again; fi ;;
    esac
    exit "$code"
}

# A job that Slurm has cancelled stays so, and one that it requeues by itself needs no help.
queue_again() {
    local state
    state=$(scontrol show job "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z_]\+' || true)
    if [ "${state:-JobState=RUNNING}" != JobState=RUNNING ]; then
        echo "interrupted; not queued again from here ($state)"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        echo "interrupted; queued again as job $SLURM_JOB_ID"
    else
        echo "error: interrupted, and Slurm does not queue the job again; submit it once more by hand to go on" >&2
        exit 1
    fi
    exit 0
}
