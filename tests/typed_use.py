"""How a user calls models of a modality: `make lint` checks that mypy takes it, nothing runs it."""

from __future__ import annotations

from pathlib import Path

import zoo


def continue_text(name: str, text: str) -> str:
    return "".join(zoo.create_model(name).stream_text(text, max_new_tokens=6))


def name_image(folder: Path, image: str) -> str:
    label, _ = zoo.load_model(folder).classify(image, size=96)[0]
    return label


def write_ids(name: str, prompt: list[int]) -> list[int]:
    return zoo.create_model(name).generate([prompt], max_new_tokens=3)[0]
