"""Sampling: determinism, filters, streaming, and what is refused."""

from __future__ import annotations

import pytest
import torch

from modalities.decoder import generation
from modalities.decoder.generation import Sampling, stream_text
from modalities.text.tokenizers import load_tokenizer
from tests.refusals import refuses
from zoo import create_model


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return create_model(
        "text_ggd_ssmax_tiny", num_layers=1, vocab_size=264, tokenizer="bytes"
    ).eval()


def test_greedy_equals_full_forward(model) -> None:
    """Greedy is the argmax of the full forward."""
    row = [256, 10, 20]
    for token in model.generate([row], max_new_tokens=6)[0]:
        assert token == model(torch.tensor([row]))[0, -1].argmax().item()
        row.append(token)


def test_filters_keep_what_they_say() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]]).expand(4000, -1)
    generator = torch.Generator().manual_seed(0)
    # Probabilities .636 .234 .086 .032 .012: the first three are the fewest that reach 0.9.
    for options, tokens in (
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.9}, {0, 1, 2}),
        ({"top_p": 0.1}, {0}),
    ):
        assert set(Sampling(1.0, **options).draw(logits, generator).tolist()) == tokens
    assert (Sampling(1.0).draw(logits, generator) == 0).float().mean().item() == pytest.approx(
        0.636, abs=0.04
    )


def test_end_tokens(model) -> None:
    free = model.generate([[256]], max_new_tokens=12)[0]
    assert (
        model.generate([[256]], max_new_tokens=12, eos_id=free[3])[0] == free[: free.index(free[3])]
    )


def test_rows_draw_apart_and_again(model) -> None:
    sampled = model.generate([[5]] * 12, max_new_tokens=48, temperature=1.0, seed=3)
    assert len({tuple(row) for row in sampled}) == 12
    assert sampled == model.generate([[5]] * 12, max_new_tokens=48, temperature=1.0, seed=3)


@pytest.mark.parametrize("spec", ["bytes", "bpe-1k"])
def test_text_streams_in_whole_characters(spec, monkeypatch) -> None:
    if spec != "bytes":
        pytest.importorskip("tokenizers")
    tokenizer = load_tokenizer(spec)
    text = "naïve — 日本 😀!\n"
    broken = [
        tokenizer.encode("é")[0],
        *tokenizer.encode("x😀")[:-1],
    ]  # ends in the middle of a character
    ids = [*tokenizer.encode(text), *broken]
    monkeypatch.setattr(
        generation,
        "stream",
        lambda *_, **__: (torch.tensor([i]) for i in [*ids, tokenizer.eos_id, 9]),
    )
    pieces = list(
        stream_text(None, [1], tokenizer.decode, max_new_tokens=99, eos_id=tokenizer.eos_id)
    )
    assert "".join(pieces) == tokenizer.decode(ids) == text + "\ufffdx\ufffd"
    assert len(pieces) > 12
    assert "\ufffd" not in "".join(pieces)[: len(text)]
    assert all("\ufffd" not in piece for piece in pieces[: len(tokenizer.encode(text))])


def test_stream_equals_generation(model) -> None:
    """A model streams what it generates."""
    tokenizer = load_tokenizer("bytes")
    options = dict(max_new_tokens=20, temperature=1.0, top_k=80, seed=3)
    ids = model.generate([[256, *b"The"]], eos_id=tokenizer.eos_id, **options)[0]
    assert "".join(model.stream_text("The", **options)) == tokenizer.decode(ids)
    dna = create_model("dna_ggd_tiny", num_layers=1).eval()
    written = "".join(dna.stream_text("ACGTN", **options))
    assert len(written) == 20
    assert set(written) <= set("ACGT")
    refuses("letter 1", dna.stream_text, "AE")


def test_bad_requests_are_named(model) -> None:
    for options, message in (
        ({"prompts": [[]]}, "bos_id"),
        ({"prompts": []}, "bos_id"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": 1e-300}, "temperature.*1e-6, got 1e-300"),
        ({"seed": 2**63}, "seed must be from 0.*9223372036854775808"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 1.5}, r"top_p.*1\.5"),
    ):
        refuses(message, model.generate, **{"prompts": [[1]], "max_new_tokens": 2, **options})
