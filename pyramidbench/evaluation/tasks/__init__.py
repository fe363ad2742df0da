"""The tasks, one file each; `evaluation.catalogue` lists them."""
