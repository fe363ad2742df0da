"""Kernels of block-sparse attention, each with a plain torch twin that defines what is right.

Shapes are those of one key/value head unless a docstring says otherwise: q [G, M, D] holds the query heads that share
k [N, D] and v [N, Dv]. B batch, G query heads of a group, M queries, N keys, D head dim, T tiles, S listed blocks.
"""
