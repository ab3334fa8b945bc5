"""What the demo and the zoo-training tool say about measured files."""

from __future__ import annotations

import json

from tools import demo, train_zoo
from zoo import list_models


def passkey_file(*models: tuple[str, float]) -> dict:
    rows = lambda score: [  # noqa: E731
        {"length": 128, "teacher_forced": 1.0, "free_generation": 1.0},
        {"length": 4096, "teacher_forced": score, "free_generation": score},
    ]
    return {
        "models": [
            {"label": f"text_{m}_tiny.passkey", "method": m, "train_context": 128, "rows": rows(score)}
            for m, score in models
        ]
    }


def test_the_demo_says_in_a_sentence_what_was_measured() -> None:
    said = demo.summary(passkey_file(("ggd_ssmax", 0.95), ("rope_ssmax", 0.0), ("alibi", 0.25)))
    first = said.splitlines()[0]
    assert "95% of trials at 4,096 tokens, 32 times" in first
    assert "0.00 for rope_ssmax and 0.25 for alibi" in first
    assert "Next:" in said


def test_the_demo_compares_with_weights_that_ship() -> None:
    assert set(demo.BASELINES) <= set(list_models(pretrained=True))
    assert {name.partition(".")[2] for name in demo.BASELINES} == {train_zoo.FAMILIES["text"].tag}


def test_cards_come_from_the_measured_files(tmp_path, monkeypatch) -> None:
    passkey = passkey_file(("ggd", 0.5))
    perplexity = {
        "models": [
            {
                "label": "text_ggd_tiny.passkey",
                "method": "ggd",
                "rows": [{"length": n, "nll": 1.25, "bits_per_byte": 1.8} for n in (128, 4096)],
            },
        ]
    }
    for name, content in {"passkey": passkey, "perplexity": perplexity}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(train_zoo.Family, "measured", tmp_path)
    text = train_zoo.FAMILIES["text"]
    table = train_zoo.measured_tables(text)["text_ggd_tiny.passkey"]
    expected = {"length": 4096, "teacher_forced": 0.5, "free_generation": 0.5, "nll": 1.25, "bits_per_byte": 1.8}
    assert table[1] == expected
    card = train_zoo.card(text, "text_ggd_tiny.passkey", {"seed": 0, "measured": table})
    assert card.startswith("# text_ggd_tiny.passkey\n") and "| 4096 | 0.5 | 0.5 | 1.25 | 1.8 |" in card
    assert "- **seed**: 0" in card
