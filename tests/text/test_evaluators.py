"""Evaluators against direct computation, and against models whose answers are known beforehand."""

from __future__ import annotations

import csv
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from modalities.paired import scores_by_unit
from modalities.results import ModelResult
from modalities.text import CausalLM, TextConfig
from modalities.text.data import open_heldout
from modalities.text.evaluators.attention import Heads
from modalities.text.evaluators.passkey import NeedleGrid, Passkey
from modalities.text.evaluators.perplexity import Perplexity
from modalities.text.evaluators.recall import Recall
from modalities.text.prompts import state_facts
from modalities.text.tokenizers import load_tokenizer
from zoo import KVCache


class KnownAnswer(nn.Module):
    """Writes ``answer(prompt)`` byte by byte after the prompt; the prompt is what a fresh cache
    reads first.

    With ``answer`` None all logits are 0.
    """

    def __init__(self, answer=None, vocab_size=264):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 1)
        sizes = {"vocab_size": vocab_size, "num_layers": 2, "num_heads": 1}
        self.config = SimpleNamespace(tokenizer="bytes", train_context=128, **sizes)
        self.answer = answer

    def new_cache(self, capacity=0, kind="dense"):
        cache = KVCache(0, capacity=capacity)
        cache.targets = None
        cache.prompt = 0
        return cache

    def forward_features(self, tokens, *, segments=None, cache=None, last=None):
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
        cache.advance(tokens.shape[1])
        return logits if last is None else logits[:, -last:]

    def forward_head(self, features):
        return features


def tiny(position="ggd", **options):
    torch.manual_seed(1)
    sizes = {"dim": 32, "num_layers": 2, "num_heads": 2, "hidden_dim": 48, "train_context": 32}
    return CausalLM(TextConfig(position=position, **sizes | options)).eval()


def made(kind, trained_on=None, **settings):
    return kind(kind.settings_class(**settings), trained_on)


def documents():
    return open_heldout("sotu-excerpt", "bytes").items


def passkey_of(prompt):
    """The key where the prompt states one, behind a space; without the digits that the prompt ends
    with."""
    found = re.search(r"The pass key is (\d+)\.", prompt)
    given = re.search(r"\d*$", prompt)[0]
    return "nothing" if not found else found[1].removeprefix(given) if given else f" {found[1]}"


EXCERPT = "of the 13 held-out documents of sotu-excerpt have"
MEASURED = [
    (
        Perplexity,
        {"lengths": (64, 20000)},
        f"60,000 tokens of 3 documents measured; 12 {EXCERPT} 20,000",
    ),
    (Passkey, {"lengths": (96,)}, "1 prompts at each of 2 depths and 1 lengths measured; hay: own"),
    (
        NeedleGrid,
        {},
        rf"13 {EXCERPT} 256 tokens; left out: lengths 512, .* for which the model has no positions$",
    ),
    (Recall, {"lengths": (3000,)}, r"3 documents with 40 facts each measured; 13 of the 13"),
    (Heads, {"length": 150}, "1 samples measured; hay: own"),
]


@pytest.mark.parametrize(("kind", "settings", "line"), MEASURED)
def test_first_line_names_left_out(kind, settings, line, monkeypatch):
    """The first line says what was measured and left out."""
    model = KnownAnswer()
    model.config.max_context = 256 if not settings else None
    options = {"samples": 3 if kind is Perplexity else 1} | (
        {"depths": 2} if "depths" in vars(kind.settings_class()) else {}
    )
    evaluator = made(kind, **settings | options)
    monkeypatch.setattr(type(evaluator), "text", lambda *_: None, raising=False)
    cells = evaluator.cells(model)
    rows = [
        {"length": n, "tokens": 60000, "documents": 3, "texts": 1}
        for n in settings.get("lengths", (128, 256))
    ]
    assert re.search(
        line, evaluator.measured([ModelResult("a", 128, rows, {cell.name: {} for cell in cells})])
    )


@pytest.mark.parametrize("control", [None, "cut"])
@pytest.mark.parametrize("position", ["rope", "ggd", "goat", "cable"])
def test_recall_is_the_direct_computation(position, control):
    """Every question after its own whole reading; a cut text begins with BOS and has as many tokens
    as training."""
    model = tiny(position, train_context=400).double()
    lengths = (400, 900, 1000)
    evaluator = made(Recall, lengths=lengths, questions=4, samples=1, control=control)
    read = []
    evaluator.advance = read.append
    ((name, cell),) = evaluator.run(model)
    assert control or sum(read) < 1000
    tokenizer = load_tokenizer("bytes")
    number = int(name.removeprefix("document="))
    rng = np.random.default_rng([evaluator.settings.seed, number])
    text, own, facts = state_facts(documents()[number].tokens, 1000, 4, rng, tokenizer)
    room = 1000 - len(text)
    before = 0
    for row in evaluator.rows({name: cell}):
        stop = row["length"] - room
        start = stop - (400 - room) if control else 0
        seen = torch.tensor(text[start:stop])
        seen[0] = tokenizer.bos_id
        counted = [n for n in range(max(before, start, stop - 201) + 1, stop) if own[n]]
        losses = -model(seen[None])[0].detach().log_softmax(-1)
        bits = (
            sum(losses[n - start - 1, text[n]].item() for n in counted) / math.log(2) / len(counted)
        )
        right = []
        nats = []
        exact = []
        beyond = []
        for fact in (fact for fact in facts if fact.end <= stop):
            whole = torch.cat([seen, torch.as_tensor(np.concatenate([fact.question, fact.answer]))])
            logits = model(whole[None])[0, -1 - len(fact.answer) : -1].detach()
            nats += (-logits.log_softmax(-1)[range(len(fact.answer)), fact.answer]).tolist()
            hits = (logits.argmax(-1) == torch.as_tensor(fact.answer)).tolist()
            right = [*right, *hits]
            exact = [*exact, all(hits)]
            beyond += hits if stop - fact.end >= 400 else []
        values = {
            "bits_per_byte": bits,
            "nats": np.mean(nats),
            "tokens_right": np.mean(right),
            "exact": np.mean(exact),
        }
        values |= {"tokens_right_beyond": np.mean(beyond)} if beyond else {}
        assert {column: row.get(column) for column in values} == pytest.approx(values, abs=1e-4)
        before = stop


@pytest.mark.parametrize("control", ["cut", "cut-bos"])
def test_cut_text_in_training_windows(control):
    """Up to the training length as ever; beyond it the same tokens, each from the last 16 to 32
    before it."""
    model = tiny(ssmax=True).double()
    plain, cut = (
        made(Perplexity, lengths=(16, 32, 100), samples=1, control=c) for c in (None, control)
    )
    assert plain.identity(model) != cut.identity(model)
    measured = dict(plain.run(model))
    counted = dict(cut.run(model))
    read = []
    assert {name: cell["tokens"] for name, cell in measured.items()} == {
        n: c["tokens"] for n, c in counted.items()
    }
    cut.advance = read.append
    for cell in cut.cells(model):
        length = cell.data["length"]
        tokens = torch.as_tensor(cell.data["tokens"])
        total = 0.0
        assert (control == "cut-bos" or length == 100) ^ (counted[cell.name] == measured[cell.name])
        assert cut.measure(model, cell) == counted[cell.name]
        assert sum(read) == cell.cost
        read.clear()
        for n in range(100 // length * length):
            start = (
                n // length * length
                if length < 100
                else 0
                if n < 32
                else min(16 * (n // 16 - 1), 100 - 32)
            )
            window = tokens[None, start : n + 1].clone()
            if control == "cut-bos":
                window[:, 0] = load_tokenizer("bytes").bos_id
            total -= model(window)[0, -1].log_softmax(-1)[tokens[n + 1]].item()
        assert counted[cell.name]["nll_sum"] == pytest.approx(total)


def test_recall_default_lengths():
    """Recall by default takes lengths that a document serves."""
    assert made(Recall).points(tiny(train_context=4096)) == (4096, 8192, 16384, 32768)
    assert made(Recall).points(tiny(train_context=50000)) == (50000,)
    with pytest.raises(ValueError, match="at most --lengths"):
        made(Recall, lengths=(10**6,)).cells(tiny())
    evaluator = made(
        Recall, lengths=(9000,), samples=1
    )  # 40 facts alone take more than the trials' tokens
    trials = evaluator.trials(evaluator.cells(tiny()))
    assert [len(evaluator.measure(tiny(), cell)["found"][0]["answers"]) for cell in trials] == [
        4,
        9,
    ]


def test_documents_are_units():
    """Every document takes part and is a unit."""
    for lengths, turns in (
        ((16, 128), 8),
        ((64, 2048), 4),
        ((5000,), 1),
        ((12000,), 1),
        ((25000,), 1),
    ):
        cells = made(Perplexity, lengths=lengths).cells(KnownAnswer())
        long = [n for n, d in enumerate(documents()) if len(d.tokens) >= lengths[-1]]
        assert sorted(cell.data["document"] for cell in cells) == sorted(
            turns * len(lengths) * long
        )
    long = list(range(len(documents())))
    twice = made(Perplexity, lengths=(32,), samples=2 * len(long))
    values = dict(twice.run(tiny()))
    row = twice.rows(values)[0]
    by_document = {}
    for value in values.values():
        by_document.setdefault(value["document"], []).append(value["nll_sum"] / value["tokens"])
    means = [np.mean(of) for of in by_document.values()]
    assert row["documents"] == len(long)
    assert all(len(of) == 2 for of in by_document.values())
    assert row["nll_standard_error"] == pytest.approx(np.std(means, ddof=1) / math.sqrt(len(long)))
    (score,) = scores_by_unit(
        one for cell in values.items() for one in twice.observed(*cell)
    ).values()
    assert score == pytest.approx(
        {str(n): np.mean(of) / math.log(2) for n, of in by_document.items()}
    )


@pytest.mark.parametrize(("kind", "units"), [("joined", 2), ("upto", 3)])
def test_perplexity_of_short_documents(kind, units, tmp_path):
    """Against losses of the lines that are read, token by token; bytes are tokens."""
    texts = ["short", "a longer text " * 5, "some other words " * 2]
    tokenizer = load_tokenizer("bytes")
    model = tiny()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"source": f"{tmp_path}/a.jsonl?split=heldout"}
    with pytest.raises(
        ValueError, match=r"has 100 tokens; the longest has 70: .* or --documents joined"
    ):
        made(Perplexity, lengths=(100,), **settings).cells(model)
    evaluator = made(Perplexity, lengths=(8, 48), documents=kind, **settings)
    read = model.double()
    line = [token for text in texts for token in [tokenizer.bos_id, *tokenizer.encode(text)]]
    for row in evaluator.rows(dict(evaluator.run(read))):
        length = row["length"]
        lines = [
            line[n : n + length + 1] for n in range(0, 96, length)
        ]  # two stretches of 48, in windows of a length
        if kind == "upto":
            lines = [[tokenizer.bos_id, *tokenizer.encode(text)][: length + 1] for text in texts]
        losses = [-model(torch.tensor([part[:-1]]))[0].log_softmax(-1) for part in lines]
        nll = sum(
            loss[n, t].item()
            for loss, part in zip(losses, lines, strict=True)
            for n, t in enumerate(part[1:])
        )
        counted = sum(len(part) - 1 for part in lines)
        size = sum(token < 256 for part in lines for token in part[1:])  # BOS has no bytes
        assert (row["tokens"], row["documents"]) == (counted, units)
        assert np.isfinite(row["position_nll"]).all()
        assert row["nll"] == pytest.approx(nll / counted, rel=1e-6)
        assert row["bits_per_byte"] == pytest.approx(nll / math.log(2) / size)


@pytest.mark.parametrize("kind", [Passkey, NeedleGrid])
@pytest.mark.parametrize("name", ["own", "bam"])
def test_copying_scores_one(kind, name):
    """Copying is one and another value zero."""
    other = str.maketrans("0123456789", "1234567890")
    for answer, score in (
        (passkey_of, 1.0),
        (lambda prompt: passkey_of(prompt).translate(other), 0.0),
    ):
        evaluator = made(kind, lengths=(1500,), samples=2, depths=3, template=name)
        (row,) = evaluator.rows(dict(evaluator.run(KnownAnswer(answer))))
        assert row["samples"] == 6
        assert row["depths"] == [0.0, 0.5, 1.0]
        assert (row["teacher_forced"], row["free_generation"]) == (score, score)
        assert row["free_generation_by_depth"] == [score] * 3
        assert row["free_generation_standard_error"] == 0.0


def answering(evaluator, which):
    """A model that answers the prompts for which ``which(cell, prompt)``, and no other."""
    answers = {}
    for cell in evaluator.cells(KnownAnswer()):
        for prompt in cell.data["prompts"]:
            text, answer = (bytes(ids[ids < 256].astype(np.uint8)).decode() for ids in prompt[:2])
            answers[text] = answer if which(cell, prompt) else "?"
    return KnownAnswer(answers.get)


def test_fact_counts_have_columns():
    """Numbers of facts have columns of their own."""
    evaluator = made(Passkey, template="heldout", facts=(1, 3), lengths=(900,), samples=2, depths=2)
    columns = [
        f"{score} (facts={n})" for score in ("teacher_forced", "free_generation") for n in (1, 3)
    ]
    assert [score.column for score in evaluator.scores] == columns
    assert evaluator.overview.column == columns[-1]
    cells = dict(evaluator.run(answering(evaluator, lambda cell, prompt: cell.data["facts"] == 1)))
    (row,) = evaluator.rows(cells)
    assert [row[column] for column in columns] == [1.0, 0.0] * 2
    scores = scores_by_unit(one for cell in cells.items() for one in evaluator.observed(*cell))
    assert set(scores) == {(900, column) for column in columns}
    assert all(len(units) == 4 for units in scores.values())


def test_scores_by_wording_and_kind(tmp_path):
    """Where one wording alone is answered its row is 1 and others 0, and the error is that over
    wordings."""
    evaluator = made(Passkey, template="other", lengths=(600,), samples=40, depths=2)
    known = "| was issued to {name}. What was issued to {name}? That was"
    cells = dict(evaluator.run(answering(evaluator, lambda cell, prompt: prompt.wording == known)))
    (row,) = evaluator.rows(cells)
    evaluator.write([ModelResult("one", 128, [row], cells)], tmp_path)
    table = list(csv.DictReader((tmp_path / "passkey.words.csv").read_text().splitlines()))
    wordings = {
        r["words"]: (int(r["samples"]), float(r["free_generation"]))
        for r in table
        if r["kind"] == "wording"
    }
    assert sum(count for count, _ in wordings.values()) == row["samples"] == 80
    assert len(wordings) > 15
    assert {words for words, (_, share) in wordings.items() if share} == {known}
    right = wordings[known][0] / 80
    error = (
        math.sqrt(
            sum((n * (s - right)) ** 2 for n, s in wordings.values()) / (1 - 1 / len(wordings))
        )
        / 80
    )
    assert row["free_generation"] == right
    assert row["free_generation_standard_error"] == pytest.approx(error)
    assert {"digits", "9h99"} < {r["words"] for r in table if r["kind"] == "value_kind"}


def texts_about(word, path):
    """Ten documents, the first three of them held out."""
    rows = [
        {"text": f"{word} {n} " * 40, "split": "heldout" if n < 3 else "train"} for n in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{path}?split_field=split"


def test_run_measured_on_heldout(tmp_path):
    """The held-out share of its source; all of a held-out source of its own; what --source names
    before either."""
    trained, other = (texts_about(word, tmp_path / f"{word}.jsonl") for word in ("ant", "bee"))
    model = tiny()
    found = {}
    for label, data, source in (
        ("shipped", None, None),
        ("share", {"source": trained}, None),
        ("whole", {"source": trained, "heldout_source": other}, None),
        ("asked", {"source": trained, "heldout_source": other}, trained),
    ):
        evaluator = made(Perplexity, data, source=source)
        found[label] = [d.text for d in evaluator.heldout_for(model).items]
        assert evaluator.source_name == {"shipped": "sotu-excerpt", "whole": other}.get(
            label, trained
        )
    assert found["shipped"] == [d.text for d in documents()]
    assert len(found["whole"]) == 10
    assert all("bee" in text for text in found["whole"])
    assert len(found["share"]) == 3
    assert all("ant" in text for text in found["share"])
    assert found["asked"] == found["share"]
    keys = [
        made(kind, data).identity(model)
        for kind in (Perplexity, NeedleGrid)
        for data in (None, {"source": other})
    ]
    assert all(a != b for a, b in zip(keys[::2], keys[1::2], strict=True))
    assert made(Passkey, {"source": other}).source_name == "own"
    assert made(Passkey, {"source": other}, template="heldout").source_name == other
