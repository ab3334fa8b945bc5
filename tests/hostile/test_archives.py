"""Tars and 2bit files: their own numbers are checked before they are believed, and what is cut short is an error."""

from __future__ import annotations

import json
import struct
import tarfile

import pytest

from modalities.dna.formats import read_codes
from modalities.vision.shards import open_shards, scan
from tests.dna.test_genome import two_bit
from tests.hostile.memory import Peak
from tests.vision.image_files import encoded, opened, solid, write_tar

# ---- 2bit ----


def number(*values):
    return struct.pack(f"<{len(values)}I", *values)


ONE = number(0x1A412743, 0, 1, 0) + b"\x01a" + number(22)  # header and index of one sequence


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (number(0x1A412743, 1, 0, 0), "version 1; expected 0"),
        (number(0x1A412743, 0, 2**31, 0), "16 bytes cannot hold the index of 2,147,483,648 sequences"),
        (ONE[:-4] + number(2**32 - 1) + bytes(99), "offset 4,294,967,295; expected 16 to"),
        (ONE + number(4 * 10**9, 0, 0, 0), "dnaSize 4,000,000,000; the file's 38 bytes have room for at most 152"),
        (ONE + number(8, 2**31, 0, 0), "nBlockCount 2,147,483,648; the file has room for at most 1"),
        (ONE + number(8, 0, 2**31) + bytes(9), "maskBlockCount 2,147,483,648; the file has room for at most 1"),
        (ONE + number(8, 1, 4, 2**32 - 1, 0, 0) + bytes(2), "nBlock 1 is 4 to 4,294,967,299; dnaSize is 8"),
        (ONE + number(8, 1, 2**32 - 1, 1, 0, 0) + bytes(2), "nBlock 1 is 4,294,967,295 to 4,294,967,296"),
        (ONE + number(8, 0, 1, 7, 2, 0) + bytes(2), "maskBlock 1 is 7 to 9; dnaSize is 8"),
        (ONE + number(8, 2, 4, 2, 2, 2, 0, 0) + bytes(2), "nBlockStarts are not sorted"),
        (ONE + number(8, 0, 0, 7) + bytes(2), "reserved field 7; expected 0"),
        (ONE + number(8, 0, 0, 0) + bytes(1), "truncated: dnaSize 8 from byte 38 on; the file has 39"),
    ],
)
def test_numbers_of_a_2bit_file(content, message, tmp_path):
    path = tmp_path / "a.2bit"
    path.write_bytes(content)
    with Peak() as peak, pytest.raises(ValueError, match=message) as error:
        list(read_codes(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value) and peak.bytes < 2**20


def test_sequences_of_a_2bit_file_share_no_bytes(tmp_path):
    """A record read for a hundred names would make a file of any size out of a small one."""
    record = two_bit({"a": "ACGT" * 400})[16 + 6 :]
    index = b"".join(b"\x02%02d" % n + number(16 + 7 * 100) for n in range(100))
    (tmp_path / "a.2bit").write_bytes(number(0x1A412743, 0, 100, 0) + index + record)
    with pytest.raises(ValueError, match=r"sequence \d+ .*: dnaSize 1,600; the file's"):
        list(read_codes(tmp_path / "a.2bit"))


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
