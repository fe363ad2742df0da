#!/bin/sh
# Runs every Triton kernel at small shapes under compute-sanitizer (part of the CUDA toolkit), on the machine's GPU:
#
#     tests/gpu/sanitize.sh
#
# First without it: that compiles the kernels into Triton's cache, and checks them against their twins, while a kernel with a
# planted fault shows that the sanitizer finds one. Then, all at once: memcheck over all kernels, each tensor in an allocation
# of its own (torch's pool would hide what lies just outside one); racecheck over those whose warps hand data to each other
# through shared memory; synccheck over the one that does so by barriers in memory. Every group of kernels is a process of
# its own, and torch's kernels, which the twins run, are left unchecked where the tool can tell them apart.
# Exit code: 0 clean, 1 something was found, 2 no compute-sanitizer, 3 it cannot see the device (some virtual machines), 4 it
# does not find the planted fault.
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

# Kernels of ours begin with an underscore and a small letter; the mangled names of C++ do with an underscore and a Z.
only=
if compute-sanitizer --help 2>&1 | grep -q -- --kernel-regex; then
    only="--kernel-regex kns=^_[a-z]"
fi
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
# Whether memcheck, with the options that all get, finds the planted fault: 9 if so.
plant() {
    # shellcheck disable=SC2086 - an option and its value, or nothing
    timeout $limit_s compute-sanitizer --tool memcheck --target-processes application-only --error-exitcode 9 $only \
        "$python" "$here/planted_fault.py" >"$logs/planted" 2>&1
}

plant &
planted=$!
"$python" "$here/every_kernel.py" || exit 1
say "compiled, and against the twins"
wait $planted
found=$?
if [ $found -ne 9 ] && [ -n "$only" ]; then
    echo "with $only it ended with $found, so all kernels are checked, torch's too" >&2
    only=
    plant
    found=$?
fi
if [ $found -ne 9 ]; then
    cat "$logs/planted" >&2
    if grep -qi "not supported" "$logs/planted"; then
        echo "compute-sanitizer cannot see this device" >&2
        exit 3
    fi
    echo "compute-sanitizer ended with $found on a kernel that writes past its tensor, not with 9" >&2
    exit 4
fi
say "the planted fault was found (options: ${only:-none})"

# Groups of kernels, all without one named, under one tool: under TOOL [GROUP ...]
under() {
    tool=$1
    shift
    "$python" "$here/every_kernel.py" --under "timeout $limit_s compute-sanitizer --tool $tool \
        --target-processes application-only --error-exitcode 9 --print-limit 20 $only" "$@"
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
