#!/bin/sh
# What only a GPU can do in minutes: train the small decoder with each attention, then ask SmolLM2 everything.
#
#     tests/gpu/evaluate.sh OUT CORPUS [MODEL.gguf]
#
# In a shell that prepare.sh made ready (WHEELS with transformers, tokenizers, gguf and accelerate for the second part).
# CORPUS comes from `python -m pyramidbench.training prepare CORPUS`. MINUTES: time that the slowest arm trains for, 1.5 unless
# set; compiling and the probes come on top. Every part resumes where it was stopped, checkpoints lie in CHECKPOINTS.
# MODEL.gguf: SmolLM2's weights, as `pyramidbench capture smollm2 --fetch-only` leaves them under .model.
set -eu
if [ $# -lt 2 ]; then
    echo "usage: $0 OUT CORPUS [MODEL.gguf]" >&2
    exit 2
fi
python=${PYTHON:-python3}
out=$1
methods=dense,pyramid,pyramid:paper,pyramid:fast,flat,flat:exact,exact_topk,sliding_window,random_blocks

"$python" -m pyramidbench.training run "$2" --out "$out/trained-decoder" \
    --checkpoints "${CHECKPOINTS:-${TMPDIR:-/tmp}/pyramidbench-checkpoints}" --minutes "${MINUTES:-1.5}"
[ $# -gt 2 ] || exit 0

ask() {
    name=$1
    shift
    "$python" -m pyramidbench evaluate "$@" --model "$model" --out "$out/smollm2-$name"
}
model=$3
ask perplexity perplexity --text emma,python-stdlib --length 8k --samples 2 --method "$methods" --keep 10%,5%,20%,40%
ask recall associative_recall --length 1k..8k --depths 8 --method "$methods" --keep 10%,5%,20%,40%
ask retrieval retrieval --text emma --length 1k..8k --depths 5 --method dense,pyramid,flat,sliding_window --keep 5%
ask commonsense social_iqa,winogrande,quartz --shots 0,4k,7k --samples 100 \
    --method dense,pyramid,flat,sliding_window --keep 5%
