"""How well a model reads along a long context, by RoPE scaling: perplexity of the tokens between one position and the next.

    python tests/gpu/position_loss.py [MODEL] --tokens 256k --rope-scaling none,yarn,linear,dynamic [--device auto]

To choose the scaling of a capture beyond the trained window (docs/capture.md), and to see what such tensors come from. The
whole model runs once for each scaling, as `pyramidbench capture` would run it; "none" leaves the positions as they are. The
text is the Python standard library, or --text. A column holds the tokens from the column before it on; they double from 2k.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyramidbench.axes import parse_axis
from pyramidbench.capture import running_dtype, token_ids
from pyramidbench.device import pick_device
from pyramidbench.model_files import find_model, load_config, load_model
from pyramidbench.rope_scaling import scale_positions
from pyramidbench.texts import read_passage
from pyramidbench.units import tokens as shown

FIRST = 2048
LOGIT_ROWS = 1024
"""Rows of logits held at a time: 200 MB in fp32 at a vocabulary of 49 152."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", default="16k", type=lambda text: parse_axis(text, "--tokens")[0])
    parser.add_argument("--rope-scaling", default="none,yarn", type=lambda text: text.split(","))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    device, passage = pick_device(asked.device), read_passage(asked.text)
    source = find_model(asked.model, None, print)
    ends = [0, *(FIRST << i for i in range(64) if FIRST << i < asked.tokens), asked.tokens]
    print(f"{source.name} on {asked.tokens} tokens of {passage.label}, perplexity from one position to the next")
    print(f"{'scaling':16}" + "".join(f"{shown(end):>9}" for end in ends[1:]))
    for wanted in asked.rope_scaling:
        start, config = time.perf_counter(), load_config(source)
        scaling = None if wanted == "none" else scale_positions(wanted, asked.tokens, config.get_text_config())
        network, tokenizer = load_model(source, device.type, config, running_dtype(config, device))
        losses = token_losses(network, torch.tensor([token_ids(tokenizer, passage, asked.tokens)], device=device))
        means = [losses[max(0, low - 1) : high - 1].mean().exp() for low, high in pairwise(ends)]
        took = time.perf_counter() - start
        print(
            f"{scaling.name if scaling else wanted:16}"
            + "".join(f"{float(mean):9.2f}" for mean in means)
            + f"   {took:.0f} s",
            flush=True,
        )


@torch.inference_mode()
def token_losses(network: Any, ids: Tensor) -> Tensor:
    """Loss of each token but the first given those before it, in nats, fp64 [N - 1]."""
    states = network.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    head = network.get_output_embeddings()
    parts = [
        torch.nn.functional.cross_entropy(head(rows).float(), wanted, reduction="none").double()
        for rows, wanted in zip(states.split(LOGIT_ROWS), ids[0, 1:].split(LOGIT_ROWS))
    ]
    return torch.cat(parts)


if __name__ == "__main__":
    main()
