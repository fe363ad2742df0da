"""The commands of the command line: one file for each, with its function and the flags that are its own."""
