"""Evaluators against direct computation, and against models whose answers are known beforehand."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from modalities.decoder.scoring import force_and_write, position_buckets
from modalities.evaluation import LengthSettings
from modalities.text.data import open_heldout
from modalities.text.evaluators import EVALUATORS
from modalities.text.evaluators.niah import NeedleGrid
from modalities.text.evaluators.passkey import Passkey
from modalities.text.evaluators.perplexity import Perplexity
from modalities.text.evaluators.ruler import RULER_TASKS, Ruler, fraction_found, make_ruler_sample
from modalities.text.model import CausalLM, TextConfig
from modalities.text.tokenizers import load_tokenizer
from zoo import KVCache


class KnownAnswer(nn.Module):
    """Writes ``answer(prompt)`` byte by byte after the prompt; the prompt is what a fresh cache reads first.

    With ``answer`` None all logits are 0.
    """

    def __init__(self, answer=None, vocab_size=264):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 1)
        self.config = SimpleNamespace(tokenizer="bytes", train_context=128, vocab_size=vocab_size)
        self.answer = answer

    def new_cache(self, capacity=0):
        cache = KVCache(0, capacity=capacity)
        cache.targets, cache.prompt = None, 0
        return cache

    def forward_features(self, tokens, *, segments=None, cache=None):
        logits = torch.zeros(*tokens.shape, self.config.vocab_size)
        if self.answer is None:
            return logits
        if cache.targets is None:
            texts = [bytes(t for t in row if t < 256).decode() for row in tokens.tolist()]
            cache.targets = [self.answer(text).encode() + b"." * 200 for text in texts]
            cache.prompt = tokens.shape[1]
        for t in range(tokens.shape[1]):
            written = cache.length + t + 1 - cache.prompt
            if written >= 0:
                for row, target in enumerate(cache.targets):
                    logits[row, t, target[written]] = 5.0
        cache.length += tokens.shape[1]
        return logits

    def forward_head(self, features):
        return features


def tiny(position="ggd", **options):
    torch.manual_seed(1)
    config = TextConfig(
        dim=32, num_layers=2, num_heads=2, hidden_dim=48, train_context=32, position=position, **options
    )
    return CausalLM(config).eval()


def made(kind, trained_on=None, **settings):
    return kind(LengthSettings(**settings), trained_on)


def summary(kind, model, **settings):
    evaluator = made(kind, **settings)
    return {row["length"]: row for row in evaluator.rows(dict(evaluator.run(model)))}


def documents():
    return open_heldout("sotu-excerpt", "bytes").items


def passkey_of(prompt):
    found = re.search(r"The pass key is (\d{5})\.", prompt)
    return found[1] if found else "nothing"


def asked_values(prompt):
    """All but the last of the values that a RULER prompt asks for, wherever they are, in capitals."""
    asked = prompt.rsplit("What ", 1)[1]
    found = [value for key, value in re.findall(r"for (\S+) is: (\S+)\.", prompt) if key in asked]
    return " " + ", ".join(found[:-1]).upper() + ", not the last"


# ----------------------------------------------------------------------------------------------------- perplexity


def test_perplexity_is_the_direct_computation():
    model = tiny().double()
    rows = summary(Perplexity, model, lengths=(16, 64), samples=3, batch_tokens=50)
    cells = made(Perplexity, lengths=(16, 64), samples=3).cells(model)
    stretches = [cell.data["tokens"] for cell in cells if cell.data["length"] == 64]
    assert len(stretches) == 3 and all(len(stretch) == 65 for stretch in stretches)
    for length in (16, 64):
        total, by_position = 0.0, np.zeros(length)
        for stretch in stretches:
            for start in range(0, 64, length):
                read, window = (torch.as_tensor(stretch[start + n : start + n + length]) for n in (0, 1))
                nll = -model(read[None])[0].detach().double().log_softmax(-1)[torch.arange(length), window]
                total += nll.sum().item()
                by_position += nll.numpy()
        row = rows[length]
        assert row["nll"] == pytest.approx(total / (3 * 64), abs=1e-6)
        assert row["bits_per_byte"] == pytest.approx(row["nll"] / math.log(2), abs=1e-12)
        assert row["bits_per_byte_standard_error"] == pytest.approx(
            row["nll_standard_error"] / math.log(2), nan_ok=True
        )
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
        windows = 3 * 64 // length
        assert row["position_nll"][0] == pytest.approx(by_position[0] / windows, abs=1e-6)
        assert row["position_nll"][3] == pytest.approx(by_position[4:8].mean() / windows, abs=1e-6)


def test_every_length_scores_the_same_tokens():
    cells = made(Perplexity, lengths=(16, 64), samples=3).cells(tiny())
    first, second = ([c.data["tokens"] for c in cells if c.data["length"] == n] for n in (16, 64))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    starts = [stretch for stretch in second if stretch[0] == load_tokenizer("bytes").bos_id]
    assert len(starts) == 3  # the first stretch of three documents, each behind its BOS
    assert all(
        any((d.tokens[:64] == stretch[1:]).all() for d in documents() if len(d.tokens) >= 64) for stretch in starts
    )


def test_uniform_logits_take_log2_of_the_vocabulary():
    rows = summary(Perplexity, KnownAnswer(), lengths=(32, 128), samples=2)
    for row in rows.values():
        assert row["bits_per_byte"] == pytest.approx(math.log2(264), abs=1e-9)
        assert row["perplexity"] == pytest.approx(264)


def test_buckets_hold_powers_of_two():
    assert position_buckets(9).tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 4]


def test_a_length_beyond_every_document_is_an_error():
    with pytest.raises(ValueError, match=r"\b5000000\b.* longest has \d+"):
        made(Perplexity, lengths=(128, 5_000_000)).cells(tiny())


# -------------------------------------------------------------------------------------------------------- passkey


def test_passkey_of_a_model_that_copies_is_one():
    rows = summary(Passkey, KnownAnswer(passkey_of), lengths=(128, 300), samples=2)
    for row in rows.values():
        assert row["samples"] == 40
        assert (row["teacher_forced"], row["free_generation"], row["digits"]) == (1.0, 1.0, 1.0)


def test_passkey_of_a_model_that_knows_four_digits_is_zero_with_eight_tenths_of_the_digits():
    def nearly(prompt):
        key = passkey_of(prompt)
        return key[:4] + ("0" if key[4] != "0" else "1")

    row = summary(Passkey, KnownAnswer(nearly), lengths=(128,), samples=2)[128]
    assert (row["teacher_forced"], row["free_generation"]) == (0.0, 0.0)
    assert row["digits"] == pytest.approx(0.8)


def test_passkey_of_random_weights_is_zero():
    row = summary(Passkey, tiny(), lengths=(128,), samples=1)[128]
    assert (row["teacher_forced"], row["free_generation"]) == (0.0, 0.0)
    assert row["digits"] < 0.3


def test_passkeys_depend_on_the_seed_alone():
    def drawn(seed, lengths):
        cells = made(Passkey, lengths=lengths, samples=2, seed=seed).cells(tiny())
        return {cell.name: cell.data["answers"].tolist() for cell in cells}

    alone, among = drawn(0, (128,)), drawn(0, (96, 128))
    assert all(among[name] == answers for name, answers in alone.items())
    assert drawn(1, (128,)) != alone


def test_a_length_too_short_for_the_passkey_is_an_error():
    with pytest.raises(ValueError, match=r"\b81\b"):
        made(Passkey, lengths=(40,)).cells(tiny())


@pytest.mark.parametrize("position", ["ggd", "goat", "cable", "rope", "fire", "nope"])
def test_both_readings_of_an_answer_share_one_prefill(position):
    """Forced logits are those of a plain forward pass, and forcing a wrong answer leaves no trace in what is written."""
    model = tiny(position, position_options={"rank": 1, "sink_rank": 2} if position == "goat" else {}, ssmax=True)
    prompts = torch.randint(0, 256, (3, 21), generator=torch.Generator().manual_seed(2))
    answers = torch.randint(0, 256, (3, 5), generator=torch.Generator().manual_seed(3))
    forced, written = force_and_write(model, prompts, answers)
    with torch.no_grad():
        plain = model(torch.cat([prompts, answers[:, :-1]], dim=1))[:, 20:]
    torch.testing.assert_close(forced, plain, atol=2e-5, rtol=1e-5)
    assert written.tolist() == model.generate(prompts, max_new_tokens=5)


# ---------------------------------------------------------------------------------------------------------- needles


def test_needle_grid_hides_the_key_in_held_out_text():
    cells = made(NeedleGrid, lengths=(256,), samples=2).cells(tiny())
    assert len(cells) == 11
    tokenizer, texts = load_tokenizer("bytes"), " ".join(d.text for d in documents())
    for cell, depth in ((cells[0], 0.0), (cells[-1], 1.0)):
        prompt = tokenizer.decode(cell.data["prompts"][0])
        assert len(cell.data["prompts"][0]) + 5 == 256
        at = prompt.index("The pass key is")
        assert (at < 5) if depth == 0 else (at > 150)
        hay = prompt.split("Remember it.")[1].split("What is")[0] if depth == 0 else prompt[: at - 1]
        assert hay[5:-5] in texts
    row = summary(NeedleGrid, KnownAnswer(passkey_of), lengths=(256,), samples=1)[256]
    assert row["free_generation"] == 1.0


@pytest.mark.parametrize("name", RULER_TASKS)
def test_ruler_prompts_fit_and_hold_their_references(name):
    task, tokenizer = RULER_TASKS[name], load_tokenizer("bytes")
    words = "It was a bright cold day. The clocks struck one. Nobody was there to hear them."
    essay = tuple(words.split())
    for seed in range(5):
        prompt, references = make_ruler_sample(task, 1200, tokenizer, essay, np.random.default_rng(seed))
        assert 1200 - 170 < len(prompt) <= 1200  # the largest haystack: one more sentence would not fit
        text = tokenizer.decode(prompt)
        assert len(references) == task.num_values * task.num_queries
        assert all(text.count(reference) == 1 for reference in references)
        asked = text.rsplit("What ", 1)[1]
        keys = re.findall(r"for (\S+) is: ", text)
        assert sum(key in asked for key in dict.fromkeys(keys)) == task.num_queries
        pattern = {"numbers": r"\d{7}", "uuids": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}[task.value]
        assert all(re.fullmatch(pattern, reference) for reference in references)


@pytest.mark.parametrize("name", RULER_TASKS)
def test_ruler_ends_with_an_error_when_too_short(name):
    model = tiny()
    with pytest.raises(ValueError, match=r"\b256\b.* \d+ tokens .*'bytes'"):
        make_ruler_sample(RULER_TASKS[name], 256, load_tokenizer("bytes"), ("Word.",), np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"single_1.*\b200\b"):
        made(Ruler, lengths=(200,)).cells(model)


def test_ruler_scores_what_is_generated():
    rows = summary(Ruler, KnownAnswer(asked_values), lengths=(1200,), samples=2)
    assert rows[1200]["single_1"] == 0.0  # one reference, left out
    assert rows[1200]["multivalue"] == 0.75  # three of four, in capitals where there are letters
    assert rows[1200]["average"] == pytest.approx(np.mean([rows[1200][task] for task in RULER_TASKS]))


def test_fraction_found_ignores_case():
    assert fraction_found("the ABC and 12", ("abc", "12", "34")) == pytest.approx(2 / 3)


# ------------------------------------------------------------------------------------------------------------ cells


@pytest.mark.parametrize("name", EVALUATORS)
def test_finished_cells_are_handed_on_and_the_rest_is_the_same(name):
    kind, model = EVALUATORS[name], KnownAnswer(None if name == "perplexity" else passkey_of)
    full = dict(made(kind, lengths=(900,), samples=1).run(model))
    kept = dict(list(full.items())[:-1])
    measured = []

    class Counting(kind):
        def measure(self, model, cell):
            measured.append(cell.name)
            return super().measure(model, cell)

    assert dict(made(Counting, lengths=(900,), samples=1).run(model, kept)) == full
    assert measured == list(full)[-1:]


@pytest.mark.parametrize("kind", EVALUATORS.values())
def test_batches_change_no_number_and_are_no_part_of_a_cells_key(kind):
    model = KnownAnswer({Perplexity: None, Ruler: asked_values}.get(kind, passkey_of))
    one, many = (made(kind, lengths=(900,), samples=2, batch_tokens=n) for n in (1, 10**6))
    assert one.identity(model) == many.identity(model)
    score = "nll_sum" if kind is Perplexity else "score" if kind is Ruler else "free_generation"
    first, second = ([value[score] for _, value in evaluator.run(model)] for evaluator in (one, many))
    assert first == pytest.approx(second, rel=1e-12) and sum(first) > 0


# ---------------------------------------------------------------------------------------------------- held-out text


def texts_about(word, path):
    """Ten documents, the first three of them held out."""
    rows = [{"text": f"{word} {n} " * 40, "split": "heldout" if n < 3 else "train"} for n in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{path}?split_field=split"


def test_a_run_is_measured_on_what_its_training_held_out(tmp_path):
    """The held-out share of its source; all of a held-out source of its own; what --source names before either."""
    trained, other = (texts_about(word, tmp_path / f"{word}.jsonl") for word in ("ant", "bee"))
    model, found = tiny(), {}
    for label, data, source in (
        ("shipped", None, None),
        ("share", {"source": trained}, None),
        ("whole", {"source": trained, "heldout_source": other}, None),
        ("asked", {"source": trained, "heldout_source": other}, trained),
    ):
        evaluator = made(Perplexity, data, source=source)
        found[label] = [d.text for d in evaluator.heldout_for(model).items]
        assert evaluator.source_name == {"shipped": "sotu-excerpt", "whole": other}.get(label, trained)
    assert found["shipped"] == [d.text for d in documents()]
    assert len(found["whole"]) == 10 and all("bee" in text for text in found["whole"])
    assert len(found["share"]) == 3 and all("ant" in text for text in found["share"])
    assert found["asked"] == found["share"]
    keys = [
        made(kind, data).identity(model)
        for kind in (Perplexity, NeedleGrid, Ruler)
        for data in (None, {"source": other})
    ]
    assert all(a != b for a, b in zip(keys[::2], keys[1::2], strict=True))
    assert made(Passkey, {"source": other}).source_name is None


def test_tokens_without_text_ask_for_a_source(tmp_path):
    with pytest.raises(ValueError, match=r"'tokens:folder'.*--source"):
        made(Perplexity, {"source": "tokens:folder"}).cells(tiny())
    assert made(Perplexity, {"source": "tokens:folder"}, source="sotu-excerpt", lengths=(64,)).cells(tiny())


def test_a_source_without_a_heldout_document_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("A single text, and training has it.")
    with pytest.raises(ValueError, match=r"one\.txt"):
        open_heldout(f"{tmp_path}/one.txt", "bytes")
