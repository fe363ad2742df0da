"""Attention methods, one file each; the file's name is the method's name. No method imports another."""
