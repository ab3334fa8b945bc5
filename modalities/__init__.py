"""Adapters of the core to text, images and DNA; each has model.py, data.py and evaluators/."""

import zoo  # noqa: F401  before anything imports torchvision, whose operators it declares where they do not load

# Entry points of the modalities that ship, which a checkout has without installation.
SHIPPED = {
    "text": "modalities.text:MODALITY",
    "vision": "modalities.vision:MODALITY",
    "dna": "modalities.dna:MODALITY",
}
