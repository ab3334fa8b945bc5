"""Adapters of the core to text, images and DNA; each has model.py, data.py and evaluators/."""

from modalities.torchvision_ops import declare_operators

declare_operators()
