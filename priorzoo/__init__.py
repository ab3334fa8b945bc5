"""Puts this project's `recipes` first on the search path: other distributions own a top-level package of that name.

The wheel therefore has it in priorzoo/packages/; in a checkout it stands beside this folder.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE / "packages" if (_HERE / "packages").is_dir() else _HERE.parent))
