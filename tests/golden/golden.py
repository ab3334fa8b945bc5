"""Golden numbers of the zoo: logits of every named weight, short trainings, tables of four
evaluators.

    python tests/golden/golden.py > golden.json        one minute on one core
    python tests/golden/golden.py dna_ passkey         only entries whose names contain one of these
    words

"digest" entries are SHA-256 and equal to the bit on one machine; a refactor leaves them unchanged.
"values" are numbers that another processor reproduces within 1e-5; `test_golden.py` compares those
with `numbers.json`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file

import zoo

# One recipe a modality, each on data that ships.
TRAININGS = {
    "text.ggd_ssmax_tiny": ["data.source=sotu-excerpt"],
    "vision.goat_ssmax_tiny": ["data.source=glyphs-builtin"],
    "dna.goat_tiny": ["data.source=yeast-chr01"],
}
EVALUATIONS = {
    "perplexity": ["text_ggd_goat_ssmax_tiny.facts", "--lengths", "128,512", "--samples", "4"],
    "passkey": ["text_ggd_ssmax_tiny.facts", "--lengths", "128,512", "--samples", "2"],
    "find": [
        "vision_ggd2d_separable_ssmax_scene_patch8.scenes",
        "--sizes",
        "96,144",
        "--source",
        "wds:{scenes}",
    ],
    "bits": [
        "dna_goat_tiny.genomes",
        "--lengths",
        "256,1024",
        "--samples",
        "4",
        "--source",
        "yeast-chr01",
    ],
}


def digest(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


def logits(name: str) -> torch.Tensor:
    """Logits of a named model on a fixed input."""
    model = zoo.create_model(name).eval()
    generator = torch.Generator().manual_seed(0)
    if name.startswith("vision"):
        size = model.config.train_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        inputs = torch.rand(1, 3, height, width, generator=generator)
    else:
        inputs = torch.randint(0, 4, (1, 64), generator=generator)
    with torch.inference_mode():
        output = model(inputs)
    return (
        (output[0] if isinstance(output, (tuple, list)) else output).detach().float().contiguous()
    )


def weights(names: Iterable[str]) -> dict[str, Any]:
    entries = {}
    for name in names:
        values = logits(name)
        finite = values[values.isfinite()]
        probe = [float(finite.mean()), float(finite.std()), *finite[:3].tolist()]
        entries[name] = {"digest": digest(values.numpy().tobytes()), "values": probe}
    return entries


def training(recipe: str, settings: list[str], folder: Path) -> dict[str, Any]:
    """Losses and saved weights of 20 steps."""
    from recipes.train import main

    run = folder / recipe
    common = [
        "train.steps=20",
        "train.batch=8",
        "train.seed=1",
        "evaluate.every=20",
        "evaluate.samples=16",
    ]
    words = [word for setting in (*settings, *common) for word in ("--set", setting)]
    if code := main([recipe, *words, "--run-dir", str(run)]):
        raise RuntimeError(f"{recipe} ended with {code}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row[name] for name in ("loss", "heldout_loss") for row in rows if name in row]
    tensors = load_file(run / "model" / "model.safetensors")
    payload = b"".join(name.encode() + tensors[name].numpy().tobytes() for name in sorted(tensors))
    return {"digest": digest(json.dumps(losses).encode() + payload), "values": losses}


def scenes(path: Path) -> None:
    """A shard of twelve pictures of nine letters with their boxes, one ringed: data for `find` that
    needs no download."""
    from matplotlib import get_data_path

    font = ImageFont.truetype(str(Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), 26)
    ink = (40, 10, 10)
    members = {}
    for number in range(12):
        rng = np.random.default_rng(number)
        picture = Image.new("RGB", (144, 144), (210, 210, 200))
        boxes = []
        categories = []
        pen = ImageDraw.Draw(picture)
        for place in rng.permutation(9):
            x = 48 * int(place % 3) + 24
            y = 48 * int(place // 3) + 24
            category = int(rng.integers(26))
            pen.text((x, y), chr(65 + category), font=font, fill=ink, anchor="mm")
            if not boxes:
                pen.ellipse((x - 19, y - 19, x + 19, y + 19), outline=ink, width=2)
            boxes.append([x - 12, y - 12, 24, 24])
            categories.append(category)
        stream = io.BytesIO()
        picture.save(stream, "PNG")
        objects = {"bbox": boxes, "category": categories, "marked": [n == 0 for n in range(9)]}
        members |= {
            f"{number}.png": stream.getvalue(),
            f"{number}.json": json.dumps({"objects": objects}).encode(),
        }
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def evaluation(evaluator: str, words: list[str], folder: Path) -> dict[str, Any]:
    """The CSV of an evaluator: its bytes, and its numbers."""
    from recipes.evaluate import main

    out = folder / evaluator
    words = [word.format(scenes=folder / "scenes.tar") for word in words]
    if code := main([words[0], evaluator, *words[1:], "--device", "cpu", "--out", str(out)]):
        raise RuntimeError(f"{evaluator} ended with {code}")
    payload = (out / f"{evaluator}.csv").read_bytes()
    rows = list(csv.DictReader(payload.decode().splitlines()))
    cells = [
        cell for row in rows for name, cell in sorted(row.items()) if "second" not in name and cell
    ]
    return {"digest": digest(payload), "values": [float(cell) for cell in cells if is_number(cell)]}


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def golden(*words: str) -> dict[str, dict[str, Any]]:
    """Golden entries computed in one thread on the CPU: all, or those whose names contain one of
    `words`."""

    def chosen(names: Iterable[str]) -> list[str]:
        return [name for name in names if not words or any(word in name for word in words)]

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scenes(folder / "scenes.tar")
        return {
            "weights": weights(chosen(zoo.list_models(pretrained=True))),
            "training": {
                recipe: training(recipe, TRAININGS[recipe], folder) for recipe in chosen(TRAININGS)
            },
            "evaluation": {
                kind: evaluation(kind, EVALUATIONS[kind], folder) for kind in chosen(EVALUATIONS)
            },
        }


if __name__ == "__main__":
    stdout = sys.stdout
    sys.stdout = sys.stderr
    entries = golden(*sys.argv[1:])
    sys.stdout = stdout
    json.dump(entries, sys.stdout, indent=1)
    digests = {
        f"{kind}.{name}": entry["digest"]
        for kind, group in entries.items()
        for name, entry in group.items()
    }
    print("golden", digest(json.dumps(digests, sort_keys=True).encode())[:16], file=sys.stderr)
