"""Tokenizers: round trips, special ids, and errors that name the nearest valid choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from modalities.text.hf import fast_tokenizer
from modalities.text.tokenizers import load_tokenizer
from tests.refusals import refuses

TEXT = "In 1903 the Senate met; 48213 dollars — naïve, 日本.\n  Two  spaces.\t"


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """A small byte-level BPE in GPT-2's file layout, whose merges join digits ("190", "482"…)."""
    folder = tmp_path_factory.mktemp("bpe")
    model = pytest.importorskip("tokenizers").ByteLevelBPETokenizer()
    model.train_from_iterator(
        [TEXT] * 4, vocab_size=330, min_frequency=1, special_tokens=["<|endoftext|>"]
    )
    model.save_model(str(folder))
    model.save(str(folder / "tokenizer.json"))
    return folder


def test_bytes():
    tokenizer = load_tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (
        264,
        256,
        257,
        258,
    )
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int64
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode([256, 72, 105, 257, 258]) == "Hi"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
    assert tokenizer.encode("").shape == (0,)


@pytest.mark.parametrize(("name", "entries"), [("bpe-1k", 1024), ("bpe-4k", 4096)])
def test_shipped_vocabularies(name, entries):
    pytest.importorskip("tokenizers")
    tokenizer = load_tokenizer(name)
    special = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    assert (tokenizer.name, tokenizer.vocab_size, special) == (name, entries, (0, 1, 2))
    every_byte = "".join(map(chr, range(0x250))) + "日本 😀 \x00 <|endoftext|> <|pad|>"
    ids = tokenizer.encode(every_byte + TEXT)
    # no special token is read out of text
    assert tokenizer.decode(ids) == every_byte + TEXT
    assert ids.min() >= 3
    assert [tokenizer.decode([i]) for i in tokenizer.encode("48213")] == list("48213")
    assert tokenizer.encode("The")[0] != tokenizer.encode(" The")[0]  # no space is added in front
    assert len(tokenizer.encode("the people of the United States")) < 12


def test_bpe_from_folder_and_json(bpe_folder):
    """Bpe from a folder and from json."""
    folder = load_tokenizer(f"gpt2:{bpe_folder}")
    single = load_tokenizer(str(bpe_folder / "tokenizer.json"))
    assert folder.decode(folder.encode(TEXT)) == TEXT
    assert np.array_equal(folder.encode(TEXT), single.encode(TEXT))
    assert np.array_equal(folder.encode_many(["a", TEXT])[1], folder.encode(TEXT))
    assert folder.bos_id == folder.eos_id == single.bos_id
    assert len(folder.encode(TEXT)) < len(TEXT.encode())


def test_special_tokens_can_be_named(bpe_folder, tmp_path):
    """Special tokens of a json can be named."""
    model = pytest.importorskip("tokenizers").Tokenizer.from_file(
        str(bpe_folder / "tokenizer.json")
    )
    model.add_special_tokens(["<s>", "</s>", "<pad>", "[GO]"])
    path = tmp_path / "mine.json"
    model.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id] == [
        model.token_to_id(t) for t in ("<s>", "</s>", "<pad>")
    ]
    assert load_tokenizer(f"{path}?bos=[GO]").bos_id == model.token_to_id("[GO]")
    refuses(r"bos.*'\[NO\]'", load_tokenizer, f"{path}?bos=[NO]")
    refuses(r"'boss'.*'bos'", load_tokenizer, f"{path}?boss=x")


def test_errors_name_what_is_valid(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for spec, error, message in (
        ("byte", ValueError, r"'byte'.* 'bytes'\?"),
        ("", ValueError, "''"),
        (
            f"gpt2:{tmp_path}",
            FileNotFoundError,
            r"encoder\.json.*merges\.txt.*fetch-data text gpt2",
        ),
        (f"{tmp_path}/tokeniser.json", FileNotFoundError, r"did you mean '.*/tokenizer\.json'"),
        (f"{tmp_path}/tokenizer.json", ValueError, r"tokenizer\.json"),
    ):
        refuses(message, load_tokenizer, spec, error=error)
    refuses(r"\b300\b.*\b263\b", load_tokenizer().decode, [300])


SPECIAL = ["<|startoftext|>", "<|endoftext|>", "<pad>"]


def saved(folder: Path, special: bool) -> str:
    """A byte-level BPE whose special tokens are marked as such, or are added tokens without the
    mark."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", ["bytes", "bpe-1k", "special", "unmarked", "hf"])
def test_spelled_tokens_are_text(kind: str, tmp_path: Path) -> None:
    """In either form of a tokenizer, which give the same ids."""
    spec = kind
    if kind in ("special", "unmarked"):
        spec = saved(tmp_path, special=kind == "special")
    if kind == "hf":
        fast_tokenizer(saved(tmp_path, special=True)).save_pretrained(tmp_path / "hf")
        spec = f"hf:{tmp_path / 'hf'}"
    tokenizer = load_tokenizer(spec)
    special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    spelled = [*SPECIAL, "<s>", "</s>", "<bos>", "<eos>", "[CLS]"]
    for text in [*(f"the river {word} the mill" for word in spelled), TEXT]:
        ids = tokenizer.encode(text)
        assert not special & set(ids.tolist())
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode_many([text])[0].tolist() == ids.tolist()
        assert fast_tokenizer(spec)(text)["input_ids"] == [tokenizer.bos_id, *ids.tolist()]
