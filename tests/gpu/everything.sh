#!/bin/sh
# One visit to a GPU, or a part of one: tests, sanitizer, tables and the recorded sweeps, each log in OUT.
#
#     tests/gpu/everything.sh OUT [PART ...]
#
# In a shell that prepare.sh made ready, or with the package installed. The parts, all of them in this order unless named:
#
#     compile     fills Triton's cache for SUITES beside the tests, in JOBS processes, since most of a first pass is compiling
#     tests       the GPU tests, WORKERS side by side
#     sanitize    every kernel under compute-sanitizer
#     alone       the tests that hold times to each other; this and all that follows has the device to itself
#     tables      the benchmarks by stage of prefill, backward and decoding
#     timers      the timer beside others, the stage clock, and the A/A test
#     doctor      what this machine is
#     verify      whether METHODS are right here, by `pyramidbench verify`; most of its time is compiling
#     profile     a forward and a training cell in depth, with hardware counters where Nsight Compute is
#     prefill, training, training_tokens, decode, upstream    a sweep of the suite of that name
#
# OUT/gpu-test.txt is the tests' summary; their logs name every test as it ends, and tell what failed and why also where LIMIT_S
# cuts them off. A sweep writes OUT/prefill and so on, a run folder that the same command resumes, also one that was copied there
# from another visit, and that `pyramidbench report` makes a report of, on any machine. Where machines are lent by the minute: SUITES="decode training" everything.sh OUT compile tests alone decode.
# PYTHON: the interpreter, python3 unless set. LIMIT_S: seconds that a step may take, 600 unless set. TIMING: a cell's time in
# sweeps, 500ms unless set. WORKERS: 14 unless set. JOBS: 4 unless set. SUITES: "prefill training training_tokens decode upstream" unless set.
# METHODS: "pyramid,pyramid:fast,flat,sliding_window" unless set.
set -u
if [ $# -lt 1 ]; then
    echo "usage: $0 OUT [PART ...]" >&2
    exit 2
fi
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
limit_s=${LIMIT_S:-600}
mkdir -p "$1"
out=$(CDPATH='' cd -- "$1" && pwd)
shift
known="compile tests sanitize alone tables timers doctor verify profile prefill training training_tokens decode upstream"
parts=${*:-$known}
compiling=
began=$(date +%s)

say() {
    echo "== $(($(date +%s) - began)) s: $1"
}

# One step into a log, which is shown as well: shown LOG COMMAND ...
shown() {
    log=$out/$1
    shift
    timeout "$limit_s" "$@" 2>&1 | tee "$log"
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
    for log in "$out"/test-*.log; do
        echo "$(basename "$log" .log): $(tail -n 1 "$log")"
        grep "^FAILED\|^ERROR" "$log"
    done >"$out/gpu-test.txt"
    cat "$out/gpu-test.txt"
}

# First calls were 34 of the 100 s in which an H200 measured 66 cells of the suite decode, one after another.
compile() {
    timeout "$limit_s" "$python" "$here/bench_prefill.py" --no-check --samples 1
    for suite in ${SUITES:-prefill training training_tokens decode upstream}; do
        if [ "$suite" = decode ]; then
            timeout "$limit_s" "$python" "$here/compile_steps.py" decode --jobs "${JOBS:-4}"
            continue
        fi
        timeout "$limit_s" "$python" "$here/compile_suite.py" "$suite" --jobs "${JOBS:-4}"
    done
}

# Nothing else runs from here on.
alone() {
    [ -z "$compiling" ] || wait "$compiling"
    compiling=
}

sweep() {
    alone
    # Without a report, whose figures need packages that pack.sh does not carry: `pyramidbench report OUT/NAME`, anywhere.
    timeout "$limit_s" "$python" -m pyramidbench sweep "$1" --timing "${TIMING:-500ms}" --json --out "$out/$1" >/dev/null
}

part() {
    case $1 in
    compile)
        compile >"$out/compiled.txt" 2>&1 &
        compiling=$!
        ;;
    tests) tests test-beside -m "gpu and not alone" -n "${WORKERS:-14}" --dist worksteal ;;
    sanitize)
        PYTHON=$python timeout "$limit_s" "$here/sanitize.sh" >"$out/sanitize.txt" 2>&1
        echo "exit code $?" >>"$out/sanitize.txt"
        tail -n 3 "$out/sanitize.txt"
        ;;
    alone)
        alone
        tests test-alone -m "gpu and alone"
        ;;
    tables)
        alone
        shown bench_prefill.txt "$python" "$here/bench_prefill.py" --no-check
        shown bench_backward.txt "$python" "$here/bench_backward.py"
        shown bench_decode.txt "$python" "$here/bench_decode.py" --short
        ;;
    timers)
        alone
        shown bench_clock.txt "$python" "$here/bench_clock.py"
        shown bench_stages.txt "$python" "$here/bench_stages.py"
        shown same_twice.txt "$python" "$here/same_twice.py" --device cuda --timing 0.4 --out "$out/same-twice"
        ;;
    doctor) shown doctor.txt "$python" -m pyramidbench doctor ;;
    verify) shown verify.txt "$python" -m pyramidbench verify --method "${METHODS:-pyramid,pyramid:fast,flat,sliding_window}" ;;
    profile)
        alone
        for direction in forward train; do
            shown "profile-$direction.txt" "$python" -m pyramidbench profile --seq 64k --method pyramid:fastest --top-k 64 \
                --heads 16 --head-dim 128 --dtype bfloat16 --input topics --pass "$direction" --ncu --out "$out/profile-$direction"
        done
        ;;
    *) sweep "$1" ;;
    esac
    say "$1"
}

for name in $parts; do
    case " $known " in
    *" $name "*) ;;
    *)
        echo "unknown part '$name'; there are: $known" >&2
        exit 2
        ;;
    esac
done
for name in $parts; do
    part "$name"
done
alone
