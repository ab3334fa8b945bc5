"""Tars: their own numbers are checked before they are believed, and what is cut short is an error."""

from __future__ import annotations

import json
import tarfile

import pytest

from modalities.vision.shards import open_shards, scan
from tests.hostile.memory import Peak
from tests.vision.image_files import encoded, opened, solid, write_tar

# ---- tar ----


def shard(folder, count=3):
    return write_tar(folder / "a.tar", [(f"{n}", {"png": encoded(solid(n)), "cls": b"0"}) for n in range(count)])


def stream(path, count=3):
    """Every sample of a shard that an index says has `count` of them."""
    index = path.with_name("wids.json")
    index.write_text(json.dumps({"shardlist": [{"url": path.name, "nsamples": count}]}))
    shards = open_shards("x", f"{path}?index={index}")
    return list(shards.read(0, 0, len(shards)))


def test_a_tar_ends_in_its_mark(tmp_path):
    """Cut anywhere, on a header's bounds too, it is an error and never fewer samples."""
    path = shard(tmp_path)
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        end = max(member.offset_data + -(-member.size // 512) * 512 for member in tar)
    assert len(scan(path)) == len(stream(path)) == 3
    for size in {*range(0, end + 1024, 256), end + 512, end + 1023}:
        path.write_bytes(whole[:size])
        for read in (scan, stream, lambda path: opened(f"wds:{path}")):
            with pytest.raises(ValueError, match=r"a\.tar"):
                read(path)
    path.write_bytes(whole[: end + 1024])
    assert len(scan(path)) == len(stream(path)) == 3
    path.write_bytes(whole[:512] + b"x" * 512 + whole[1024:])
    damaged = bytearray(whole)
    damaged[1024 + 100] ^= 1  # within a header
    path.write_bytes(damaged)
    for read in (scan, stream):
        with pytest.raises(ValueError, match="damaged header"):
            read(path)


def test_sparse_members_and_claimed_sizes(tmp_path):
    def member(kind=tarfile.REGTYPE, size=0, pax=None, data=b""):
        path = tmp_path / "a.tar"
        info = tarfile.TarInfo("0.png")
        info.type, info.size, info.pax_headers = kind, size, pax or {}
        path.write_bytes(info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) + data + bytes(1024))
        return path

    sparse = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.map": "0,1",
        "GNU.sparse.size": str(50 << 30),
    }
    for path, message in (
        (lambda: member(tarfile.GNUTYPE_SPARSE), "sparse file"),
        (lambda: member(pax=sparse, size=512, data=bytes(512)), "sparse file"),
        (lambda: member(size=50 << 30), "53,687,091,200 bytes; expected 0 to 1,073,741,824"),
        (lambda: member(size=-512), "expected 0 to 1,073,741,824|negative"),
        (lambda: member(size=1 << 20), r"end"),
        (lambda: member(tarfile.XHDTYPE, size=1 << 30), "expected 0 to 1,048,576"),
        (lambda: member(tarfile.GNUTYPE_LONGNAME, size=1 << 30), "expected 0 to 1,048,576"),
        (lambda: member(pax={"size": str(50 << 30)}), "53,687,091,200 bytes"),
        (lambda: member(pax={"size": "-512"}), "-512 bytes"),
    ):
        try:
            made = path()
        except ValueError:  # tarfile does not write it
            continue
        for read in (scan, stream):
            with Peak() as peak, pytest.raises(ValueError, match=message):
                read(made)
            assert peak.bytes < 4 * 2**20


@pytest.mark.parametrize(
    "index",
    [
        [],
        3,
        {"shards": 3},
        {"shards": [3]},
        {"shards": [{}]},
        {"shards": [{"file": 3, "samples": 3}]},
        *({"shards": [{"file": "a.tar", "samples": samples}]} for samples in (-1, 1.5, "3", True, None, 2**60)),
        {"shards": [{"file": "a.tar", "samples": 3, "sha256": 3}]},
        {"shards": [{"file": "a.tar", "samples": 3}], "classes": "ab"},
        {"shardlist": [{"url": "a.tar"}]},
        {"splits": {"train": {"filenames": ["a.tar"], "shard_lengths": [3, 4]}}},
        {"splits": 3},
    ],
)
def test_an_index_of_wrong_types(index, tmp_path):
    shard(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json") as error:
        open_shards("x", str(tmp_path))
    assert "\n" not in str(error.value)
