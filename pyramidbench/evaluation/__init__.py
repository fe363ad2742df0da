"""Evaluation: what a language model still can do with its attention swapped for a method."""
