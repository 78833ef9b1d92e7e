"""`python -m titan_strategy` is the same as `titan`."""

from titan_strategy.cli import main

if __name__ == "__main__":
    main()
