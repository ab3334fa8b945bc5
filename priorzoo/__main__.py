"""The console command `priorzoo`, also `python -m priorzoo`."""

import gc
import sys

# Collections of garbage while modules are imported, and of what they hold afterwards, take a third
# of the time until a command runs.
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
