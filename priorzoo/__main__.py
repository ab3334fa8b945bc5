"""The console command `priorzoo`, also `python -m priorzoo`."""

import sys

from recipes.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
