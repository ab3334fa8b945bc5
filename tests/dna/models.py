"""Models of DNA for tests: small random decoders, and scorers whose costs are known."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, trainers
from transformers import PreTrainedTokenizerFast

from modalities.dna.genome import Genome, open_genome
from modalities.dna.model import DnaConfig, DnaDecoder
from modalities.dna.scoring import BaselineConfig, Scores, WindowScorer
from modalities.dna.sources import find_source
from modalities.dna.tokenizers import decode, load_tokenizer

SHAPE = dict(dim=32, num_layers=1, num_heads=2, hidden_dim=48, train_context=16, position="alibi")


def tiny(tokenizer: str = "bases", **options) -> DnaDecoder:
    """A decoder far from uniform."""
    torch.manual_seed(2)
    vocabulary = load_tokenizer(tokenizer)
    sizes = dict(
        vocab_size=vocabulary.vocab_size, num_targets=vocabulary.num_targets, tokenizer=tokenizer
    )
    model = DnaDecoder(DnaConfig(**SHAPE | sizes | options)).eval()
    with torch.no_grad():
        model.embedding.weight *= 4
    return model


class Composed(WindowScorer):
    """A base costs two bits, wherever it stands."""

    def __init__(self, train_context=16) -> None:
        super().__init__()
        self.config = BaselineConfig("composed", train_context=train_context)

    def score(self, windows: np.ndarray) -> Scores:
        known = torch.from_numpy(windows < 4)
        return Scores(2 * math.log(2) * known.double(), known.long(), 0.25 * known.double())


def letters(count: int, seed: int = 0) -> str:
    return decode(
        np.random.default_rng(seed).choice(4, count, p=(0.4, 0.1, 0.2, 0.3)).astype(np.uint8)
    )


def bpe_tokenizer(folder: Path) -> str:
    """The spec of a BPE tokenizer over random bases, saved in `folder` as transformers saves it;
    special tokens come first."""
    backend = Tokenizer(models.BPE(unk_token="[UNK]"))
    rng = np.random.default_rng(3)
    words = ["".join(rng.choice([*"ACGT"], 300)) for _ in range(30)]
    special = {"special_tokens": ["[UNK]", "[CLS]", "[PAD]"], "initial_alphabet": [*"ACGT"]}
    backend.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=60, show_progress=False, **special)
    )
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "bos_token": "[CLS]", "pad_token": "[PAD]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return f"hf:{folder}"


def write_fasta(folder: Path, **contigs: str) -> str:
    """g.fa with contigs by name, whose headers have words behind the names; returns its path."""
    (folder / "g.fa").write_text(
        "".join(f">{name} described\n{text}\n" for name, text in contigs.items())
    )
    return str(folder / "g.fa")


def split_source(folder: Path, train: str, /, **contigs: str) -> dict[str, str]:
    """Settings of a FASTA of contigs, split by a BED file: the one called `train` for training, the
    others held out."""
    rows = (
        f"{n}\t0\t{len(text)}\t{'train' if n == train else 'heldout'}\n"
        for n, text in contigs.items()
    )
    (folder / "g.bed").write_text("".join(rows))
    return {"source": write_fasta(folder, **contigs), "split": str(folder / "g.bed")}


def genome_of(**sequences: str) -> Genome:
    """A genome of contigs by name."""
    with tempfile.TemporaryDirectory() as folder:
        return open_genome(find_source(write_fasta(Path(folder), **sequences)))
