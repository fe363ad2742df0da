"""`python -m pyramidbench` is the same as the command `pyramidbench`."""

from pyramidbench.cli import main

if __name__ == "__main__":
    main()
