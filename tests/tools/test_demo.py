"""What the demo and the zoo-training tool say about measured files."""

from __future__ import annotations

from modalities.evaluation import ModelResult
from tools import demo, train_zoo
from zoo import list_models


def passkey(method: str, score: float) -> ModelResult:
    rows = [{"length": n, "teacher_forced": s, "free_generation": s} for n, s in ((128, 1.0), (4096, score))]
    return ModelResult(f"text_{method}_tiny.passkey", 128, rows, method=method)


def test_the_demo_says_in_a_sentence_what_was_measured() -> None:
    others = (passkey("rope_ssmax", 0.0), passkey("alibi", 0.25))
    mine = ModelResult(demo.RECIPE, 128, passkey("ggd_ssmax", 0.95).rows, method="ggd_ssmax")
    first = demo.summary([*others, mine]).splitlines()[0]
    assert "95% of trials at 4,096 tokens, 32 times" in first
    assert "0.00 for rope_ssmax and 0.25 for alibi" in first


def test_the_demo_compares_with_weights_that_ship() -> None:
    assert set(demo.BASELINES) <= set(list_models(pretrained=True))
    assert {name.partition(".")[2] for name in demo.BASELINES} == {train_zoo.FAMILIES["text"].tag}


def test_cards_come_from_the_measured_files(monkeypatch) -> None:
    text, label = train_zoo.FAMILIES["text"], passkey("ggd", 0.5).label
    bits = [{"length": n, "nll": 1.25, "bits_per_byte": 1.8} for n in (128, 4096)]
    stored = {"passkey": [passkey("ggd", 0.5)], "perplexity": [ModelResult(label, 128, bits, method="ggd")]}
    monkeypatch.setattr(train_zoo, "load_results", lambda evaluator, out: stored[evaluator.name])
    table = train_zoo.measured_tables(text)[label]
    expected = {"length": 4096, "teacher_forced": 0.5, "free_generation": 0.5, "nll": 1.25, "bits_per_byte": 1.8}
    assert table[1] == expected
    card = train_zoo.card(text, label, {"seed": 0, "measured": table})
    assert card.startswith(f"# {label}\n") and "| 4096 | 0.5 | 0.5 | 1.25 | 1.8 |" in card
    assert "- **seed**: 0" in card
