"""One decoding step on the GPU: walk, exact leaves, last choice with attention, and where it was split their sum.

Two or three launches behind the walk's, which are one for the levels that are scored whole and one for each that is not.
With few queries: every candidate attended to apart, choice and sum; with many: exact leaves, choice with attention, sum.
Grids follow from rules and capacity, so that a CUDA graph captures the step once and replays it while the sequences grow.
`kernels.decode` is the torch twin: the same sets, near-ties in fp32 apart.
"""

from __future__ import annotations

from torch import Tensor

from pyramidbench.kernels.cache import CacheStore
from pyramidbench.kernels.decode_attend import run_attend
from pyramidbench.kernels.decode_call import DecodeCall
from pyramidbench.kernels.decode_each import pays_each, run_each
from pyramidbench.kernels.decode_leaf import run_leaf
from pyramidbench.kernels.decode_walk import run_walk
from pyramidbench.kernels.walk_rules import WalkRules


def step(q: Tensor, store: CacheStore, rules: WalkRules, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the last M tokens, [B, H, M, Dv] in q's dtype, and their blocks, int32 [B, sets, M, S].

    q: [B, H, M, D], any strides with a contiguous last dimension. Lists are ascending and padded with -1.
    """
    call = DecodeCall(q, store, rules, scale)
    candidates, counts = call.lists(max(1, call.passed)), call.lists(1)
    lists = call.lists(call.list_width)
    if call.passed == 0 or rules.top_k == 0:
        counts.zero_()
        out = run_attend(call, candidates, counts, None, lists)
    else:
        run_walk(call, candidates, counts)
        if pays_each(call):
            out = run_each(call, candidates, counts, lists)
        else:
            masses = None if rules.leaf_score == "summary" else run_leaf(call, candidates, counts)
            out = run_attend(call, candidates, counts, masses, lists)
    shape = (q.shape[0], call.sets, q.shape[2])
    by_head = out.view(*shape, call.group, -1).transpose(2, 3).reshape(q.shape[0], q.shape[1], q.shape[2], -1)
    return by_head, lists.view(*shape, -1)


def scratch_bytes(call: DecodeCall) -> int:
    """Bytes that a step holds at most beside its output: each part's output with its log-sum-exp, lists, and scores of nodes.

    How many parts the chosen blocks are split into is the device's; a part each is the most.
    """
    walks = call.passed > 0 and call.rules.top_k > 0
    parts = call.passed + call.forced_width if walks and pays_each(call) else call.list_width
    # The walk's scores are gone before the parts are made, and those of a launch before the next one's.
    scores = max(call.scanned[1], *(call.places(level) + 1 for level in range(call.scan_level)), 0) if walks else 0
    lists = call.list_width + (call.passed if walks else 0)
    return 4 * call.items * (lists + max(scores, parts * call.group * (call.store.sizes.head_dim_v + 1)))
