#!/bin/sh
# Makes a bare CUDA machine without network able to run this project from a checkout and a folder of wheels:
#
#     eval "$(tests/gpu/prepare.sh WHEELS TARGET)"
#     python -m pyramidbench doctor
#
# WHEELS: a folder that holds .whl files for this machine's Python, also deeper, as pack.sh gathers them; those that the machine
# has anyway (torch, triton) need not be there. A wheel in pieces is joined when all are there. TARGET: a folder to install into; it
# is made. PYTHON: the interpreter, python3 unless set.
# Printed are the two variables that a shell must export: PYTHONPATH with the wheels, the package in its layout and this
# folder, and PYTHONSAFEPATH, without which Python finds the checkout's own folders first. What is missing is said on stderr.
set -eu

if [ $# -ne 2 ]; then
    echo "usage: $0 WHEELS TARGET (given: $# arguments)" >&2
    exit 2
fi
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
wheels=$(CDPATH='' cd -- "$1" && pwd)
mkdir -p "$2"
target=$(CDPATH='' cd -- "$2" && pwd)
python=${PYTHON:-python3}

# NAME.whl.0, NAME.whl.1 …, wherever they lie, and the sum of the whole beside the first.
mkdir -p "$target/joined"
find "$wheels" -name '*.whl.sha256' | while read -r sum; do
    name=$(basename "$sum" .sha256)
    : >"$target/joined/$name"
    for number in 0 1 2 3 4 5 6 7 8 9; do
        find "$wheels" -name "$name.$number" -exec cat {} + >>"$target/joined/$name"
    done
    if ! (cd "$target/joined" && sha256sum --status --check "$sum"); then
        rm "$target/joined/$name"
        echo "pieces of $name are missing, so it is not installed" >&2
    fi
done

set --
while read -r wheel; do
    set -- "$@" "$wheel"
done <<WHEELS
$(find "$wheels" "$target/joined" -type f -name '*.whl' | sort)
WHEELS
if [ -z "$1" ]; then
    echo "no wheels in $wheels" >&2
    exit 2
fi
# Without dependencies: they are wheels of the same folder, or the machine's own.
"$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade --target "$target/site" "$@" >&2

# The folders under the names that they are imported by.
rm -rf "$target/layout"
mkdir -p "$target/layout/pyramidbench"
for path in "$root"/pyramidbench/*; do
    ln -s "$path" "$target/layout/pyramidbench/"
done
for room in methods kernels suites; do
    ln -s "$root/$room" "$target/layout/pyramidbench/$room"
done

# What a wheel's .pth file would add if this were a site-packages folder: nvidia-cutlass-dsl, which FlashAttention-4 needs,
# keeps its modules in such a place.
added=$("$python" - "$target/site" <<'ADDED'
import site
import sys

before = set(sys.path)
site.addsitedir(sys.argv[1])
print("".join(f":{path}" for path in sys.path if path not in {*before, sys.argv[1]}), end="")
ADDED
)
PYTHONPATH=$target/layout:$target/site$added:$root/tests/gpu${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH PYTHONSAFEPATH=1
"$python" - "$root/pyproject.toml" >&2 <<'CHECK'
import importlib.metadata
import re
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    names = [re.match(r"[\w.-]+", entry)[0] for entry in tomllib.load(file)["project"]["dependencies"]]
missing = []
for name in names:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        missing.append(name)
if missing:
    print(f"not installed: {', '.join(missing)}; what needs them will say so")
import torch

import pyramidbench.kernels.backends

device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
print(f"ready: Python {sys.version.split()[0]}, torch {torch.__version__}, {device}")
CHECK
echo "export PYTHONPATH='$PYTHONPATH'"
echo "export PYTHONSAFEPATH=1"
