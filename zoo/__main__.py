"""python -m zoo: see `zoo.cli`."""

import sys

from zoo.cli import app, call

if __name__ == "__main__":
    sys.exit(call(app, prog="python -m zoo"))
