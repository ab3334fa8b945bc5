"""After `import zoo`, timm and transformers' models can be imported beside any build of torchvision, in any order."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("first", ["timm", "from transformers import LlamaConfig, ViTModel", "peft"])
def test_libraries_are_imported_after_zoo(first: str) -> None:
    line = first if first.startswith("from") else f"import {first}"
    subprocess.run([sys.executable, "-c", f"import zoo\n{line}"], check=True, timeout=120)
