"""What the launches of one decoding step share: the call itself, and sizes that follow from rules and capacity alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
from torch import Tensor

from pyramidbench.kernels.cache import CacheSizes, CacheStore
from pyramidbench.kernels.decode_launch import overlap
from pyramidbench.kernels.walk_rules import WalkRules

WIDEST_LEVEL = 32768
"""Candidates of a level that one program holds in registers, at most."""
MOST_BLOCK_BYTES = 64 << 10
SCAN_BYTES = 26 << 20
"""Summaries that one launch may score whole, over all queries: the upper levels that fit. H200, warm L2, batch 1: 4.2, 8.4 and
16.8 MB take 3.9, 5.7 and 8.8 µs; a level that is gathered instead is a launch more. Within it a step at 256k moves less than
twice the formula's bytes, and one at batch 8 and 128k scores its levels of up to 512 nodes whole."""


@dataclass(frozen=True)
class DecodeCall:
    """One step: q [B, H, M, D] of the last M tokens of the sequences in `store`."""

    q: Tensor
    store: CacheStore
    rules: WalkRules
    scale: float

    @property
    def sets(self) -> int:
        return self.q.shape[1] if self.rules.head_reduce == "none" else self.store.sizes.kv_heads

    @property
    def group(self) -> int:
        """Query heads of a set."""
        return self.q.shape[1] // self.sets

    @property
    def items(self) -> int:
        """(sequence, set, query) triples."""
        return self.q.shape[0] * self.sets * self.q.shape[2]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Sets, key/value heads and queries."""
        return self.sets, self.store.sizes.kv_heads, self.q.shape[2]

    @property
    def start_width(self) -> int:
        """The most nodes of the level that a walk starts at."""
        return start_width(self.rules)

    @property
    def by_children(self) -> bool:
        """Whether nodes above the blocks are scored by the summaries of their children."""
        return self.rules.node_score == "children" and self.store.sizes.levels > 1

    @cached_property
    def highest(self) -> int:
        """The level at which the longest sequence starts."""
        return highest_start(self.store.sizes, self.rules)

    @property
    def summary_bytes(self) -> int:
        """Bytes of one node's summary."""
        return self.store.nodes.shape[-1] * self.store.nodes.element_size()

    @property
    def node_bytes(self) -> int:
        """Bytes of the summaries that score one node."""
        return self.summary_bytes * (self.rules.branching if self.by_children else 1)

    @cached_property
    def scan_level(self) -> int:
        """The lowest of the levels that are scored whole by one launch; `highest` + 1 where there is none."""
        offsets, room = self.store.sizes.offsets, SCAN_BYTES // (self.items * self.node_bytes)
        level = self.highest + 1
        while level > 0 and offsets[self.highest + 1] - offsets[level - 1] <= room:
            level -= 1
        return level

    @property
    def scanned(self) -> tuple[int, int]:
        """Place of the first node that is scored whole, and how many are."""
        offsets = self.store.sizes.offsets
        return offsets[self.scan_level], offsets[self.highest + 1] - offsets[self.scan_level]

    def places(self, level: int) -> int:
        """The most candidates of a level."""
        return level_places(self.store.sizes, self.rules, level)

    @property
    def narrow(self) -> int:
        """Places in which a program ranks a level below the start."""
        return level_slots(self.rules.branching * (self.rules.inner_width() + listed_ends(self.rules)))

    def slots(self, level: int) -> int:
        """Places in which a program ranks a level wherever the walk starts."""
        nodes = self.store.sizes.nodes_at(level, self.store.sizes.max_len)
        if level == self.highest:
            # All of them: where the rules set the number of levels, they may be more than a start's.
            return level_slots(nodes)
        return max(level_slots(min(nodes, self.start_width)), self.narrow)

    @property
    def passed(self) -> int:
        """Leaves that the walk hands on, at most."""
        return leaf_width(self.store.sizes, self.rules)

    @property
    def forced_width(self) -> int:
        return self.rules.sink_blocks + self.rules.local_blocks

    @property
    def list_width(self) -> int:
        """The longest list of blocks."""
        return self.rules.top_k + self.forced_width

    @cached_property
    def shape(self) -> dict[str, int | bool]:
        """Constants that the kernels share."""
        sizes = self.store.sizes
        return {
            "GROUP": self.group,
            "ROWS": max(16, triton.next_power_of_2(self.group)),
            "BLOCK_SIZE": sizes.block_size,
            "HEAD_DIM": sizes.head_dim,
            "HEAD_DIM_V": sizes.head_dim_v,
            "BLOCK_N": max(16, triton.next_power_of_2(sizes.block_size)),
            "BLOCK_D": max(16, triton.next_power_of_2(sizes.head_dim)),
            "BLOCK_DV": max(16, triton.next_power_of_2(sizes.head_dim_v)),
            "HAS_BOUNDS": sizes.has_bounds,
            "IS_PAGED": self.store.pages is not None,
        }

    @cached_property
    def overlap(self) -> dict[str, bool]:
        """Whether a launch begins before the one before it ends, as constant and as launch option."""
        return overlap(self.q.device, self.items)

    @property
    def launch(self) -> LaunchShape:
        sizes = self.store.sizes
        return launch_shape(sizes.block_size * max(sizes.head_dim, sizes.head_dim_v) * self.q.element_size())

    def lists(self, width: int) -> Tensor:
        """Scratch for `width` numbers of each item, int32."""
        return torch.empty(self.items, width, dtype=torch.int32, device=self.q.device)

    def scratch(self, width: int) -> Tensor:
        """Scratch for `width` scores of each item, fp32."""
        return torch.empty(self.items, width, dtype=torch.float32, device=self.q.device)


@dataclass(frozen=True)
class LaunchShape:
    """Warps of a program that holds a block's keys or values, and stages of its loop."""

    num_warps: int
    num_stages: int


def launch_shape(block_bytes: int) -> LaunchShape:
    """By the bytes of a block's keys: what fits shared memory and registers (tests/compile/test_kernels.py prints both).

    Not tuned on a GPU.
    """
    return LaunchShape(4 if block_bytes <= 32 << 10 else 8, 2 if block_bytes <= 32 << 10 else 1)


def start_width(rules: WalkRules) -> int:
    """The most nodes of the level at which a walk starts; what the rules say, or what a walk finds there anyway.

    A level of up to `inner_width` nodes keeps them all, so all children of its nodes are candidates: the walk may as well
    start with these.
    """
    return max(rules.start_width if rules.levels == "auto" else 1, rules.branching * rules.inner_width())


def highest_start(sizes: CacheSizes, rules: WalkRules) -> int:
    """The level at which the longest sequence starts."""
    fits = (level for level in range(sizes.levels) if sizes.nodes_at(level, sizes.max_len) <= start_width(rules))
    return next(fits, sizes.levels - 1)


def listed_ends(rules: WalkRules) -> int:
    """Open nodes that a list holds beside the kept ones. With two children each they lead to one candidate each, if any,
    which follows from lo and hi."""
    return 0 if rules.branching == 2 else 2


def level_slots(places: int) -> int:
    """A power of two, and words of 32."""
    return triton.next_power_of_2(max(32, places))


def level_places(sizes: CacheSizes, rules: WalkRules, level: int) -> int:
    """The most candidates of a level, whether a walk starts there or comes from above."""
    nodes, highest = sizes.nodes_at(level, sizes.max_len), highest_start(sizes, rules)
    if level == highest:
        return nodes
    # Of the two open nodes' children one each may be ranked where they have two.
    below = rules.branching * (rules.inner_width() + listed_ends(rules)) + (2 if rules.branching == 2 else 0)
    return max(min(nodes, start_width(rules)), below)


def most_candidates(sizes: CacheSizes, rules: WalkRules) -> int:
    """Candidates of a level, at most, as a power of two."""
    levels = range(highest_start(sizes, rules) + 1)
    return triton.next_power_of_2(max(16, max(level_places(sizes, rules, level) for level in levels)))


def leaf_width(sizes: CacheSizes, rules: WalkRules) -> int:
    """Leaves that a walk hands on: those for the exact score, or the K best."""
    if rules.leaf_score == "summary":
        return rules.top_k
    if rules.leaf_candidates is None:
        return min(sizes.blocks, most_candidates(sizes, rules))
    return rules.leaf_candidates * rules.top_k


def decode_gap(sizes: CacheSizes, rules: WalkRules, dtype: str) -> str | None:
    """Why the Triton kernels cannot do a step under these rules, or None."""
    if dtype not in ("float16", "bfloat16", "float32"):
        return f"the Triton decode takes float16, bfloat16 and float32, not {dtype}"
    if max(sizes.head_dim, sizes.head_dim_v) > 256:
        return f"the Triton decode takes head dims up to 256, not {max(sizes.head_dim, sizes.head_dim_v)}"
    if sizes.block_size > 128:
        return f"the Triton decode takes blocks of up to 128 keys, not {sizes.block_size}"
    held = sizes.block_size * max(sizes.head_dim, sizes.head_dim_v) * (4 if dtype == "float32" else 2)
    if held > MOST_BLOCK_BYTES:
        return f"the Triton decode holds blocks of {MOST_BLOCK_BYTES >> 10} KiB of keys, not {held >> 10}; lower block_size"
    held = triton.next_power_of_2(max(1, sizes.parts)) * sizes.head_dim * (4 if dtype == "float32" else 2)
    if held > MOST_BLOCK_BYTES:
        return f"the Triton decode holds {MOST_BLOCK_BYTES >> 10} KiB of a block's means, not {held >> 10}; lower sub_blocks"
    if most_candidates(sizes, rules) > WIDEST_LEVEL:
        return (
            f"the Triton decode holds up to {WIDEST_LEVEL} candidates of a level, not {most_candidates(sizes, rules)}; "
            "lower beam or top_k, raise levels, or give the cache a smaller max_len"
        )
    return None
