"""Training: a small decoder trained from scratch with each attention, from the same weights on the same batches."""
