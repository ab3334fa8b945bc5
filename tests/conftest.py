"""The suite runs on the CPU wherever it runs: a CUDA machine would change precisions, losses and process groups."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "2")

import modalities  # noqa: F401  before anything imports torchvision: see modalities/torchvision_ops.py
