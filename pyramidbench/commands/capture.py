"""`pyramidbench capture`: q, k and v of a real model, recorded for sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pyramidbench.flags import DeviceName, Text


def capture(
    model: Annotated[str, Argument(help="smollm2, a Hugging Face name, a folder, or a .gguf file")],
    text: Annotated[Path | None, Option(help="a UTF-8 text; Python's own standard library without it")] = None,
    out: Annotated[Path, Option(help="the file to write, ending in .safetensors")] = Path("capture.safetensors"),
    layers: Annotated[Text, Option(help="layers, as 0,13,27; five evenly spaced ones without it")] = None,
    tokens: Annotated[str, Option(help="how much of the text, as 8k")] = "8k",
    dtype: Annotated[str, Option(help="what is stored: float16, bfloat16 or float32")] = "float16",
    gguf_file: Annotated[Text, Option(help="name of a GGUF file in a folder or repository")] = None,
    device: DeviceName = "auto",
    rope_scaling: Annotated[
        Text,
        Option(help="for more tokens than the model has positions: yarn, dynamic or linear, or with a factor, yarn:32"),
    ] = None,
    fetch_only: Annotated[bool, Option("--fetch-only", help="fetch and check the model, and stop")] = False,
) -> None:
    """Record q, k and v of a real language model's attention on a text, for `sweep --input FILE`."""
    from pyramidbench import capture as capturing
    from pyramidbench import model_files
    from pyramidbench.axes import parse_axis
    from pyramidbench.capture_file import describe_capture
    from pyramidbench.output import console, say
    from pyramidbench.units import gibibytes

    told = console()
    if fetch_only:
        found = model_files.find_model(model, gguf_file, lambda line: say(told, line))
        say(told, f"{found.name} is ready: {found.location}")
        return
    chosen = None if layers is None else parse_axis(layers, "--layers", minimum=0)
    done = capturing.capture(
        model, text, out, chosen, parse_axis(tokens, "--tokens")[0], dtype, gguf_file, device, rope_scaling,
        progress=lambda line: say(told, line),
    )  # fmt: skip
    peak = f", {gibibytes(done.peak_memory_bytes)} of GPU memory" if done.peak_memory_bytes else ""
    label = describe_capture(done.path).label
    say(told, f"{done.path}: {label}, {gibibytes(done.size_bytes)} in {done.seconds:.0f} s{peak}")
