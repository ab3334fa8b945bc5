"""Evaluators against direct computation, and against models whose answers are known beforehand."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from modalities.evaluation import EvalSettings
from modalities.store import CellStore, weights_hash
from modalities.text.evals import EVALUATORS, Passkey, Perplexity, bucket_of
from modalities.text.held_out import held_out_documents
from modalities.text.model import CausalLM, TextConfig
from modalities.text.needles import NeedleGrid
from modalities.text.ruler import RULER_TASKS, Ruler, fraction_found, make_ruler_sample
from modalities.text.scoring import force_and_write
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


def summary(evaluator, model, **settings):
    cells = dict(evaluator.run(model, EvalSettings(**settings)))
    return {row["length"]: row for row in evaluator.rows(cells)}


def passkey_of(prompt):
    found = re.search(r"The pass key is (\d{5})\.", prompt)
    return found[1] if found else "nothing"


# ----------------------------------------------------------------------------------------------------- perplexity


def test_perplexity_is_the_direct_computation():
    model = tiny().double()
    rows = summary(Perplexity(), model, lengths=(16, 64), samples=3, batch_tokens=50)
    cells = Perplexity().cells(model, EvalSettings(lengths=(16, 64), samples=3))
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
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
        windows = 3 * 64 // length
        assert row["position_nll"][0] == pytest.approx(by_position[0] / windows, abs=1e-6)
        assert row["position_nll"][3] == pytest.approx(by_position[4:8].mean() / windows, abs=1e-6)


def test_every_length_scores_the_same_tokens():
    cells = Perplexity().cells(tiny(), EvalSettings(lengths=(16, 64), samples=3))
    first, second = ([c.data["tokens"] for c in cells if c.data["length"] == n] for n in (16, 64))
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    tokenizer, documents = held_out_documents("bytes", None)
    starts = [stretch for stretch in second if stretch[0] == tokenizer.bos_id]
    assert len(starts) == 3  # the first stretch of three documents, each behind its BOS
    assert all(
        any((d.tokens[:64] == stretch[1:]).all() for d in documents if len(d.tokens) >= 64) for stretch in starts
    )


def test_uniform_logits_take_log2_of_the_vocabulary():
    rows = summary(Perplexity(), KnownAnswer(), lengths=(32, 128), samples=2)
    for row in rows.values():
        assert row["bits_per_byte"] == pytest.approx(math.log2(264), abs=1e-9)
        assert row["perplexity"] == pytest.approx(264)


def test_buckets_hold_powers_of_two():
    assert bucket_of(9).tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 4]


def test_a_length_beyond_every_document_is_an_error():
    with pytest.raises(ValueError, match=r"no held-out document .* 5000000 tokens; the longest has \d+"):
        Perplexity().cells(tiny(), EvalSettings(lengths=(128, 5_000_000)))


# -------------------------------------------------------------------------------------------------------- passkey


def test_passkey_of_a_model_that_copies_is_one():
    rows = summary(Passkey(), KnownAnswer(passkey_of), lengths=(128, 300), samples=2)
    for row in rows.values():
        assert row["samples"] == 40
        assert (row["teacher_forced"], row["free_generation"], row["digits"]) == (1.0, 1.0, 1.0)


def test_passkey_of_a_model_that_knows_four_digits_is_zero_with_eight_tenths_of_the_digits():
    def nearly(prompt):
        key = passkey_of(prompt)
        return key[:4] + ("0" if key[4] != "0" else "1")

    row = summary(Passkey(), KnownAnswer(nearly), lengths=(128,), samples=2)[128]
    assert (row["teacher_forced"], row["free_generation"]) == (0.0, 0.0)
    assert row["digits"] == pytest.approx(0.8)


def test_passkey_of_random_weights_is_zero():
    row = summary(Passkey(), tiny(), lengths=(128,), samples=1)[128]
    assert (row["teacher_forced"], row["free_generation"]) == (0.0, 0.0)
    assert row["digits"] < 0.3


def test_passkeys_depend_on_the_seed_alone():
    def drawn(seed, lengths):
        cells = Passkey().cells(tiny(), EvalSettings(lengths=lengths, samples=2, seed=seed))
        return {cell.name: cell.data["answers"].tolist() for cell in cells}

    alone, among = drawn(0, (128,)), drawn(0, (96, 128))
    assert all(among[name] == answers for name, answers in alone.items())
    assert drawn(1, (128,)) != alone


def test_a_length_too_short_for_the_passkey_is_an_error():
    with pytest.raises(ValueError, match="at least 81"):
        Passkey().cells(tiny(), EvalSettings(lengths=(40,)))


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
    cells = NeedleGrid().cells(tiny(), EvalSettings(lengths=(256,), samples=2))
    assert len(cells) == 11
    tokenizer, documents = held_out_documents("bytes", None)
    texts = " ".join(d.text for d in documents)
    for cell, depth in ((cells[0], 0.0), (cells[-1], 1.0)):
        prompt = tokenizer.decode(cell.data["prompts"][0])
        assert len(cell.data["prompts"][0]) + 5 == 256
        at = prompt.index("The pass key is")
        assert (at < 5) if depth == 0 else (at > 150)
        hay = prompt.split("Remember it.")[1].split("What is")[0] if depth == 0 else prompt[: at - 1]
        assert hay[5:-5] in texts
    row = summary(NeedleGrid(), KnownAnswer(passkey_of), lengths=(256,), samples=1)[256]
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
    with pytest.raises(ValueError, match=r"too short for this RULER task: its shortest prompt takes \d+ tokens"):
        make_ruler_sample(RULER_TASKS[name], 256, load_tokenizer("bytes"), ("Word.",), np.random.default_rng(0))
    with pytest.raises(ValueError, match="ruler single_1: length 200 is too short"):
        Ruler().cells(model, EvalSettings(lengths=(200,)))


def test_ruler_scores_what_is_generated():
    def values(prompt):  # of the keys asked for, wherever they are
        asked = prompt.rsplit("What ", 1)[1]
        found = [value for key, value in re.findall(r"for (\S+) is: (\S+)\.", prompt) if key in asked]
        return " " + ", ".join(found[:-1]).upper() + ", not the last"

    rows = summary(Ruler(), KnownAnswer(values), lengths=(1200,), samples=2)
    assert rows[1200]["single_1"] == 0.0  # one reference, left out
    assert rows[1200]["multivalue"] == 0.75  # three of four, in capitals where there are letters
    assert rows[1200]["average"] == pytest.approx(np.mean([rows[1200][task] for task in RULER_TASKS]))


def test_fraction_found_ignores_case():
    assert fraction_found("the ABC and 12", ("abc", "12", "34")) == pytest.approx(2 / 3)


# ------------------------------------------------------------------------------------------------------------ cells


@pytest.mark.parametrize("name", EVALUATORS)
def test_finished_cells_are_handed_on_and_the_rest_is_the_same(name):
    evaluator, model = EVALUATORS[name], KnownAnswer(None if name == "perplexity" else passkey_of)
    settings = EvalSettings(lengths=(900,), samples=1)
    full = dict(evaluator.run(model, settings))
    kept = dict(list(full.items())[:-1])
    measured = []
    original = type(evaluator).measure

    class Counting(type(evaluator)):
        def measure(self, model, cell, settings):
            measured.append(cell.name)
            return original(self, model, cell, settings)

    assert dict(Counting().run(model, settings, finished=kept)) == full
    assert measured == list(full)[-1:]


def test_store_survives_and_refuses_other_settings(tmp_path):
    key = {"evaluator": "passkey", "model": "a model", "weights": "00", "settings": {"seed": 1}}
    CellStore(tmp_path, key).add("cell", {"score": 0.1 + 0.2})
    store = CellStore(tmp_path, key)
    assert store.finished == {"cell": {"score": 0.1 + 0.2}}
    assert CellStore(tmp_path, key | {"settings": {"seed": 2}}).finished == {}
    store.path.write_text(store.path.read_text().replace('"seed": 1', '"seed": 3'))
    with pytest.raises(ValueError, match="belongs to other settings"):
        CellStore(tmp_path, key)
    assert [p.name for p in tmp_path.iterdir()] == [store.path.name]


def test_weights_hash_sees_every_bit():
    model = tiny()
    before = weights_hash(model)
    assert weights_hash(tiny()) == before
    with torch.no_grad():
        model.layers[1].attention.prior.theta_beta[0] += 1e-6
    assert weights_hash(model) != before


def test_settings_refuse_nonsense():
    for wrong in ({"lengths": (1,)}, {"lengths": ()}, {"samples": 0}, {"batch_tokens": 0}):
        with pytest.raises(ValueError):
            EvalSettings(**wrong)
    assert EvalSettings(lengths=(64, 16, 64)).lengths == (16, 64)
    assert EvalSettings().resolved_lengths(128) == (128, 256, 512, 1024, 2048, 4096)
