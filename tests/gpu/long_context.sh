#!/bin/sh
# Real tensors at up to 256k tokens, and what the methods do on them: captures, the suite `methods`, and equal mass, on one GPU.
#
#     tests/gpu/long_context.sh OUT [MODEL]
#
# In a shell that prepare.sh made ready, with transformers, tokenizers, accelerate and gguf. MODEL: as `pyramidbench capture` takes
# it, smollm2 unless given; without network that needs the one file that `pyramidbench capture smollm2 --fetch-only` leaves under
# .model. The text is this Python's standard library. PARTS are the lengths that are measured, each in a run of its own and in this
# order, with the capture that each is taken from, since the positions of a longer one are stretched further, which strains the
# model: "64k=64k 256k=256k 16k=64k" unless set. The captures, about 0.1 and 0.5 GB, lie in CAPTURES, which is ${TMPDIR:-/tmp} unless
# set. While the model is converted and runs, the suite's kernels are compiled in JOBS processes, 8 unless set. OUT/methods-64k and
# so on are run folders, which the same command resumes, each with its report, OUT/report-64k and so on; logs and tables lie beside
# them. Where the packages that draw are missing, that is said, and `pyramidbench report OUT/methods-64k` makes one elsewhere. LAYER
# (13), EQUAL_MASS (captures whose tables of equal mass are made at their own length: "64k 256k", may be empty), ONLY (methods of
# those tables, a regular expression), TIMING (100ms a cell), ROPE (yarn), SUITE (methods), DEVICE (auto) and PYTHON (python3) may be
# set; LIMIT_S: seconds that a part may take, 600 unless set. A run's manifest holds OUT and CAPTURES as they are given: for one that
# is to be committed, give both relative to the folder that the script is called in.
set -u
if [ $# -lt 1 ]; then
    echo "usage: $0 OUT [MODEL]" >&2
    exit 2
fi
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
device=${DEVICE:-auto}
limit_s=${LIMIT_S:-600}
suite=${SUITE:-methods}
out=$1
mkdir -p "$out"
parts=${PARTS:-64k=64k 256k=256k 16k=64k}
began=$(date +%s)

say() {
    echo "== $(($(date +%s) - began)) s: $1"
}

# The file of a capture of so many tokens: captured TOKENS
captured() {
    echo "${CAPTURES:-${TMPDIR:-/tmp}}/long-context-$1-layer-${LAYER:-13}.safetensors"
}

timeout "$limit_s" "$python" "$here/compile_suite.py" "$suite" --jobs "${JOBS:-8}" --device "$device" >"$out/compiled.txt" 2>&1 &
compiling=$!
for part in $parts; do
    tokens=${part#*=}
    capture=$(captured "$tokens")
    if [ ! -f "$capture" ]; then
        timeout "$limit_s" "$python" -m pyramidbench capture "${2:-smollm2}" --tokens "$tokens" --layers "${LAYER:-13}" \
            --rope-scaling "${ROPE:-yarn}" --device "$device" --out "$capture" 2>&1 | tee "$out/capture-$tokens.txt"
    fi
    if [ ! -f "$capture" ]; then
        echo "no capture of $tokens tokens, so nothing to measure on: see $out/capture-$tokens.txt" >&2
        kill "$compiling"
        exit 1
    fi
    say "capture of $tokens"
done
wait "$compiling"
tail -n 1 "$out/compiled.txt"
say "compiled"
for part in $parts; do
    length=${part%%=*}
    timeout "$limit_s" "$python" -m pyramidbench sweep "$suite" --input "$(captured "${part#*=}")" --seq "$length" \
        --timing "${TIMING:-100ms}" --device "$device" --json --out "$out/methods-$length" 2>&1 >/dev/null | tee "$out/methods-$length.txt"
    say "sweep $suite at $length"
done
for part in $parts; do
    "$python" -m pyramidbench report "$out/methods-${part%%=*}" --out "$out/report-${part%%=*}"
done
say "reports"
for tokens in ${EQUAL_MASS-64k 256k}; do
    timeout "$limit_s" "$python" "$here/bench_equal_mass.py" "$(captured "$tokens")" --tokens "$tokens" --rounds 3 --device "$device" \
        --only "${ONLY:-}" 2>&1 | tee "$out/equal-mass-$tokens.txt"
    say "equal mass at $tokens"
done
