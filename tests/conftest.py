"""The suite runs on the CPU wherever it runs: a CUDA machine would change precisions, losses and
process groups.

Triton's kernels run in its interpreter then. PRIORZOO_TEST_DEVICE=cuda leaves the GPU visible and
compiles them, for the tests that place their tensors on `tests.device.DEVICE`.
"""

import os

_DEVICE = os.environ.get("PRIORZOO_TEST_DEVICE", "cpu")
if _DEVICE not in ("cpu", "cuda"):
    raise ValueError(f"PRIORZOO_TEST_DEVICE must be cpu or cuda, got {_DEVICE!r}")
if _DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when triton is imported
else:
    os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tests are shared out among the cores; workers inherit what is set here

import pytest  # noqa: E402
import torch  # noqa: E402

import zoo  # noqa: E402, F401  before anything imports torchvision: see zoo/__init__.py
from tests.launching import RANKS  # noqa: E402

if _DEVICE == "cuda" and not torch.cuda.is_available():
    raise ValueError("PRIORZOO_TEST_DEVICE=cuda, and torch sees no CUDA device here")


@pytest.fixture(autouse=True)
def no_rank_is_left_behind():
    """Training in this process says in its environment which rank it is; another test's processes
    are not of that group."""
    yield
    for name in RANKS:
        os.environ.pop(name, None)
