"""Attention functions of other packages: layout, scale and masks as they want them, what they cannot do, and why one is
not here. Only methods/ imports this folder; nothing of another package is imported before it is asked for."""
