# Sourced by the three scripts: their options, the five sizes, and the launch.

CALLED_FROM=$PWD
RECIPE=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
has() { "$1" -c "import sys, importlib.util as u; sys.exit(u.find_spec('$2') is None)" 2>/dev/null; }
# Where `pip3 install -r requirements.txt` put them comes before the checkout's .venv.
if [ -z "${PYTHON:-}" ] && has python3 torch; then PYTHON=python3; fi
. "$RECIPE/../launch.sh"        # goes to the checkout
ROOT=$PWD
[ "$PYTHON" != .venv/bin/python ] || PYTHON=$ROOT/$PYTHON    # what --dry-run prints can be typed anywhere

fail() { echo "error: $*" >&2; exit 2; }

# read_options "NAME ..." WORDS...   puts --NAME=VALUE into the variable NAME. dry_run is set by --dry-run; other flags
# are left in PASSED_ON.
read_options() {
    local names=$1 word name
    shift
    PASSED_ON=() dry_run=0
    while [ $# -gt 0 ]; do
        word=$1 name=${1%%=*} name=${name#--} name=${name//-/_}
        shift
        case " $names " in
            *" $name "*)
                case $word in
                    --*=?*) printf -v "$name" %s "${word#*=}" ;;
                    --*=) fail "$word: has no value" ;;
                    --*) [ $# -gt 0 ] || fail "$word: has no value"; printf -v "$name" %s "$1"; shift ;;
                    *) fail "$word: not an option; options begin with two dashes, as in --$word" ;;
                esac ;;
            *)
                case $word in
                    --dry-run | --dry_run) dry_run=1 PASSED_ON+=(--dry-run) ;;
                    --help | -h) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$(from_caller "$0")"; exit 0 ;;
                    --*) PASSED_ON+=("$word") ;;
                    *)
                        [ ${#PASSED_ON[@]} -gt 0 ] || fail "$word: not an option; $(basename "$0") has $(option_list "$names")"
                        PASSED_ON+=("$word") ;;
                esac ;;
        esac
    done
}

option_list() { local name; for name in $1; do printf -- '--%s=... ' "$name"; done; printf -- '--dry-run'; }

# whole_number --OPTION VALUE
whole_number() {
    case $2 in
        '' | *[!0-9]* | 0*) fail "$1=$2: a whole number of at least 1 is needed" ;;
    esac
}

from_caller() {                 # paths that are typed are those of the folder they are typed in
    case $1 in /* | *://*) echo "$1" ;; *) echo "$CALLED_FROM/${1#./}" ;; esac
}

# ---------------------------------------------------------------- training

# Layers, hidden size, heads, sequence, global batch, micro batch, tensor parallel, pipeline parallel, learning rate
# and the iterations of its decay.
choose_size() {
    case $model_size in
        345M)            SIZE=(24 1024 16 1024 16 4 1 2 1.5e-4 320000) ;;
        1.3B)            SIZE=(24 2048 16 1024 32 8 2 2 1.5e-4 320000) ;;
        2.7B)            SIZE=(32 2560 32 2048 32 8 2 2 1.5e-4 320000) ;;
        3.7B)            SIZE=(32 3072 32 2048 16 4 2 2 1.5e-4 320000) ;;
        345M_without_mp) SIZE=(24 1024 16 1024 16 2 1 1 1.5e-4 320000) ;;
        tiny)            SIZE=(2 128 4 128 16 4 1 2 1e-3 1000) ;;     # ours, for a laptop
        *) fail "--model_size=$model_size: no such size; there are 345M, 1.3B, 2.7B, 3.7B and 345M_without_mp, and tiny for a laptop" ;;
    esac
}

# All accelerators up to 8, else one process on the CPU, unless --devices says how many.
choose_devices() {
    local found
    [ -z "$devices" ] || whole_number --devices "$devices"
    found=$("$PYTHON" -c 'import torch
a = torch.accelerator
print(*((a.device_count(), a.current_accelerator().type) if a.is_available() else (1, "cpu")))')
    DEVICE=${found#* }
    devices=${devices:-$((${found% *} > 8 ? 8 : ${found% *}))}
}

gcd() { if [ "$2" -eq 0 ]; then echo "$1"; else gcd "$2" $(($1 % $2)); fi }

# fit DEVICES   the recipe's layout where it fits, else the nearest smaller one; fails where the batch does not divide.
fit() {
    TENSOR=$(gcd "${SIZE[6]}" "$1")
    PIPELINE=$(gcd "${SIZE[7]}" $(($1 / TENSOR)))
    local batch=${SIZE[4]} ranks=$(($1 / TENSOR / PIPELINE))
    MICRO=$(gcd "${SIZE[5]}" $((batch / ranks)))
    [ $((batch % ranks)) -eq 0 ]
}

choose_layout() {
    local fewer=$devices recipe="tensor parallel ${SIZE[6]}, pipeline parallel ${SIZE[7]}, micro batch ${SIZE[5]}"
    if ! fit "$devices"; then
        until fit "$fewer"; do fewer=$((fewer - 1)); done
        fail "--devices=$devices: the batch of ${SIZE[4]} does not divide over them; type --devices=$fewer"
    fi
    LAYOUT="tensor parallel $TENSOR, pipeline parallel $PIPELINE, micro batch $MICRO"
    [ "$LAYOUT" = "$recipe" ] || LAYOUT+=" (the recipe's does not fit: $recipe; the same model is trained)"
}

# too_little FLAGS...   whether the ranks need more memory than this machine has, with these flags instead of their like.
too_little() { "$PYTHON" pretrain_gpt.py "${SETTINGS[@]}" "$@" --dry-run --dry-run-ranks "$devices" | grep 'does not fit' >/dev/null; }

# fit_memory   on CPUs a smaller micro batch, and then recomputation, where the memory asks for it. Neither changes what
# is trained. Where that is too little, too, pretrain_gpt.py says what is missing.
fit_memory() {
    local micro=$MICRO said="" word
    case $GIVEN in *" --micro-batch-size "* | *" --recompute-"*) return 0 ;; esac
    while too_little --micro-batch-size "$micro"; do
        if [ "$micro" -eq 1 ]; then
            SETTINGS+=(--recompute-granularity full --recompute-method uniform)
            said=" and recomputation"
            break
        fi
        micro=$((micro / 2))
    done
    [ "$micro" -ne "$MICRO" ] || [ -n "$said" ] || return 0
    for word in "${!SETTINGS[@]}"; do
        [ "${SETTINGS[word]}" != --micro-batch-size ] || SETTINGS[word + 1]=$micro
    done
    LAYOUT+="; micro batch $micro$said, to fit this machine's memory: the same model is trained"
}

# explain_end CODE LOG   why a run ended that had no time to say it.
explain_end() {
    if [ "$1" -eq 137 ] || tail -n 60 "$2" | grep -q 'exitcode *: -9'; then
        echo "error: a process was killed (SIGKILL: exit code 137, or -9 in torchrun's report), most often because the machine had too little memory: type fewer --devices, or add --micro-batch-size 1 --recompute-granularity full --recompute-method uniform" >&2
        exit 137
    fi
    exit "$1"
}

find_data() {
    local file
    for file in gpt2-vocab.json gpt2-merges.txt my-gpt_text_sentence.bin my-gpt_text_sentence.idx; do
        [ -f "$data_path/$file" ] || fail "--data_path=$data_path: $file is not there; name the folder that test/dataset_preprocess_gpt.sh wrote, or run it"
    done
}

# What is saved and does not fit is refused here in a line, and not by every rank.
check_checkpoint() {
    local saved=$RECIPE/ckpts/ckpts_tmp
    case " ${SETTINGS[*]} " in *" --load $saved "*) ;; *) return 0 ;; esac
    [ -e "$saved/latest_checkpointed_iteration.txt" ] || return 0
    "$PYTHON" pretrain_gpt.py "${SETTINGS[@]}" --dry-run --dry-run-ranks "$devices" >/dev/null && return
    fail "$saved holds the run of another line; to keep it and begin anew: mv $saved ${saved%_tmp}_$(date +%Y%m%d_%H%M)"
}

# train NAME OUTPUT_ARGS...   the run with its log, then the table of all runs that have one.
train() {
    local name=$1 precision=() every log program
    shift
    whole_number --train_iters "$train_iters"
    data_path=$(from_caller "$data_path")
    choose_size
    [ $dry_run = 1 ] || find_data
    choose_devices
    choose_layout
    [ "$DEVICE" = cpu ] || precision=(--fp16)
    every=$(((train_iters + 9) / 10))   # a short run is logged ten times, too, and at its last step
    every=$((every < LOG_INTERVAL ? every : LOG_INTERVAL))
    while [ "$train_iters" -lt 1000 ] && [ $((train_iters % every)) -ne 0 ]; do every=$((every - 1)); done
    log=$RECIPE/logs/${name}_$model_size${PASSED_ON:++}_${devices}_$DEVICE
    GPT_ARGS=(
        --tensor-model-parallel-size "$TENSOR"
        --pipeline-model-parallel-size "$PIPELINE"
        --num-layers "${SIZE[0]}"
        --hidden-size "${SIZE[1]}"
        --num-attention-heads "${SIZE[2]}"
        --seq-length "${SIZE[3]}"
        --max-position-embeddings "${SIZE[3]}"
        --micro-batch-size "$MICRO"
        --global-batch-size "${SIZE[4]}"
        --attention-dropout 0
        --hidden-dropout 0
        --lr "${SIZE[8]}"
        --min-lr 1e-5
        --lr-decay-style cosine
        --lr-decay-iters "${SIZE[9]}"
        --lr-warmup-fraction .01
        --weight-decay 1e-2
        --clip-grad 1.0
        --train-iters "$train_iters"
        "${precision[@]}"
    )
    DATA_ARGS=(
        --data-path "$data_path/my-gpt_text_sentence"
        --vocab-file "$data_path/gpt2-vocab.json"
        --merge-file "$data_path/gpt2-merges.txt"
        --split 949,50,1
    )
    LOG_ARGS=(--log-interval "$every" --metrics-jsonl "$log.jsonl")
    merge_settings "${GPT_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}" "$@" -- "${PASSED_ON[@]}"
    program=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$devices")
    LAYOUT="$model_size on $devices x $DEVICE: $LAYOUT"
    case $GIVEN in
        *" --print-config "*) exec "$PYTHON" pretrain_gpt.py "${SETTINGS[@]}" ;;
        *" --dry-run "*) echo "$LAYOUT"; plan "$devices" "${program[@]}" ;;
    esac
    check_settings "$devices"
    check_checkpoint
    if [ "$DEVICE" = cpu ] && [ "$model_size" != tiny ]; then fit_memory; fi
    echo "$LAYOUT"
    mkdir -p "$RECIPE/logs"
    "${program[@]}" pretrain_gpt.py "${SETTINGS[@]}" 2>&1 | tee -a "$log.log" || explain_end $? "$log.log"
    show_results
}

# show_results   a row for each run that has a log, named NAME_SIZE_DEVICES_KIND, beside the published ones.
show_results() {
    local file run devices_of rows=() picture=()
    for file in "$RECIPE"/logs/*.jsonl; do
        run=$(basename "$file" .jsonl) run=${run#*_} devices_of=${run#"${run%_*_*}_"}
        rows+=(--run "${run%_*_*}" "${devices_of%_*} ${devices_of#*_}" "$file")
    done
    has "$PYTHON" matplotlib && picture=(--output "$RECIPE/logs/results.png") || echo "no picture: matplotlib is not installed"
    "$PYTHON" tools/results_table.py "${rows[@]}" --published "$RECIPE/published.json" "${picture[@]}" |
        tee "$RECIPE/logs/results.txt"
    case "${rows[*]}" in *"+ "*) echo "A size with a +: run with flags of your own, so not the recipe's." ;; esac
}
