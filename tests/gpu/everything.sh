#!/bin/sh
# One visit to a GPU: tests, sanitizer, tables and the recorded sweep, in the order in which they matter, each log in OUT.
#
#     tests/gpu/everything.sh OUT [CAPTURE]
#
# In a shell that prepare.sh made ready, or with the package installed. The tests run side by side, and with them a first
# pass of the benchmark and of the sweeps that only fills Triton's cache, since most of it is compiling; then nothing else runs, and the
# tests that hold times to each other (marked `alone`) have the device to themselves. OUT/gpu-test.txt is the tests' summary;
# the two logs name every test as it ends, and tell what failed and why also where LIMIT_S cuts them off. The sweeps write
# OUT/prefill, OUT/training and OUT/decode, run folders that the same command resumes. PYTHON: the interpreter, python3
# unless set. LIMIT_S: seconds that a part may take, 600 unless set. WORKERS: tests side by side, 14 unless set. JOBS:
# processes that compile what the sweeps launch, 4 unless set.
set -u
if [ $# -lt 1 ]; then
    echo "usage: $0 OUT [CAPTURE]" >&2
    exit 2
fi
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
limit_s=${LIMIT_S:-600}
workers=${WORKERS:-14}
mkdir -p "$1"
out=$(CDPATH='' cd -- "$1" && pwd)
capture=${2:-}
began=$(date +%s)

say() {
    echo "== $(($(date +%s) - began)) s: $1"
}

# Tests into a log: tests LOG OPTION ... -vv: one line for each test as it ends, since the project's settings hold a -q. An
# interrupt makes pytest tell what it has found so far; a process in the background would ignore it, were it not for env.
# pytest-benchmark, where it is installed, warns of processes side by side, and warnings are errors here.
tests() {
    log=$out/$1.log
    shift
    timeout -s INT -k 30 "$limit_s" env --default-signal=INT PYTHONUNBUFFERED=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
        "$python" -m pytest -vv -rfE --durations=20 -p no:cacheprovider -p no:benchmark "$@" \
        "$here/../triton" "$here/../upstream" >"$log" 2>&1
}

summary() {
    for log in "$out"/test-*.log; do
        echo "$(basename "$log" .log): $(tail -n 1 "$log")"
        grep "^FAILED\|^ERROR" "$log"
    done >"$out/gpu-test.txt"
    cat "$out/gpu-test.txt"
}

# First calls were 34 of the 100 s in which an H200 measured 66 cells of the suite decode, one after another.
compile() {
    timeout "$limit_s" "$python" "$here/bench_prefill.py" --no-check --samples 1
    for suite in prefill training decode; do
        timeout "$limit_s" "$python" "$here/compile_suite.py" "$suite" --jobs "${JOBS:-4}"
    done
}

compile >"$out/compiled.txt" 2>&1 &
compiling=$!
tests test-beside -m "gpu and not alone" -n "$workers" --dist worksteal
summary
say "tests"
PYTHON=$python timeout "$limit_s" "$here/sanitize.sh" >"$out/sanitize.txt" 2>&1
echo "exit code $?" >>"$out/sanitize.txt"
tail -n 3 "$out/sanitize.txt"
say "sanitizer"
wait $compiling
tests test-alone -m "gpu and alone"
summary
say "tests that time"
timeout "$limit_s" "$python" "$here/bench_prefill.py" --no-check 2>&1 | tee "$out/bench_prefill.txt"
say "benchmark by stage"
timeout "$limit_s" "$python" "$here/bench_backward.py" 2>&1 | tee "$out/bench_backward.txt"
say "backward"
timeout "$limit_s" "$python" "$here/bench_decode.py" --short 2>&1 | tee "$out/bench_decode.txt"
say "decode"
if [ -n "$capture" ]; then
    timeout "$limit_s" "$python" "$here/bench_equal_mass.py" "$capture" 2>&1 | tee "$out/equal_mass.txt"
    say "equal mass"
fi
timeout "$limit_s" "$python" "$here/bench_clock.py" 2>&1 | tee "$out/bench_clock.txt"
timeout "$limit_s" "$python" "$here/bench_stages.py" 2>&1 | tee "$out/bench_stages.txt"
timeout "$limit_s" "$python" "$here/same_twice.py" --device cuda --timing 0.4 --out "$out/same-twice" 2>&1 | tee "$out/same_twice.txt"
say "timer, stage clock and A/A test"
timeout "$limit_s" "$python" -m pyramidbench sweep prefill --timing 500ms --out "$out/prefill"
say "sweep prefill"
timeout "$limit_s" "$python" -m pyramidbench doctor 2>&1 | tee "$out/doctor.txt"
timeout "$limit_s" "$python" -m pyramidbench compare "$out/prefill" --method dense,pyramid:fastest --markdown >"$out/compare.md"
for direction in forward train; do
    timeout "$limit_s" "$python" -m pyramidbench profile --seq 64k --method pyramid:fastest --top-k 64 --heads 16 --head-dim 128 \
        --dtype bfloat16 --input topics --pass "$direction" --ncu --out "$out/profile-$direction" 2>&1 | tee "$out/profile-$direction.txt"
done
say "doctor, compare, profile"
timeout "$limit_s" "$python" -m pyramidbench sweep training --timing 500ms --out "$out/training"
say "sweep training"
timeout "$limit_s" "$python" -m pyramidbench sweep decode --timing 500ms --out "$out/decode"
say "sweep decode"
