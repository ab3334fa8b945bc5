"""Class folders: no hidden name is a class, no picture is read twice, and no copy is on both sides of the split."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from modalities.vision.sources import class_names, open_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for n in range(60):
        place = tmp_path / "images" / ("cat" if n % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (4 * n, 255 - 4 * n, n)).save(place / f"{n}.png")
    return tmp_path / "images"


def pictures(folder: Path, split: str = "all") -> list[str]:
    images = open_images(f"folder:{folder}", split)
    assert images.classes == class_names(f"folder:{folder}") == ("cat", "dog")
    return [images.name(n) for n in range(len(images))]


def test_hidden_names_and_links_are_left_out(folder: Path) -> None:
    clean = pictures(folder)
    for place in (folder, folder / "cat"):
        shutil.copytree(folder / "dog", place / ".ipynb_checkpoints")
    shutil.copy(folder / "dog/0.png", folder / "dog/._0.png")
    (folder / "dog/up").symlink_to(folder)
    (folder / "dog/again.png").symlink_to(folder / "dog/0.png")
    (folder / "cat/self").symlink_to(".")
    assert pictures(folder) == clean
    problems = open_images(f"folder:{folder}", "all").problems
    reasons = [reason for reason, _ in problems]
    assert sorted(reasons) == ["linked folder in a class", "linked folder in a class", "seen twice, by a link"]


def test_linked_folders_are_read(folder: Path) -> None:
    shutil.move(folder / "cat", folder.parent / "store")
    (folder / "cat").symlink_to(folder.parent / "store")
    assert len(pictures(folder)) == 60


def test_copies_are_on_one_side(folder: Path) -> None:
    for path in sorted((folder / "cat").iterdir()):
        shutil.copy(path, path.with_name(f"{path.stem}-copy.png"))
    train, heldout = ({Path(p).read_bytes() for p in pictures(folder, split)} for split in ("train", "heldout"))
    assert heldout and not train & heldout
