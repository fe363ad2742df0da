"""Record: one measured cell as it stands in cells.jsonl and in the columns of results.parquet and results.csv.

Units are in the names and SI; a missing number is null, never 0. Descriptions here are the text of docs/results.md.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 2
Status = Literal[
    "ok", "low_n", "throttled",
    "oom", "oom_predicted", "timeout", "incorrect", "cuda_error", "crashed", "unsupported", "skipped",
]  # fmt: skip
MEASURED: tuple[Status, ...] = ("ok", "low_n", "throttled")


def _column(description: str) -> Any:
    return Field(default=None, description=description)


class Record(BaseModel):
    """One cell: a method with its parameters on one problem and one input."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cell: str = Field(description="identity of the cell: a hash of everything that defines it")
    status: Status = Field(description="ok, low_n (under 20 samples) and throttled carry numbers; the others a reason")
    reason: str | None = _column("why there is no number, or what the reader must know about it")
    method: str = Field(description="name, or name:preset")
    kind: str | None = _column("dense, selection, or bound (an oracle or a floor, not a rival)")
    backend: str | None = _column("what ran: triton, reference (plain torch), sdpa-…; route+attend where these differ")
    device: str | None = _column("the device's own name")
    batch: int | None = _column("sequences in the call")
    heads: int | None = _column("query heads")
    kv_heads: int | None = _column("key/value heads")
    head_dim: int | None = _column("dimension of a query or key")
    dtype: str | None = _column("element type of q, k and v")
    causal: bool | None = _column("whether a query sees only keys at or before its position")
    direction: str | None = Field(
        default=None,
        alias="pass",
        description="forward, backward (the gradients alone), train (both), or decode (a step of generation)",
    )
    input: str | None = _column(
        "what fed the cell: a synthetic input's name, or a capture's model (and the scaling of its positions, if any) and text"
    )
    layer: int | None = _column("layer of a captured model that the tensors come from")
    seq_len: int | None = _column("queries, tokens")
    seq_len_kv: int | None = _column("keys, tokens")
    block_size: int | None = _column("keys in a block")
    top_k: int | None = _column(
        "blocks kept by rank, beside the sink and local blocks that all keep; null where tiles choose for themselves how many"
    )
    levels: int | None = _column("levels walked, the block level included; 1 is a single pass")
    query_tile: int | None = _column("consecutive queries that share one set of blocks; 1 is token level")
    budget: str | None = _column("the budget as it was asked for, e.g. top_k=8, sparsity=0.9, keep=5%")
    budget_set: str | None = _column(
        "what that came to in the method's own parameter; null where it decides for itself"
    )
    budget_reached: str | None = _column(
        "what came out, in the terms in which it was asked for: mean over query tiles and sets, of pairs for sparsity"
    )
    parameters: str | None = _column("all parameters of the method, as JSON")
    seed: int | None = _column("seed of the inputs and of sampling")
    latency_s: float | None = _column(
        "median time of a whole call: selection, index building and attention; of pass backward, the gradients alone; of "
        "pass decode, a step: append, selection and attention"
    )
    latency_low_s: float | None = _column("lower end of the bootstrap 95 % interval of the median")
    latency_high_s: float | None = _column("upper end of that interval")
    latency_p5_s: float | None = _column("5th percentile of the timed calls")
    latency_q1_s: float | None = _column("25th percentile: the lower quartile")
    latency_q3_s: float | None = _column("75th percentile: the upper quartile")
    latency_p95_s: float | None = _column("95th percentile of the timed calls")
    samples: int | None = _column("timed calls")
    clock: str | None = _column("what timed them, and whether the cache was cold or warm")
    threads: int | None = _column("CPU threads that torch was held to")
    session: str | None = _column("cells with the same text were timed in turns, so that their samples can be paired")
    setup_s: float | None = _column(
        "wall time until the method had run once: import, compilation, autotuning, and that call; never part of latency_s"
    )
    first_call_s: float | None = _column(
        "time of the first call under the clock, before the warm-up, with everything compiled; never part of latency_s"
    )
    host_s: float | None = _column("time that the host takes to issue a call, median; null on a CPU")
    graph_latency_s: float | None = _column(
        "median time of the call replayed as a CUDA graph, where the host's time bounds it; null elsewhere"
    )
    graph_latency_low_s: float | None = _column("lower end of the bootstrap 95 % interval of that median")
    graph_latency_high_s: float | None = _column("upper end of that interval")
    sm_clock_hz: float | None = _column("lowest clock of the GPU that was read around the blocks of calls")
    power_w: float | None = _column("highest power that was read around them")
    temperature_c: float | None = _column("highest temperature that was read around them, degrees Celsius")
    throttle_reasons: str | None = _column(
        "why the GPU held its clock back around them, as NVML says; null: nothing did"
    )
    build_s: float | None = _column("building summaries of the keys, median")
    route_s: float | None = _column("scoring and choosing blocks, median")
    index_s: float | None = _column("turning the choice into the lists that the attention reads, median")
    append_s: float | None = _column("writing the new tokens of a decoding step and updating summaries, median")
    attend_s: float | None = _column("attention over the chosen blocks, median; of pass decode, choosing them included")
    backward_s: float | None = _column("gradients of q, k and v, median; null in a forward pass")
    dense_method: str | None = _column(
        "fastest valid dense method of the same run and problem, the reference of speedup"
    )
    speedup: float | None = _column(
        "time of dense_method ÷ time of this row: the median over pairs of calls where the two were timed in turns, else the "
        "ratio of the medians"
    )
    speedup_low: float | None = _column("lower end of the bootstrap 95 % interval of that median; null without pairs")
    speedup_high: float | None = _column("upper end of that interval")
    graph_dense_method: str | None = _column(
        "fastest dense method of the session without the host's time, the reference of graph_speedup"
    )
    graph_speedup: float | None = _column(
        "time of graph_dense_method ÷ graph_latency_s: of its replay, or of its call where the device bounds that; null where "
        "this row has no graph_latency_s"
    )
    graph_speedup_low: float | None = _column(
        "lower end of the bootstrap 95 % interval of the median over pairs of replays; null where the reference has none"
    )
    graph_speedup_high: float | None = _column("upper end of that interval")
    tokens_per_s: float | None = _column("batch × queries ÷ latency_s")
    bytes_per_token: float | None = _column(
        "bytes that a decoding step reads and writes by formula ÷ (batch × queries)"
    )
    useful_flops_per_s: float | None = _column("operations on attended pairs and selection ÷ latency_s")
    executed_flops_per_s: float | None = _column("operations on all launched tiles and selection ÷ latency_s")
    dense_equivalent_flops_per_s: float | None = _column(
        "operations of dense attention ÷ latency_s; may exceed the peak"
    )
    density: float | None = _column("attended pairs ÷ pairs that dense attention computes; dense is 1")
    selected_blocks: float | None = _column("blocks listed per query tile, forced ones included, mean")
    peak_memory_bytes: int | None = _column(
        "peak memory above the inputs during a call; forward and backward where the pass has gradients"
    )
    expected_memory_bytes: int | None = _column("the same by formula: output and workspace, and what gradients need")
    memory_flagged: bool | None = _column("whether the measured peak is over 1.5 times the formula")
    reserved_memory_bytes: int | None = _column(
        "what the CUDA allocator took from the device for the call; null on a CPU"
    )
    build_peak_bytes: int | None = _column("peak memory above the inputs while summaries are built")
    build_expected_bytes: int | None = _column("the same by formula: the summaries")
    route_peak_bytes: int | None = _column("peak memory above the inputs while blocks are scored and chosen")
    route_expected_bytes: int | None = _column("the same by formula: summaries, scores, lists")
    index_peak_bytes: int | None = _column("peak memory above the inputs in the rest of choosing")
    append_peak_bytes: int | None = _column("peak memory above the inputs while a decoding step's tokens are written")
    attend_peak_bytes: int | None = _column("peak memory above the inputs during attention")
    attend_expected_bytes: int | None = _column("the same by formula: lists, output and scratch")
    backward_peak_bytes: int | None = _column("peak memory above the inputs during the backward")
    backward_expected_bytes: int | None = _column("the same by formula: what the forward left, and the gradients")
    recall: float | None = _column(
        "share of the exact Top-K blocks that was chosen; forced blocks and trivial queries left out"
    )
    recall_p5: float | None = _column("5th percentile of recall over query tiles and heads")
    recall_worst_head: float | None = _column("mean recall of the worst head")
    recall_with_forced: float | None = _column("recall with the forced blocks counted on both sides")
    mass_kept: float | None = _column("share of exact attention that the chosen blocks hold, mean")
    mass_kept_p5: float | None = _column("5th percentile of mass_kept over query tiles and heads")
    mass_kept_worst_head: float | None = _column("mean mass_kept of the worst head")
    mass_ratio: float | None = _column("mass_kept ÷ mass that exact Top-K keeps, mean of ratios")
    mass_ratio_p5: float | None = _column("5th percentile of mass_ratio over query tiles and heads")
    mass_outside_forced: float | None = _column("share of the attention outside the forced blocks that was kept")
    output_error: float | None = _column(
        "relative L2 error of the output against dense fp32, mean over query tiles and heads"
    )
    output_error_p95: float | None = _column("95th percentile of that error")
    output_error_worst_head: float | None = _column("mean error of the worst head")
    trivial_share: float | None = _column("share of query tiles with no more eligible blocks than K: nothing to choose")
    sampled_tiles: int | None = _column(
        "query tiles per head that recall and mass were judged on: all of them where the mass kernel runs, else evenly "
        "spaced ones; output_error is always measured on evenly spaced ones"
    )
    quality_source: str | None = _column(
        "captured (and how positions were scaled, if they were), structured, or why quality does not count here"
    )
    recall_by_head: list[float | None] | None = _column(
        "mean recall of each set of blocks (key/value heads, or query heads)"
    )
    mass_kept_by_head: list[float | None] | None = _column("mean mass_kept of each set of blocks")
    gate_error: float | None = _column(
        "largest error against fp64 under the method's own mask, of the output or a gradient, ÷ what the gate allows"
    )


def columns() -> list[str]:
    """Column names in the order of the files."""
    return [field.alias or name for name, field in Record.model_fields.items()]
