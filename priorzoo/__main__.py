"""The console command `priorzoo`, also `python -m priorzoo`."""

import gc
import sys

# Imports allocate much and free little. Collections during them, and later ones over what they made, take a third of
# the time until a command runs.
collecting = gc.isenabled()
gc.disable()
try:
    from recipes.cli import main

    gc.freeze()
finally:
    if collecting:
        gc.enable()
__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
