"""The DNA decoder and its copy expert: logits of targets alone, counts of a plain search, the
memory, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from modalities.dna import hf
from modalities.dna.config import DnaDataConfig
from modalities.dna.copying import LONGEST, CopyExpert, Index, counts_so_far
from modalities.dna.modality import build, next_token_loss
from modalities.dna.model import DnaConfig, DnaDecoder
from modalities.dna.tokenizers import encode, load_tokenizer, reverse_complement
from tests.dna.models import tiny
from tests.refusals import refuses
from zoo import create_model


@torch.no_grad()
def test_only_targets_can_be_predicted() -> None:
    model = tiny("kmer:3")
    tokenizer = load_tokenizer("kmer:3")
    logits = model(torch.tensor([[tokenizer.bos_id, 0, 1]]))
    assert logits[..., : tokenizer.num_targets].isfinite().all()
    assert (logits[..., tokenizer.num_targets :] == -torch.inf).all()
    assert model.read("ACGTAC")[0].tolist() == [
        tokenizer.bos_id,
        *tokenizer.encode(encode("ACGTAC")).ids,
    ]
    written = model.generate([[tokenizer.bos_id]], max_new_tokens=40, temperature=5.0, seed=0)[0]
    assert len(written) == 40
    assert max(written) < tokenizer.num_targets


def test_configurations_that_cannot_be() -> None:
    kmers = load_tokenizer("kmer:2")
    sizes = {"vocab_size": kmers.vocab_size, "num_targets": kmers.num_targets}
    assert DnaConfig(tokenizer="kmer:2", **sizes).tokenizer == "kmer:2"
    for options, message in (
        ({"strands": "two"}, "'one' or 'both'"),
        ({"num_targets": 9}, "num_targets 9"),
        (
            {"tokenizer": "kmer:6"},
            r"tokenizer 'kmer:6' has 4096 targets in \d+ ids; the model has num_targets 4, ",
        ),
        ({"tokenizer": "bases", **sizes}, "weights are of one tokenizer"),
    ):
        refuses(message, DnaConfig, **options)
    refuses(
        "evaluate with --strands both", build, "dna_goat_tiny", {"strands": "both"}, DnaDataConfig()
    )


ORDERS = [1, 3, 5, 24]
BOS = load_tokenizer("bases").bos_id


def repetitive(rows: int = 3, length: int = 120, seed: int = 0) -> np.ndarray:
    """Codes with direct and inverted repeats, a start token and an unknown base."""
    codes = np.random.default_rng(seed).integers(0, 4, (rows, length))
    half = length // 2
    codes[:, half : half + 25] = codes[:, 5:30]
    codes[:, -30:] = 3 - codes[:, 5:35][:, ::-1]
    codes[:, 0], codes[0, 20] = BOS, 4
    return codes


def words(codes: np.ndarray, size: int) -> list[bytes]:
    """Words of known bases on both strands, as they are written."""
    known = [
        word for at in range(len(codes) - size + 1) if ((word := codes[at : at + size]) < 4).all()
    ]
    return [
        w.astype(codes.dtype).tobytes() for word in known for w in (word, reverse_complement(word))
    ]


def plain(before: list[np.ndarray], codes: np.ndarray, order: int, place: int) -> list[int]:
    """How often each base followed the context that ends at a place, in sequences."""
    context = codes[place + 1 - order : place + 1]
    if place + 1 < order or (context > 3).any():
        return [0] * 4
    every = [word for sequence in before for word in words(sequence, order + 1)]
    return [every.count(np.append(context, x).astype(codes.dtype).tobytes()) for x in range(4)]


@pytest.mark.parametrize("order", ORDERS[::2])
def test_counts_equal_plain_search(order: int) -> None:
    """Counts are those of a plain search."""
    codes = repetitive(2)
    memory = repetitive(2, 70, seed=1)
    memory[0, 20:60] = 3 - codes[1, 50:90][::-1]
    tokens = torch.from_numpy(codes)
    row, recent = counts_so_far(tokens, [order], 70)
    ends = np.full((2, 1), 4)
    index = Index(torch.from_numpy(np.concatenate([memory, ends], 1).ravel())).counts(
        tokens, [order]
    )
    for n, sequence in enumerate(codes):
        for place in range(0, 120, 3):
            assert row[n, place, 0].tolist() == plain(
                [sequence[: place + 1]], sequence, order, place
            )
            ends = sequence[max(0, place + 1 - 70 - order) : place + 1]  # of words in the last 70
            assert recent[n, place, 0].tolist() == plain([ends], sequence, order, place)
            assert index[n, place, 0].tolist() == plain(list(memory), sequence, order, place)
    assert row.sum() > recent.sum() > 0
    assert index.sum() > 0
    assert torch.equal(counts_so_far(tokens, [order], 120)[1], row)


def model(name: str = "dna_goat_tiny", **overrides) -> DnaDecoder:
    """A small decoder whose gates are open, and whose memory holds something."""
    torch.manual_seed(0)
    sizes = dict(
        num_layers=2,
        dim=32,
        num_heads=2,
        hidden_dim=32,
        train_context=40,
        copy_orders=[3, 6],
        copy_memory=999,
    )
    decoder = create_model(name, **sizes | overrides).double()
    torch.nn.init.normal_(decoder.copy_expert.gate_out.weight)
    torch.nn.init.normal_(decoder.copy_expert.gate_out.bias)
    rows = torch.from_numpy(repetitive(2, 100, seed=3))
    decoder.copy_expert.remember(rows, torch.zeros_like(rows))
    return decoder.eval()


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual[..., :4], expected[..., :4], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["dna_rope_tiny", "dna_cable_tiny", "dna_ggd_ssmax_tiny"])
@torch.no_grad()
def test_prefix_and_cache(name: str) -> None:
    """No logit depends on what follows, and decoding in pieces, after a crop and with rows chosen
    again, equals prefill."""
    decoder = model(name, train_context=120)
    tokens = torch.from_numpy(repetitive())
    decoder.copy_expert.recent = 40
    full = decoder(tokens)
    for cut in (1, 37, 80):
        close(decoder(tokens[:, :cut]), full[:, :cut])
    cache = decoder.new_cache()
    pieces = tokens[:, :100].split([60, 1, 1, 38], 1)
    close(torch.cat([decoder(piece, cache=cache) for piece in pieces], 1), full[:, :100])
    cache.crop(70)
    cache.select(torch.tensor([2, 0]))
    close(decoder(tokens[[2, 0], 70:], cache=cache), full[[2, 0], 70:])
    without = (
        DnaDecoder(DnaConfig(**{**vars(decoder.config), "copy_orders": [], "copy_memory": 0}))
        .double()
        .eval()
    )
    without.load_state_dict(
        {k: v for k, v in decoder.state_dict().items() if not k.startswith("copy_expert")}
    )
    assert (without(tokens)[..., :4] - full[..., :4]).abs().amax() > 0.1  # the expert speaks


@torch.no_grad()
def test_documents_stay_apart() -> None:
    """Documents and padding know nothing of one another."""
    decoder = model()
    tokens = torch.from_numpy(repetitive())
    segments = torch.zeros_like(tokens)
    segments[:, 45:] = 1
    close(decoder(tokens, segments=segments)[:, 45:], decoder(tokens[:, 45:]))
    counts = counts_so_far(tokens, ORDERS, 30, segments), counts_so_far(tokens[:, 45:], ORDERS, 30)
    assert all(torch.equal(both[:, 45:], alone) for both, alone in zip(*counts, strict=True))
    rows = [tokens[0].tolist(), tokens[1, :77].tolist()]
    assert decoder.generate(rows, max_new_tokens=9) == [
        decoder.generate([row], max_new_tokens=9)[0] for row in rows
    ]
    assert len("".join(decoder.stream_text("ACGTACGT", max_new_tokens=12))) == 12


def test_memory_is_training_data() -> None:
    """The memory is what training read."""
    decoder = model(copy_memory=600)
    expert = decoder.copy_expert
    tokens = torch.from_numpy(repetitive(2, 50, seed=7))
    batch = {"tokens": tokens, "segments": torch.zeros_like(tokens)}
    before = int(expert.held)
    next_token_loss(decoder, batch)
    assert int(expert.held) == before  # evaluation writes nothing
    decoder.train()
    loss, _ = next_token_loss(decoder, batch)
    loss.backward()
    assert decoder.copy_expert.gate_out.weight.grad.abs().sum() > 0
    assert int(expert.held) == before + 34  # 2 rows of 50 digits, three to a byte
    decoder.eval()
    assert (
        expert.index().counts(tokens, [12])[:, 11:-1].sum() >= 2 * 38 - 13
    )  # but for where a base is unknown
    for _ in range(9):
        expert.remember(tokens, batch["segments"])
    assert int(expert.held) + 34 > len(expert.memory) == 200  # full: what does not fit is not kept
    expert.remember(torch.full((1, 20), 2), torch.full((1, 20), -1))
    assert not expert.index().counts(torch.full((1, 20), 2), [12]).any()  # padding is no base


def test_memory_grows_in_training() -> None:
    """Training sees the memory in steps and evaluation all of it."""
    expert = CopyExpert(4, [2], 3000, 99).train()
    seen = set()
    assert expert.index() is None
    for n in range(1, 60):
        expert.remember(torch.full((1, 29), n % 4), torch.zeros(1, 29))
        assert int(expert.held) == 10 * n
        seen.add(len(expert.index().words))
    assert len(seen) < 40
    assert len(expert.eval().index().words) > max(seen)


def test_saving_loading_and_transformers(tmp_path: Path) -> None:
    ours = model().float()
    tokens = torch.from_numpy(repetitive())
    stale = model().float()
    stale(tokens)
    stale.copy_expert.memory.zero_()
    stale.load_state_dict(ours.state_dict())  # an index of what was there before would be wrong
    assert torch.equal(stale(tokens), ours(tokens))
    hf.wrap(ours).save_pretrained(tmp_path)
    again = hf.PriorzooDnaForCausalLM.from_pretrained(tmp_path).eval()
    close(again(tokens).logits, ours(tokens))
    written = again.generate(
        tokens[:1, :60], max_new_tokens=8, do_sample=False, pad_token_id=BOS + 1
    )[0, 60:].tolist()
    assert written == ours.generate(tokens[:1, :60], max_new_tokens=8)[0]


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        (
            {"copy_orders": [12, 11]},
            r"copy_orders=\[12, 11\]: expected ascending numbers of bases from 1 to 24",
        ),
        ({"copy_orders": [LONGEST + 1]}, r"copy_orders=\[25\]: expected ascending .* to 24"),
        ({"copy_orders": [3], "tokenizer": "kmer:3"}, r"copies are of single bases, 'bases'"),
        ({"copy_memory": 9}, r"copy_memory=9 without copy_orders, such as \[11"),
    ):
        refuses(message, DnaConfig, **options)
    refuses(
        "pass ids of tokens, not their embeddings",
        model(),
        torch.zeros(1, 5, 32, dtype=torch.float64),
    )
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="by one process, not by 2: train on one, or set it to 0"):
        CopyExpert(4, [2], 30, 9).remember(torch.zeros(1, 9, dtype=torch.int64), torch.zeros(1, 9))
