"""CUDA graphs: a call recorded once and replayed, so that the time of issuing its kernels falls away."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyramidbench.clock import Call

WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Replay:
    """A recorded call; calling it replays its kernels into the same result tensors."""

    graph: torch.cuda.CUDAGraph
    result: object

    def __call__(self) -> None:
        self.graph.replay()


def record_graph(call: Call, device: torch.device) -> Replay | str:
    """The call as a graph, or why it cannot be one (it waits for the device, as a size that depends on data does)."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        return " ".join(str(error).split())[:120]
    return Replay(graph, result)
