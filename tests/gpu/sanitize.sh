#!/bin/sh
# Runs every Triton kernel at small shapes under compute-sanitizer (part of the CUDA toolkit), on the machine's GPU:
#
#     tests/gpu/sanitize.sh
#
# First without it: that compiles the kernels into Triton's cache, and checks them against their twins, while a kernel with a
# planted fault shows that memcheck finds one, and how near to its tensor. What goes on where none is found is printed. Then, all
# at once: memcheck over all kernels, each tensor in an allocation of its own, with padding behind it (torch's pool would hide what
# lies just outside one, and the next allocation too); racecheck over those whose warps hand data to each other through shared
# memory; synccheck over the one that does so by barriers in memory. Every group of kernels is a process of its own. The tool
# follows child processes: an interpreter may be a launcher of another one.
# Exit code: 0 clean, 1 something was found, 2 no compute-sanitizer, 3 it cannot see the device (some virtual machines), 4 it
# does not find the planted fault, so that it can check nothing here.
# PYTHON: the interpreter, python3 unless set; the package must be importable (see prepare.sh).
set -u
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not on the PATH; it is in the bin folder of the CUDA toolkit" >&2
    exit 2
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
limit_s=240
began=$(date +%s)

say() {
    echo "== $(($(date +%s) - began)) s: $1"
}

# Else what lies behind one allocation may be the next one, where a write is no fault that memcheck can see.
padding=
if compute-sanitizer --help 2>&1 | grep -q -- --padding; then
    padding="--padding 4096"
fi
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
# What a planted fault comes to under memcheck: 9 if it is found. plant next|far
plant() {
    # shellcheck disable=SC2086 - an option and its value
    timeout $limit_s compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 $padding \
        "$python" "$here/planted_fault.py" "$1" >"$logs/$1" 2>&1
    echo $? >"$logs/$1.code"
}

found() {
    [ "$(cat "$logs/$1.code" 2>/dev/null)" = 9 ]
}

plant next &
next=$!
plant far &
far=$!
"$python" "$here/every_kernel.py" || exit 1
say "compiled, and against the twins"
wait $next $far
if found next; then
    say "a write to the element behind a tensor was found"
elif found far; then
    say "a write 1 MiB behind a tensor was found, one to the element behind it was not"
    echo "what lies just outside a tensor goes unseen here" >&2
else
    for fault in next far; do
        echo "== $fault ended with $(cat "$logs/$fault.code")" >&2
        cat "$logs/$fault" >&2
    done
    if grep -qi "not supported" "$logs/next" "$logs/far"; then
        echo "compute-sanitizer cannot see this device: nothing is checked" >&2
        exit 3
    fi
    echo "compute-sanitizer finds neither of two planted faults, a write to the element behind a tensor and one 1 MiB behind it:" \
        "a clean run of it would say nothing, and nothing is checked" >&2
    if ! grep -q "a sanitizer's library is loaded" "$logs/next"; then
        echo "it has not loaded itself into $python: name the interpreter itself in PYTHON" >&2
    fi
    exit 4
fi

# Groups of kernels, all without one named, under one tool: under TOOL [GROUP ...]
under() {
    tool=$1
    shift
    apart=
    [ "$tool" != memcheck ] || apart=$padding
    "$python" "$here/every_kernel.py" --under "timeout $limit_s compute-sanitizer --tool $tool \
        --target-processes all --error-exitcode 9 --print-limit 20 $apart" "$@"
}

under memcheck >"$logs/memcheck" 2>&1 &
memcheck=$!
under racecheck build scored walk leaf attention_by_key attention_portable attention_bwd mass decode >"$logs/racecheck" 2>&1 &
racecheck=$!
under synccheck attention_hopper >"$logs/synccheck" 2>&1 &
synccheck=$!
# The copy engine fills these kernels' shared memory, and racecheck may not follow it: a report is to be read, not counted.
under racecheck attention_hopper attention_copied attention_bwd_copied >"$logs/copied" 2>&1 &
copied=$!

failed=0
wait $memcheck || failed=1
wait $racecheck || failed=1
wait $synccheck || failed=1
wait $copied || echo "racecheck reports something about kernels that the copy engine feeds: read it below" >&2
for tool in memcheck racecheck synccheck; do
    echo "== $tool"
    cat "$logs/$tool"
done
echo "== racecheck of kernels that the copy engine feeds, not counted"
cat "$logs/copied"
say "exit code $failed"
exit $failed
