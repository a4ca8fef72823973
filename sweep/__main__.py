"""`python -m sweep`: the command line where the console script is not on the path."""

from sweep.cli import main

if __name__ == "__main__":
    main()
