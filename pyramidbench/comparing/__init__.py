"""Comparing measured cells: which may be compared, what differs, and whether it counts."""
