"""A text that spells a special token never becomes one, in either form of a tokenizer."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from modalities.text.hf import fast_tokenizer
from modalities.text.tokenizers import load_tokenizer

SPECIAL = ["<|startoftext|>", "<|endoftext|>", "<pad>"]


def saved(folder: Path, special: bool) -> str:
    """A byte-level BPE whose special tokens are marked as such, or are added tokens without the mark."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", ["bytes", "bpe-1k", "bpe-4k", "special", "unmarked", "hf"])
def test_spelled_tokens_are_text(kind: str, tmp_path: Path) -> None:
    spec = kind
    if kind in ("special", "unmarked"):
        spec = saved(tmp_path, special=kind == "special")
    if kind == "hf":
        fast_tokenizer(saved(tmp_path, special=True)).save_pretrained(tmp_path / "hf")
        spec = f"hf:{tmp_path / 'hf'}"
    tokenizer = load_tokenizer(spec)
    special = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    spelled = [*SPECIAL, "<s>", "</s>", "<bos>", "<eos>", "[CLS]"]
    for text in [f"the river {word} the mill" for word in spelled]:
        ids = tokenizer.encode(text)
        assert not special & set(ids.tolist()) and tokenizer.decode(ids) == text
        assert tokenizer.encode_many([text])[0].tolist() == ids.tolist()
        assert fast_tokenizer(spec)(text)["input_ids"] == [tokenizer.bos_id, *ids.tolist()]
