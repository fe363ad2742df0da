"""Writes some layers of a capture into a smaller one, for a machine to which little can be carried.

python tests/gpu/reduce_capture.py SOURCE OUT --layers 7,13 [--tokens 4096]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from pyramidbench.capture_file import CaptureWriter, describe_capture, read_layer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=lambda text: tuple(int(part) for part in text.split(",")), required=True)
    parser.add_argument("--tokens", type=int, help="the first ones; default all")
    asked = parser.parse_args()
    held = describe_capture(asked.source)
    lacking = set(asked.layers) - set(held.layers)
    if lacking:
        parser.error(f"{asked.source} holds the layers {held.layers}, not {sorted(lacking)}")
    tokens = min(asked.tokens or held.seq_len, held.seq_len)
    if tokens < held.seq_len and not held.prefixes_stand:
        parser.error(f"{asked.source} was scaled by a rule that depends on the length; leave --tokens out")
    with CaptureWriter(asked.out, len(asked.layers)) as writer:
        for layer in asked.layers:
            writer.add(layer, *read_layer(asked.source, layer, tokens, tokens))
        writer.finish(replace(held.metadata, layers=asked.layers, tokens=tokens))
    print(f"{asked.out}: {describe_capture(asked.out).label}, {asked.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
