"""Puts this project's `recipes` first on the search path: other distributions own a top-level
package of that name.

The wheel therefore has it in priorzoo/packages/; in a checkout it stands beside this folder.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE / "packages" if (_HERE / "packages").is_dir() else _HERE.parent))


def __getattr__(name: str) -> object:
    """`__version__` is that of `zoo`, which imports torch."""
    if name != "__version__":
        raise AttributeError(f"module 'priorzoo' has no attribute {name!r}")
    import zoo

    return zoo.__version__
