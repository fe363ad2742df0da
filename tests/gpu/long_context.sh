#!/bin/sh
# Real tensors at 256k tokens, and what the methods do on them: capture, the suite `methods`, and equal mass, on one GPU.
#
#     tests/gpu/long_context.sh OUT [MODEL]
#
# In a shell that prepare.sh made ready, with transformers, tokenizers, accelerate and gguf. MODEL: as `pyramidbench capture` takes
# it, smollm2 unless given; without network that needs the one file that `pyramidbench capture smollm2 --fetch-only` leaves under
# .model. The text is this Python's standard library. The capture, one file of about 0.5 GB, lies in CAPTURES, which is
# ${TMPDIR:-/tmp} unless set. While the model is converted and runs, the suite's kernels are compiled in JOBS processes, 8 unless
# set. OUT/methods is a run folder, which the same command resumes; logs and tables lie beside it. TOKENS (256k), LAYER (13),
# SHORTER (64k: the other length of the equal-mass tables), ONLY (their methods, a regular expression), TIMING (100ms a cell),
# ROPE (yarn), SUITE (methods), DEVICE (auto) and PYTHON (python3) may be set; LIMIT_S: seconds that a part may take, 600 unless set.
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
mkdir -p "$1"
out=$(CDPATH='' cd -- "$1" && pwd)
capture=${CAPTURES:-${TMPDIR:-/tmp}}/long-context-${TOKENS:-256k}-layer-${LAYER:-13}.safetensors
began=$(date +%s)

say() {
    echo "== $(($(date +%s) - began)) s: $1"
}

timeout "$limit_s" "$python" "$here/compile_suite.py" "$suite" --jobs "${JOBS:-8}" --device "$device" >"$out/compiled.txt" 2>&1 &
compiling=$!
if [ ! -f "$capture" ]; then
    timeout "$limit_s" "$python" -m pyramidbench capture "${2:-smollm2}" --tokens "${TOKENS:-256k}" --layers "${LAYER:-13}" \
        --rope-scaling "${ROPE:-yarn}" --device "$device" --out "$capture" 2>&1 | tee "$out/capture.txt"
fi
if [ ! -f "$capture" ]; then
    echo "no capture, so nothing to measure on: see $out/capture.txt" >&2
    kill "$compiling"
    exit 1
fi
say "capture"
wait "$compiling"
tail -n 1 "$out/compiled.txt"
say "compiled"
timeout "$limit_s" "$python" -m pyramidbench sweep "$suite" --input "$capture" --timing "${TIMING:-100ms}" --device "$device" \
    --out "$out/methods" 2>&1 | tee "$out/methods.txt"
say "sweep $suite"
for tokens in "${SHORTER:-64k}" "${TOKENS:-256k}"; do
    timeout "$limit_s" "$python" "$here/bench_equal_mass.py" "$capture" --tokens "$tokens" --rounds 3 --device "$device" \
        --only "${ONLY:-}" 2>&1 | tee "$out/equal-mass-$tokens.txt"
    say "equal mass at $tokens"
done
