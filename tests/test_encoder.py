"""The room for grids: a toy modality of spectrograms, made of `modalities.encoder` alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from modalities.contract import Modality
from modalities.encoder import training
from modalities.encoder.accuracy import SizeAccuracy
from modalities.encoder.batches import GridBatches
from modalities.encoder.config import GridConfig, GridData
from modalities.encoder.evaluation import SizeSettings
from modalities.encoder.items import BadSample, HeldoutItems, ItemSet, split_places
from modalities.encoder.model import GridTransformer
from modalities.encoder.samples import ItemSamples
from modalities.encoder.training import classification_loss
from modalities.loading import Heldout, IndexedLoader, first_heldout
from tests.refusals import refuses

MELS = 16
CLASSES = 4
BROKEN = 7


@dataclass(frozen=True)
class ToneConfig(GridConfig):
    frames: int = 16

    @property
    def train_size(self):
        return MELS, self.frames


class ToneTransformer(GridTransformer):
    config_class = ToneConfig
    modality = "tones"


class Tones(ItemSet):
    """Spectrograms (MELS, 8 to 71 frames) of a beat in noise: the label is how fast it is."""

    spec = "tones"
    classes = ("largo", "andante", "allegro", "presto")
    fingerprint = "tones"

    def __init__(self, split):
        self.numbers = split_places((f"tone {n}" for n in range(400)), split, key=b"tones")

    def __len__(self):
        return len(self.numbers)

    def read(self, index):
        number = self.numbers[index]
        if index == BROKEN:
            raise BadSample("broken", "no samples")
        rng = np.random.default_rng(number)
        label = number % CLASSES
        frames = 8 + number % 64
        beat = 2 * np.sin(2 * np.pi * (label + 1) * np.arange(frames) / 12)
        return beat + rng.normal(size=(MELS, frames)), label

    def group(self, index):
        return f"singer {self.numbers[index] % 5}"


@dataclass(frozen=True)
class ToneData(GridData):
    num_classes: int = CLASSES
    frames: int = 16

    @property
    def train_shapes(self):
        return ((MELS, self.frames),)


def first_frames(tone, frames):
    """(1, MELS, frames), repeated where the tone is shorter."""
    return np.resize(tone.T, (frames, MELS)).T[None].astype(np.float32)


class ToneBatches(GridBatches):
    inputs = "spectrograms"

    def sample(self, item, label, shape):
        return first_frames(item, shape[1]), {"targets": label}


def build_loader(data, *, micro_batch, split="train", **share):
    train = split == "train"
    samples = ItemSamples(Tones(split), ToneBatches(data), train=train, seed=data.seed)
    return IndexedLoader(samples, micro_batch, **share)


class HeldoutTones(HeldoutItems):
    noun = "tone"

    def side(self, place, shape):
        try:
            return self[place][0].shape[1]
        except BadSample:
            return 0


class ToneAccuracy(SizeAccuracy[SizeSettings, ToneTransformer]):
    name = "duration"
    summary = "accuracy against the duration of a tone"
    unit = "tones"
    grows = "width"

    @property
    def heldout(self):
        return Heldout("tones", "tones", HeldoutTones(Tones("heldout")))

    def grid(self, model, item, shape, control):
        return torch.from_numpy(first_frames(item, shape[1]))


def build(name, options, data):
    options = dict(frames=data.frames, num_classes=data.num_classes) | options
    return ToneTransformer(
        ToneConfig(patch_size=4, dim=32, num_layers=2, num_heads=2, hidden_dim=64, **options)
    )


def loss(model, batch):
    return classification_loss(model(batch["spectrograms"]).float(), batch["targets"])


MODALITY = Modality(
    name="tones",
    unit="tones",
    model=ToneTransformer,
    config=ToneData,
    build=build,
    loader=build_loader,
    heldout=partial(first_heldout, build_loader),
    loss=loss,
    weight=training.weight,
    cost=training.cost,
    evaluators={"duration": ToneAccuracy},
    metrics=training.METRICS,
)


@pytest.fixture(scope="module")
def model():
    """Trained for forty steps."""
    torch.manual_seed(0)
    data = ToneData()
    model = MODALITY.build("tones_tiny", {}, data)
    loader = iter(MODALITY.loader(data, rank=0, world=1, micro_batch=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(40):
        value, _ = MODALITY.loss(model, next(loader))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return model.eval()


def test_a_modality_of_grids_learns(model):
    heldout = MODALITY.heldout(ToneData(), samples=40, rank=0, world=1, micro_batch=16)
    with torch.no_grad():
        for batch in heldout:
            _, metrics = MODALITY.loss(model, batch)
            assert metrics["top1"] > 0.9
    assert MODALITY.weight(batch)[1] <= 16
    assert MODALITY.cost(model, ToneData(), 4).flops > 0


def test_broken_items_are_counted():
    """What is broken is skipped and counted."""
    loader = build_loader(ToneData(), micro_batch=16)
    batches = iter(loader)
    for _ in range(-(-len(Tones("train")) // 16)):
        next(batches)
    assert "× broken (such as tones[7])" in str(loader.report)


def test_a_size_can_count_columns(model):
    """The height stays, items too short for one size are left out of all, and controls are as for
    images."""
    evaluator = ToneAccuracy(SizeSettings(sizes=(8, 32)))
    rows = evaluator.rows(dict(evaluator.run(model)))
    assert [(row["height"], row["width"]) for row in rows] == [(MELS, n) for n in (8, 16, 32)]
    assert len({row["tones"] for row in rows}) == 1
    for row in rows:
        assert row["top1"] > 0.8
        assert "too small" in row["skipped_because"]
    assert rows[-1]["reduced_top1"] >= rows[0]["top1"]
    assert rows[-1]["groups"] == 5
    refuses("size 30 does not divide", ToneAccuracy(SizeSettings(sizes=(30,))).cells, model)
    refuses("more cells than held-out items", ToneAccuracy(SizeSettings(sizes=(128,))).cells, model)


def test_classes_have_names(model, tmp_path):
    model.class_names = Tones.classes
    tone, label = Tones("heldout").read(0)
    [logits] = model(torch.from_numpy(first_frames(tone, 16))[None])
    (name, share), *_ = model.name_classes(logits)
    assert name == Tones.classes[label]
    assert share > 0.5
    model.save_pretrained(tmp_path)
    assert ToneTransformer.from_pretrained(tmp_path).class_names == Tones.classes


def test_errors_speak_of_cells():
    refuses(r"train_size=\(16, 30\) does not divide", ToneConfig, patch_size=4, frames=30)
    model = ToneTransformer(ToneConfig(patch_size=8, dim=16, num_layers=1, num_heads=2))
    refuses("a sample of 16 × 12 cells", model.positions, 16, 12)
