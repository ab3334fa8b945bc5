"""Classes by name: a source of another order or of fewer classes, strangers, and models or sources
without names."""

from __future__ import annotations

import re
import unicodedata
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from modalities.classes import label_numbers
from modalities.vision.data import build_loader
from modalities.vision.evaluators.resolution import Resolution, ResolutionSettings
from modalities.vision.modality import build
from modalities.vision.model import VisionTransformer
from modalities.vision.sources import class_names
from recipes.commands import ConfigError
from recipes.models import load_weights, name_classes
from tests.refusals import refuses
from tests.vision.image_files import config, encoded, opened, write_index, write_tar
from zoo.catalog import create_model

LETTERS = "abcdef"


def letter(name):
    """A picture of one red that tells the letter."""
    return Image.new("RGB", (16, 16), (40 * LETTERS.index(name) + 20, 0, 0))


def write_letters(root, names, count=2):
    for name in names:
        for n in range(count):
            (root / name).mkdir(parents=True, exist_ok=True)
            letter(name).save(root / name / f"{n}.png")
    return f"folder:{root}?split=heldout"


def write_letter_shard(folder, names, listed=None):
    """A shard whose labels are places in `names`, which its index lists."""
    folder.mkdir(parents=True)
    samples = []
    for label, name in enumerate(names):
        members = {"png": encoded(letter(name)), "cls": str(label).encode()}
        samples.append((f"{label:03d}", members))
    write_tar(folder / "a.tar", samples)
    write_index(folder, list(names) if listed is None else listed)
    return f"wds:{folder}"


class Speller(nn.Module):
    """Reads the letter off a picture, and answers with its number in its own order of classes."""

    num_prefix_tokens = 0
    pixels = VisionTransformer.pixels

    def __init__(self, order, *, named=True):
        super().__init__()
        self.order = order
        self.class_names = tuple(order) if named else ()
        self.config = SimpleNamespace(
            train_size=(16, 16),
            patch_size=8,
            num_classes=len(order),
            mean=(0.0,) * 3,
            std=(1.0,) * 3,
        )
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images):
        red = (images[:, 0].mean((1, 2)) * 255).round()
        letters = ((red - 20) / 40).round().long().tolist()
        numbers = [max(0, self.order.find(LETTERS[n])) for n in letters]
        return F.one_hot(torch.tensor(numbers), len(self.order)).float()


def measured(model, source):
    evaluator = Resolution(ResolutionSettings(source=source, sizes=(16,)))
    [row] = evaluator.rows(dict(evaluator.run(model)))
    return row


@pytest.mark.parametrize("order", ["abc", "cab", "dabcf"])
def test_names_decide_labels(order, tmp_path):
    """A source of fewer classes or of another order is scored by name."""
    sources = [
        write_letters(tmp_path / "folder", "bc"),
        write_letter_shard(tmp_path / "turned", "cba"),
        write_letter_shard(tmp_path / "few", "ca"),
    ]
    for source in sources:
        assert measured(Speller(order), source)["top1"] == 1.0, source


def test_dataset_classes_are_compared(tmp_path):
    """A ClassLabel's names count, not its numbers."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["c", "a", "b"])}
    )
    pictures = [letter(name) for name in "abc"]
    rows = {"image": pictures, "label": ["a", "b", "c"]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "data"))
    source = f"hf:{tmp_path / 'data'}"
    assert measured(Speller("abc"), f"{source}?split=heldout")["top1"] == 1.0
    loader = build_loader(config(source, num_classes=3), micro_batch=2)
    assert loader.class_names == ("c", "a", "b")


def test_parts_of_dataset_are_compared(tmp_path):
    """The held-out part of a dataset has the numbers of its training part."""
    datasets = pytest.importorskip("datasets")
    parts = datasets.DatasetDict()
    for part, names in (("train", "abc"), ("test", "ca")):
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))}
        rows = {"image": [letter(name) for name in names], "label": list(names)}
        parts[part] = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    parts.save_to_disk(str(tmp_path / "data"))
    items = opened(config(f"hf:{tmp_path / 'data'}", num_classes=3)).items
    assert items.classes == ["a", "b", "c"]
    reds = {label: picture.getpixel((0, 0))[0] for picture, label in map(items.__getitem__, (0, 1))}
    assert reds == {0: 20, 2: 100}


def test_cells_are_keyed_by_mapping(tmp_path):
    """Other numbers are other cells; equal lists keep the key they had."""
    source = write_letter_shard(tmp_path / "shard", "cba")
    evaluator = Resolution(ResolutionSettings(source=source))
    same = evaluator.identity(Speller("cba"))
    assert "labels" not in same
    assert evaluator.identity(Speller("abc")) == same | {"labels": [2, 1, 0]}
    assert evaluator.identity(Speller("abcd")) == same | {"labels": [2, 1, 0]}


def test_strangers_are_named(tmp_path):
    """Classes that the model does not have are an error, with the nearest of its own."""
    evaluate = Resolution(ResolutionSettings(source=write_letters(tmp_path / "bcd", "bcd"))).cells
    refuses(
        "has a class that the model does not have: 'd'; valid: a, b, c", evaluate, Speller("abc")
    )
    refuses("has 2 classes .*: 'c', 'd'; valid: a, b", evaluate, Speller("ab"))
    # As many as the model has: numbers alone would fit.
    refuses("does not have: 'd'", evaluate, Speller("bca"))


def test_names_differ_by_letters():
    """Case counts, composition does not; a name that occurs twice decides nothing."""
    names = {"source": "A", "model": "B"}
    refuses(r"'Cat'; did you mean 'cat'\?", label_numbers, ["Cat"], ["dog", "cat"], **names)
    apart = unicodedata.normalize("NFD", "café")
    assert label_numbers([apart], ["thé", "café"], **names) == (1,)
    twice = ["crane", "gull", "crane"]
    assert label_numbers(twice, twice, **names) == (0, 1, 2)
    refuses("B lists the class 'crane' 2 times", label_numbers, ["gull"], twice, **names)
    refuses("A lists the class 'crane' 2 times", label_numbers, twice, ["gull", "crane"], **names)


def test_numbers_without_names_are_said(tmp_path):
    """Where one side has no names its numbers count, which a note says."""
    folder = write_letters(tmp_path / "folder", "abc")
    bare = write_letter_shard(tmp_path / "bare", "cba", listed=[])
    assert measured(Speller("abc", named=False), folder)["top1"] == 1.0
    assert measured(Speller("cba"), bare)["top1"] == 1.0
    for source, model, words in (
        (folder, Speller("abc", named=False), "no names of classes: .* 'a', 'b', 'c'"),
        (bare, Speller("cba"), "has no names of classes: .* 0… for 'c', 'b', 'a'"),
        (folder, Speller("abcde"), "3 of the model's 5 classes"),
        (folder, Speller("cab"), "^$"),
    ):
        note = Resolution(ResolutionSettings(source=source)).model_note(model)
        assert re.search(words, note), note
    refuses(
        r"3 classes and the model 4; .*, or list all of its classes in a file, '.*&order=FILE'",
        Resolution(ResolutionSettings(source=folder)).cells,
        Speller("abcd", named=False),
    )


def test_heldout_source_is_mapped(tmp_path):
    """In training too, where the held-out source lacks a class or has another order."""
    trained = f"folder:{tmp_path / 'train'}"
    write_letters(tmp_path / "train", "abc")
    sources = [
        write_letter_shard(tmp_path / "turned", "cba"),
        write_letter_shard(tmp_path / "few", "ca"),
        f"folder:{tmp_path / 'some'}",
    ]
    write_letters(tmp_path / "some", "bc")
    for source in sources:
        data = config(trained, num_classes=3, heldout_source=source)
        items = opened(data).items
        assert items.classes == ["a", "b", "c"]
        for picture, label in (items[place] for place in range(len(items))):
            assert picture.getpixel((0, 0))[0] == 40 * label + 20, source
    plain = opened(config(sources[0], num_classes=3, heldout_source=sources[0]))
    turned = opened(config(trained, num_classes=3, heldout_source=sources[0]))
    assert plain.fingerprint != turned.fingerprint
    other = write_letter_shard(tmp_path / "other", "abd")
    data = config(trained, num_classes=3, heldout_source=other)
    refuses("does not have: 'd'", build_loader, data, split="heldout", micro_batch=1)


def test_training_says_that_numbers_count(tmp_path, caplog):
    """Where only one of two sources has names, a warning says so."""
    bare = write_letter_shard(tmp_path / "bare", "abc", listed=[])
    named = write_letter_shard(tmp_path / "named", "cba")
    for source, heldout, said in ((bare, named, 1), (named, bare, 1), (named, named, 0)):
        caplog.clear()
        data = config(source, num_classes=3, heldout_source=heldout)
        build_loader(data, split="heldout", micro_batch=1)
        assert caplog.text.count("labels are compared by number") == said


def test_models_know_their_classes(tmp_path):
    """Of shards as of folders; a map has the background first."""
    source = write_letter_shard(tmp_path / "shard", "cba")
    options = {"num_layers": 1, "dim": 32, "num_heads": 1, "hidden_dim": 16}
    model = build("vision_goat_tiny_patch8", options, config(source, num_classes=3, image_size=16))
    assert model.class_names == class_names(source) == ("c", "b", "a")
    objects = config(source, num_classes=4, image_size=16, target="marked+map", augment="window")
    assert build_loader(objects, micro_batch=2).class_names == ("background", "c", "b", "a")
    model.save_pretrained(tmp_path / "run" / "model")
    name_classes(model, ("c", "b", "a"), tmp_path / "run")
    words = "trained on the classes 'c', 'b', 'a'; the data now list 'a', 'b', 'c'"
    refuses(words, name_classes, model, ("a", "b", "c"), tmp_path / "run", error=ConfigError)


def classifier(names):
    torch.manual_seed(len(names))
    model = create_model(
        "vision_goat_tiny_patch8",
        num_layers=1,
        dim=32,
        num_heads=1,
        hidden_dim=16,
        num_classes=len(names) or 3,
    )
    model.class_names = tuple(names)
    return model


@pytest.mark.parametrize(
    ("names", "words", "rows"),
    [
        ("abc", "^$", [0, 1, 2]),
        ("cba", "rows of the classifier by name, 3 of 3", [2, 1, 0]),
        ("ca", "by name, 2 of 3 classes", [2, 0]),
        ("bcd", "by name for 2 classes; .* 'd'", [1, 2, None]),
        ("xyz", "by name for 0 classes", [None, None, None]),
        ("", "rows are copied", [0, 1, 2]),
    ],
)
def test_start_takes_rows_by_name(names, words, rows, tmp_path):
    """A classifier that begins with weights of other classes."""
    start = classifier("abc")
    start.save_pretrained(tmp_path)
    model = classifier(names)
    fresh = model.head.weight.detach().clone()
    note = load_weights(model, str(tmp_path))
    assert re.search(words, note), note
    for row, stored_row in enumerate(rows):
        expected = fresh[row] if stored_row is None else start.head.weight[stored_row]
        assert torch.equal(model.head.weight[row], expected)
