"""What a decoding cache holds: keys, values and their pyramid for a batch of sequences, allocated once for `max_len` tokens.

Keys and values are contiguous, [B, G, blocks·C, D], or paged, [pages, G, C, D] with a table of pages, [B, blocks]: a page is
a block of the pyramid. Summaries lie as in `kernels.pyramid`, level by level, but at offsets that follow from the capacity and
so never move. Beside them stand each node's statistics (mean or sum, maximum, minimum) in fp32, because a rounded summary
cannot be added to: with them an open node is composed of its children as a build composes it, to the bit, and cutting
tokens off needs no walk through the keys. They cost at most 24·D bytes a block, beside the 4·C·D of keys and values in
16 bits: 9 % at C 64. For rules that score a block by its parts, the means of these lie there too: 2·D bytes each in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyramidbench.kernels.pages import Copies
from pyramidbench.kernels.pyramid import walked_levels, whole_parts
from pyramidbench.kernels.walk_rules import WalkRules

MOVED_BYTES = 64 << 20
"""What `reorder` holds of the moved sequences at a time."""


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of a cache. `levels` are those that any length up to the capacity may need; pages is None where contiguous.

    parts: of a block, whose means are kept; 0 where no rule reads them.
    """

    batch: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    max_len: int
    block_size: int
    branching: int
    levels: int
    bound_weight: float
    pages: int | None = None
    parts: int = 0

    @classmethod
    def of(
        cls, batch: int, kv_heads: int, dims: tuple[int, int], max_len: int, block_size: int, rules: WalkRules,
        pages: int | None = None,
    ) -> CacheSizes:  # fmt: skip
        """Sizes for walks under `rules`; dims: of keys and of values."""
        levels = walked_levels(rules.levels, -(-max_len // block_size), rules.branching, rules.start_width)
        weight = rules.bounds(dims[0]) if rules.needs_summaries(levels) else 0.0
        parts = rules.sub_blocks if rules.leaf_score == "sub" else 0
        return cls(batch, kv_heads, *dims, max_len, block_size, rules.branching, levels, weight, pages, parts)

    @property
    def blocks(self) -> int:
        """Blocks of a sequence at its longest."""
        return -(-self.max_len // self.block_size)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Place of each level in the node buffer, and its end."""
        found, nodes = [0], self.blocks
        for _ in range(self.levels):
            found.append(found[-1] + nodes)
            nodes = -(-nodes // self.branching)
        return tuple(found)

    @property
    def has_bounds(self) -> bool:
        return self.bound_weight > 0

    @property
    def part_size(self) -> int:
        """Keys of a part of a block; the last ones of a block may have fewer, or none."""
        return -(-self.block_size // self.parts)

    def full_parts(self, tokens: int) -> int:
        """Parts whose tokens are all there, in a sequence of so many."""
        return whole_parts(tokens, self.block_size, self.parts)

    def nodes_at(self, level: int, tokens: int) -> int:
        """Nodes of a level over so many tokens."""
        return -(-tokens // (self.block_size * self.branching**level))


@dataclass(frozen=True)
class CacheStore:
    """The tensors of a cache. lengths: int32 [B, G], equal over G, so that a program of one head may move its own.

    nodes: [B, G, n, D or 2·D] in k's dtype; stats: [B, G, n, 1 or 3, D] in fp32 (fp64 for fp64 keys); full: int32 [1], set
    where an append found no room. pages: int32 [B, blocks], -1 where no page is assigned, or None. parts: means of the parts of
    every block, [B, G, blocks, parts, D] in k's dtype, or None.
    """

    sizes: CacheSizes
    k: Tensor
    v: Tensor
    nodes: Tensor
    stats: Tensor
    lengths: Tensor
    full: Tensor
    pages: Tensor | None
    parts: Tensor | None
    counters: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, sizes: CacheSizes, dtype: torch.dtype, device: torch.device) -> CacheStore:
        """An empty cache; what is not written yet is uninitialised and never read."""
        heads, size = (sizes.batch, sizes.kv_heads), sizes.block_size
        if sizes.pages is None:
            shape: tuple[int, ...] = (*heads, sizes.blocks * size)
        else:
            shape = (sizes.pages, sizes.kv_heads, size)
        wide, count = torch.promote_types(dtype, torch.float32), sizes.offsets[-1]
        rows = 3 if sizes.has_bounds else 1
        pages = None
        if sizes.pages is not None:
            pages = torch.full((sizes.batch, sizes.blocks), -1, dtype=torch.int32, device=device)
        parts = None
        if sizes.parts:
            parts = torch.empty(*heads, sizes.blocks, sizes.parts, sizes.head_dim, dtype=dtype, device=device)
        return cls(
            sizes,
            torch.empty(*shape, sizes.head_dim, dtype=dtype, device=device),
            torch.empty(*shape, sizes.head_dim_v, dtype=dtype, device=device),
            torch.empty(*heads, count, sizes.head_dim * (1 + sizes.has_bounds), dtype=dtype, device=device),
            torch.empty(*heads, count, rows, sizes.head_dim, dtype=wide, device=device),
            torch.zeros(heads, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            pages,
            parts,
        )

    def arrivals(self, items: int) -> Tensor:
        """A counter for each of so many queries' sets, int32, by which programs find out who is last; 0 between launches."""
        if items in self.counters:
            return self.counters[items]
        fresh = torch.zeros(items, dtype=torch.int32, device=self.k.device)
        # What a graph's capture makes is zero only once the graph has run, so that graph keeps it for itself.
        if self.k.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self.counters[items] = fresh
        return fresh

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        held = (self.k, self.v, self.nodes, self.stats, self.lengths, self.full, self.pages, self.parts)
        return sum(tensor.nbytes for tensor in (*held, *self.counters.values()) if tensor is not None)

    def blocks_of(self, x: Tensor, block: Tensor) -> Tensor:
        """Blocks of keys or values (`x` is self.k or self.v): [B, sets, …, C, D] for numbers [B, sets, …].

        Sets are the key/value heads or a multiple of them. -1 gives any block.
        """
        block = block.clamp(min=0)
        batch, head = self._grid(block)
        if self.pages is None:
            row = (batch * self.sizes.kv_heads + head) * self.sizes.blocks + block
        else:
            row = self.pages[batch, block].clamp(min=0).long() * self.sizes.kv_heads + head
        flat = x.view(-1, self.sizes.block_size * x.shape[-1]).index_select(0, row.flatten())
        return flat.view(*block.shape, self.sizes.block_size, x.shape[-1])

    def nodes_of(self, level: int, node: Tensor) -> Tensor:
        """Summaries [B, sets, …, D or 2·D] of a level's nodes [B, sets, …]; -1 gives any node."""
        batch, head = self._grid(node)
        row = (
            (batch * self.sizes.kv_heads + head) * self.sizes.offsets[-1]
            + self.sizes.offsets[level]
            + node.clamp(min=0)
        )
        return self.nodes.view(-1, self.nodes.shape[-1]).index_select(0, row.flatten()).view(*node.shape, -1)

    def parts_of(self, block: Tensor) -> Tensor:
        """Means of the parts of blocks [B, sets, …]: [B, sets, …, parts, D]; -1 gives those of any block."""
        assert self.parts is not None
        batch, head = self._grid(block)
        row = (batch * self.sizes.kv_heads + head) * self.sizes.blocks + block.clamp(min=0)
        return self.parts.flatten(0, 2).index_select(0, row.flatten()).view(*block.shape, *self.parts.shape[3:])

    def _grid(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Sequence and key/value head of indices [B, sets, …], to broadcast over them."""
        trailing = (1,) * (index.dim() - 2)
        head = torch.arange(index.shape[1], device=index.device) * self.sizes.kv_heads // index.shape[1]
        return torch.arange(index.shape[0], device=index.device).view(-1, 1, *trailing), head.view(1, -1, *trailing)

    def rows_of(self, x: Tensor, sequence: int, first: int, end: int) -> Tensor:
        """Tokens [first, end) of one sequence: [G, end - first, D]."""
        if self.pages is None:
            return x[sequence, :, first:end]
        size = self.sizes.block_size
        pages = self.pages[sequence, first // size : -(-end // size)].long()
        held = x[pages].transpose(0, 1).flatten(1, 2)
        return held[:, first % size : first % size + end - first]

    def write(self, x: Tensor, sequence: int, first: int, rows: Tensor) -> None:
        """Put rows [G, n, D] at tokens first … of one sequence."""
        if self.pages is None:
            x[sequence, :, first : first + rows.shape[1]] = rows
            return
        token = torch.arange(first, first + rows.shape[1], device=x.device)
        page = self.pages[sequence, token // self.sizes.block_size].long()
        x[page, :, token % self.sizes.block_size] = rows.transpose(0, 1)

    def copy_pages(self, copies: Copies) -> None:
        """Copy whole pages of keys and values."""
        if copies.source:
            source, target = (torch.tensor(pages, device=self.k.device) for pages in (copies.source, copies.target))
            for x in (self.k, self.v):
                x[target] = x[source]

    def reorder(self, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Make sequence b what sources[b] is, of lengths[sources[b]] tokens: all that is not in pages, in place, run by run."""
        moved = [sequence for sequence, source in enumerate(sources) if source != sequence]
        if not moved:
            return
        from_where = [sources[sequence] for sequence in moved]
        longest = max(lengths[source] for source in from_where)
        target, source = (torch.tensor(rows, device=self.k.device) for rows in (moved, from_where))
        spans = [(x, 0, longest) for x in (self.k, self.v) if self.pages is None]
        for level, first in zip(range(self.sizes.levels), self.sizes.offsets, strict=False):
            end = first + self.sizes.nodes_at(level, longest)
            spans += [(self.nodes, first, end), (self.stats, first, end)]
        if self.parts is not None:
            spans.append((self.parts, 0, self.sizes.nodes_at(0, longest)))
        for x, first, end in spans:
            step = max(1, MOVED_BYTES // (len(moved) * x[0, :, :1].nbytes))
            for begin in range(first, end, step):
                place = slice(begin, min(begin + step, end))
                x[target, :, place] = x[source, :, place]
        self.lengths[target] = self.lengths[source]

    def top_level(self, rules: WalkRules, tokens: Tensor) -> Tensor:
        """The level at which a walk over so many tokens starts: int64, in the shape of `tokens`."""
        nodes = (tokens.long() + self.sizes.block_size - 1) // self.sizes.block_size
        widest = rules.start_width if rules.levels == "auto" else 1
        top = torch.zeros_like(nodes)
        for _ in range(self.sizes.levels - 1):
            above = nodes > widest
            top = top + above
            nodes = torch.where(above, (nodes + rules.branching - 1) // rules.branching, nodes)
        return top
