"""Classifiers of timm: the order of folders, the preparation of images and the names of classes
that a folder says, against timm's own loader, transform and folders."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from modalities.vision import MODALITY
from modalities.vision.classes import sort_classes
from modalities.vision.evaluators.resolution import Resolution, ResolutionSettings
from modalities.vision.outside import OutsideClassifier
from modalities.vision.sources import class_names, open_images
from recipes.commands import CommandError
from recipes.models import find_model
from tests.refusals import refuses
from tests.vision.image_files import write_folder
from zoo import adapt, load_adapted, save_adapted

import timm  # isort: skip  (after the project: on a CPU build of torchvision it does not load before)
from timm.data import ImageNetInfo, create_dataset, create_transform, resolve_model_data_config  # isort: skip

NAME = "test_vit"
OUTSIDE = MODALITY.outside["timm"]
FOLDERS = [
    [str(n) for n in range(12)],
    ["Apple", "banana", "Cherry", "date", "Elder", "fig"],
    ["img10b", "img9", "IMG1", "img010"],
    ["école", "Zoo", "eel", "_x", "10", "9a"],
]


def classifier(count, **facts):
    torch.manual_seed(count)
    model = timm.create_model(NAME, num_classes=count).eval()
    torch.nn.init.normal_(model.head.weight)
    model.pretrained_cfg = model.pretrained_cfg | facts
    return model


def evaluator(folder, options=""):
    source = f"folder:{folder}?split=heldout{options}"
    return Resolution(ResolutionSettings(source=source, sizes=(160,), mode="resized"))


@pytest.mark.parametrize("names", FOLDERS)
def test_folders_in_timms_order(names, tmp_path):
    """Without names the numbers of a timm model are those of timm's own reader."""
    write_folder(tmp_path / "pictures", names, len(names))
    truth = create_dataset("", root=str(tmp_path / "pictures")).reader.class_to_idx
    assert sort_classes(names, "timm") == tuple(sorted(names, key=truth.__getitem__))
    model = OutsideClassifier(classifier(len(names)), NAME)
    measured = evaluator(tmp_path / "pictures")
    assert measured.labels(model) == tuple(truth[name] for name in sorted(names))
    note = measured.model_note(model)
    assert "no names of classes: folders are numbered as timm does" in note
    [option] = re.findall(r"\?split=heldout(&order=torchvision)' numbers them", note)
    assert evaluator(tmp_path / "pictures", option).labels(model) == ()


def test_orders_can_be_chosen(tmp_path):
    """A source says the order of its folders, by a library's name or a file."""
    names = ["b10", "b9", "A"]
    write_folder(tmp_path / "pictures", names, 3)
    source = f"folder:{tmp_path}/pictures"
    (tmp_path / "names.txt").write_text("b9\nmore\n\nb10\nA\n")
    for order, expected in (
        ("", ("A", "b10", "b9")),
        ("?order=torchvision", ("A", "b10", "b9")),
        ("?order=timm", ("A", "b9", "b10")),
        (f"?order={tmp_path}/names.txt", ("b9", "more", "b10", "A")),
    ):
        images = open_images(source + order, "all")
        assert images.classes == class_names(source + order) == expected
        labels = {images.name(n).split("/")[-2]: images.read(n)[1] for n in range(3)}
        assert labels == {name: expected.index(name) for name in names}
    (tmp_path / "names.txt").write_text("b9\nA\n")
    refuses("that .*names.txt does not have: 'b10'", open_images, source + order, "all")
    refuses("order=tim: did you mean 'timm'", open_images, f"{source}?order=tim", "all")
    wrong = f"{source}?oder=timm"
    refuses(r"options are .*'\?order=ORDER'", open_images, wrong, "all", error=FileNotFoundError)


def test_imagenet_ids_are_names(tmp_path):
    """Some of ImageNet's folders are scored by a model of its thousand classes."""
    synsets = ImageNetInfo("imagenet-1k").label_names()
    names = [synsets[n] for n in (7, 300, 99)]
    write_folder(tmp_path / "some", names, 3)
    model = OutsideClassifier(classifier(1000), NAME)
    assert evaluator(tmp_path / "some").labels(model) == (7, 99, 300)
    assert "3 of the model's 1000 classes" in evaluator(tmp_path / "some").model_note(model)
    write_folder(tmp_path / "more", [*names, "other"], 4)
    refuses("4 classes and the model 1000", evaluator(tmp_path / "more").cells, model)


FACTS = {
    "mean": (0.1, 0.2, 0.3),
    "std": (0.5, 0.4, 0.6),
    "crop_pct": 0.6,
    "crop_mode": "squash",
    "interpolation": "bilinear",
    "input_size": (3, 96, 96),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `save_for_hf` writes, with all that a description says of images and classes; and the
    same model adapted."""
    root = tmp_path_factory.mktemp("timm")
    model = classifier(3, **FACTS)
    names = {"label_names": ["x", "y", "z"]}
    options = {"model_config": names, "safe_serialization": "both", "data_config": FACTS}
    timm.models.save_for_hf(model, root / "hub", **options)
    save_adapted(
        adapt(timm.create_model(f"local-dir:{root / 'hub'}", pretrained=True)), root / "adapted"
    )
    return root


@pytest.mark.parametrize(
    "word",
    [
        "{}/hub",
        NAME + "@{}/hub",
        NAME + "@{}/hub/model.safetensors",
        NAME + ".r160_in1k@{}/hub/pytorch_model.bin",
        "{}/adapted",
        NAME + "@{}/adapted/model.safetensors",
    ],
)
def test_description_beside_weights_counts(word, folder):
    """Preparation, names and logits are those of timm's own loader of the folder."""
    theirs = timm.create_model(f"local-dir:{folder / 'hub'}", pretrained=True).eval()
    model, trained = OUTSIDE.load(word.format(folder))
    assert trained
    data = resolve_model_data_config(theirs)
    assert {name: tuple(np.atleast_1d(data[name])) for name in FACTS} == {
        name: tuple(np.atleast_1d(value)) for name, value in FACTS.items()
    }
    assert model.data == data
    assert model.class_names == ("x", "y", "z")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 130, 3), np.uint8))
    pixels = create_transform(**data)(picture)
    assert torch.equal(model.pixels(picture, 96, 96), pixels)
    with torch.inference_mode():
        assert torch.allclose(model(pixels[None]), theirs(pixels[None]), atol=1e-5)


def test_names_of_timm_decide(folder, tmp_path):
    """A folder of other classes than the description's is an error, one of fewer is mapped."""
    model, _ = OUTSIDE.load(f"{folder}/hub")
    write_folder(tmp_path / "few", ["z", "y"], 2)
    assert evaluator(tmp_path / "few").labels(model) == (1, 2)
    write_folder(tmp_path / "other", ["x", "y", "w"], 3)
    refuses("does not have: 'w'", evaluator(tmp_path / "other").cells, model)


def test_timm_models_name_pictures(folder, tmp_path):
    """`predict` reads a picture as timm does."""
    path = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 130, 3), np.uint8)).save(path)
    model, _ = OUTSIDE.load(f"{folder}/hub")
    theirs = timm.create_model(f"local-dir:{folder / 'hub'}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(theirs))
    with torch.inference_mode():
        shares = theirs(transform(Image.open(path))[None])[0].softmax(-1)
    answers = dict(model.classify(str(path)))
    assert answers == pytest.approx(dict(zip("xyz", shares.tolist(), strict=True)), abs=1e-5)
    assert [*answers.values()] == sorted(answers.values(), reverse=True)
    refuses("size 100 does not divide", model.classify, str(path), size=100)
    path.write_bytes(b"nothing")
    refuses("a.png: unknown format", model.classify, str(path))


def test_other_weights_have_no_names(folder, tmp_path):
    """A plain file has the preparation of its name, and no names of classes."""
    save_file(classifier(3).state_dict(), tmp_path / "m.safetensors")
    model, _ = OUTSIDE.load(f"{NAME}@{tmp_path}/m.safetensors")
    assert model.class_names == ()
    assert model.data == resolve_model_data_config(timm.create_model(NAME))


def test_adapted_model_keeps_description(folder):
    """`load_adapted` too has the preparation of its folder."""
    theirs = timm.create_model(f"local-dir:{folder / 'hub'}")
    ours = load_adapted(folder / "adapted")
    assert resolve_model_data_config(ours) == resolve_model_data_config(theirs)
    assert ours.pretrained_cfg["label_names"] == ["x", "y", "z"]


def test_folders_need_no_prefix(folder, tmp_path):
    """Commands take a folder of timm's as it is; what no evaluator reads is an error."""
    for name in ("hub", "adapted"):
        named = find_model(str(folder / name))
        assert named.label == f"timm:{folder / name}"
        assert named.modality == "vision"
        assert isinstance(named.load({})[0], OutsideClassifier)
    (tmp_path / "config.json").write_text('{"model_type": "vit", "image_size": 32}')
    for word in (str(tmp_path), f"hf:{tmp_path}"):
        refuses("of the zoo or of timm", find_model, word, error=CommandError)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            NAME + "@{}/hub/modl.safetensors",
            "no file or folder .*; did you mean 'model.safetensors'",
        ),
        (NAME + "@{}/nowhere/m.bin", "no file or folder '.*/nowhere/m.bin'"),
        (NAME + "@", "behind '@'"),
        ("resnet18@{}/hub/model.safetensors", "is of test_vit, not resnet18: timm:test_vit@"),
        (NAME + "@{}", "no config.json of timm's"),
        (NAME + "@{}/zoo/model.safetensors", "of a model of the zoo, .*; name its folder"),
    ],
)
def test_wrong_checkpoint_is_said(word, message, folder):
    """A missing file, another architecture and folders that say nothing."""
    (folder / "zoo").mkdir(exist_ok=True)
    (folder / "zoo" / "config.json").write_text('{"modality": "vision"}')
    (folder / "zoo" / "model.safetensors").write_bytes(b"")
    refuses(message, OUTSIDE.load, word.format(folder))
