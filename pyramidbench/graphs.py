"""CUDA graphs: a call recorded once and replayed, so that the time of issuing its kernels falls away."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyramidbench.clock import Call


@dataclass(frozen=True)
class Replay:
    """A recorded call; calling it replays its kernels into the same result tensors."""

    graph: torch.cuda.CUDAGraph
    result: object

    def __call__(self) -> None:
        self.graph.replay()


def record_graph(call: Call, device: torch.device) -> Replay | str:
    """The call as a graph, or why it cannot be one (it waits for the device, as a size that depends on data does)."""
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    generator = torch.cuda.default_generators[current.device.index]
    random_state = generator.clone_state()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        # Once, for what libraries set up for each stream: the call itself has been warmed up and timed, and may take a second.
        call()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
    except RuntimeError as error:
        # A capture that fails leaves its stream current, and random numbers forbidden outside a capture.
        torch.cuda.set_stream(current)
        generator.graphsafe_set_state(random_state)
        torch.cuda.synchronize(device)
        return _reason(" ".join(str(error).split()))
    return Replay(graph, result)


def _reason(error: str) -> str:
    """What a failed capture says to a user; CUDA's own text names an error code and a way to look it up."""
    if "StreamCapture" in error:
        return "it waits for the device, or does something else that a capture does not allow"
    return error[:120]
