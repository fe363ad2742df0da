"""Profiling one cell in depth: its stages, its kernels, and how near they come to what the device can do."""
