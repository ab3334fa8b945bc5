"""What launchers start where the wheel is installed:
`deepspeed --module priorzoo.train RECIPE …`."""

import sys

from recipes.train import run

__all__ = ["run"]

if __name__ == "__main__":
    sys.exit(run())
