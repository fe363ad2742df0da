#!/bin/sh
# Runs every Triton kernel at small shapes under compute-sanitizer (part of the CUDA toolkit), on the machine's GPU:
#
#     tests/gpu/sanitize.sh
#
# First without it: that compiles the kernels into Triton's cache, and checks them against their twins. Then, all at once:
# memcheck over all of them, each tensor in an allocation of its own (torch's pool would hide what lies just outside one);
# racecheck over those whose warps hand data to each other through shared memory; synccheck over the one that does so by
# barriers in memory.
# Exit code: 0 clean, 1 something was found, 2 no compute-sanitizer, 3 it cannot see the device (some virtual machines).
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

timeout $limit_s compute-sanitizer "$python" -c "import torch; torch.zeros(1, device='cuda')" >"$logs/probe" 2>&1 &
probe=$!
echo "== compiled, and against the twins"
"$python" "$here/every_kernel.py" || exit 1
wait $probe
if grep -qi "not supported" "$logs/probe"; then
    echo "compute-sanitizer cannot see this device:" >&2
    cat "$logs/probe" >&2
    exit 3
fi

# Every group of kernels under one tool: under TOOL [GROUP ...]
under() {
    tool=$1
    shift
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$python" "$here/every_kernel.py" --under "timeout $limit_s compute-sanitizer \
        --tool $tool --target-processes application-only --error-exitcode 9 --print-limit 20" "$@"
}

under memcheck >"$logs/memcheck" 2>&1 &
memcheck=$!
under racecheck scored walk leaf attention_by_key attention_portable mass >"$logs/racecheck" 2>&1 &
racecheck=$!
under synccheck attention_hopper >"$logs/synccheck" 2>&1 &
synccheck=$!
# The copy engine fills this kernel's shared memory, and racecheck may not follow it: a report is to be read, not counted.
under racecheck attention_hopper >"$logs/hopper" 2>&1 &
hopper=$!

failed=0
wait $memcheck || failed=1
wait $racecheck || failed=1
wait $synccheck || failed=1
wait $hopper || echo "racecheck reports something about attention_hopper: read it below" >&2
for tool in memcheck racecheck synccheck; do
    echo "== $tool"
    cat "$logs/$tool"
done
echo "== racecheck of attention_hopper, not counted"
cat "$logs/hopper"
exit $failed
