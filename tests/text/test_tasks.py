"""Sequence tasks of known answer: their rules by plain Python, rows, and exact match."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import zoo
from modalities.text.config import TextDataConfig
from modalities.text.data import build_loader
from modalities.text.evaluators.exact_match import ExactMatch, ExactMatchSettings
from modalities.text.sources import open_source
from modalities.text.tasks import TASKS, Example, TaskRows, open_task, row_of
from modalities.tokenizers.symbols import SymbolTokenizer
from zoo.errors import Options

BLANK, QUERY, VALUE = "_", "?", ":"


def words(name: str, seed: int = 3, length: int = 40) -> tuple[list[str], list[str]]:
    """The words of an example's source and target."""
    task = TASKS[name]
    tokenizer = SymbolTokenizer(task.symbols)
    example = task.example([seed], length)
    return tokenizer.decode(example.source).split(), tokenizer.decode(example.target).split()


def count_in_runs(source: list[str]) -> list[str]:
    counts = []
    for place, symbol in enumerate(source):
        same = place > 0 and source[place - 1] == symbol
        counts.append(counts[-1] + 1 if same else 0)
    return [str(count) for count in counts]


def read_bits(source: list[str]) -> list[str]:
    """2 writes the bit behind it, 3 ignores it, 4 reads the last one written."""
    reads = []
    bit = ""
    for instruction, value in zip(source[::2], source[1::2], strict=True):
        if instruction == "2":
            bit = value
        if instruction == "4":
            assert value == BLANK
            reads.append(bit)
    return reads


def answer_queries(source: list[str]) -> list[str]:
    """Values of the keys behind "?", looked up among the pairs "key key : value value"."""
    first_query = source.index(QUERY)
    pairs = {}
    for place in range(first_query):
        if source[place] == VALUE:
            pairs[tuple(source[place - 2 : place])] = source[place + 1 : place + 3]
    answers = []
    for place in range(first_query, len(source), 3):
        answers += [VALUE, *pairs[tuple(source[place + 1 : place + 3])]]
    return answers


RULES = {
    "copy": lambda source: source,
    "reverse": lambda source: source[::-1],
    "sort": lambda source: sorted(source, key=int),
    "two_back": lambda source: ["0", "0", *source[:-2]],
    "local_count": count_in_runs,
    "flip_flop": read_bits,
    "mqmtar": answer_queries,
}


@pytest.mark.parametrize("length", [40, 257])
@pytest.mark.parametrize("name", TASKS)
def test_target_follows_rule(name, length):
    source, target = words(name, length=length)
    assert target == RULES[name](source)


@pytest.mark.parametrize("name", TASKS)
def test_row_fits_context(name):
    """A row of the longest source in training has `context` inputs at most."""
    task = TASKS[name]
    row = row_of(task.example([1], task.most), SymbolTokenizer(task.symbols))
    assert len(row) - 1 <= task.context
    assert len(row) <= task.row_length(task.most)


def test_runs_have_published_lengths():
    """Runs of 2 to 48 equal numbers, and neighbouring runs of different ones."""
    source, _ = words("local_count", length=2000)
    numbers = np.array([int(word) for word in source])
    starts = np.flatnonzero(np.diff(numbers)) + 1
    lengths = np.diff(np.concatenate([[0], starts]))
    assert lengths.min() >= 2
    assert lengths.max() <= 48


def test_pairs_fill_four_fifths():
    source, _ = words("mqmtar", length=64)
    assert source.index(QUERY) == 64
    assert source.count(BLANK) == 64 - 5 * (51 // 5)


def test_only_targets_count():
    """The loss counts the target's tokens, and the row is BOS, source, "|", target."""
    task = open_task("task:reverse?least=4&most=8")
    tokenizer = SymbolTokenizer(task.symbols)
    row = TaskRows(task, 20, seed=0)[7]
    text = tokenizer.decode(row["tokens"].tolist())
    source, target = (part.split() for part in text.split(" | "))
    counted = row["tokens"][row["weights"] > 0]
    assert tokenizer.decode(counted.tolist()).split() == target
    assert target == source[::-1]
    assert 4 <= len(source) <= 8
    assert int(row["tokens"][0]) == tokenizer.bos_id


def test_rows_depend_on_number_and_seed():
    task = open_task("task:copy")
    rows = TaskRows(task, task.context, seed=0)
    again = TaskRows(task, task.context, seed=0)
    other = TaskRows(task, task.context, seed=1)
    assert torch.equal(rows[5]["tokens"], again[5]["tokens"])
    assert not torch.equal(rows[5]["tokens"], other[5]["tokens"])
    assert not torch.equal(rows[5]["tokens"], rows[6]["tokens"])


def test_heldout_rows_are_others():
    config = TextDataConfig("task:sort", tokenizer="symbols:32", context=129)
    trained = next(iter(build_loader(config, micro_batch=4)))
    heldout = next(iter(build_loader(config, split="heldout", micro_batch=4)))
    assert not torch.equal(trained["tokens"], heldout["tokens"])


def refusal(source: str, message: str, **options: object) -> tuple[str, str, Options]:
    return source, message, options


@pytest.mark.parametrize(
    ("source", "message", "options"),
    [
        refusal("task:revers", "did you mean 'reverse'"),
        refusal("task:copy?most=x", "most='x', expected a number"),
        refusal("task:copy?longest=9", "unknown option 'longest'"),
        refusal("task:copy?least=9&most=4", "expected 2 ≤ least ≤ most"),
        refusal("task:copy", "expected tokenizer='symbols:32'", tokenizer="bytes"),
        refusal("task:copy", "too short", context=100),
        refusal("task:copy", "are of text", facts_fraction=0.5),
    ],
)
def test_wrong_settings_are_named(source, message, options):
    settings = {"tokenizer": "symbols:32", "context": 129} | options
    with pytest.raises(ValueError, match=message):
        TextDataConfig(source, **settings)


def test_task_is_no_text():
    with pytest.raises(ValueError, match="evaluate MODEL exact_match"):
        open_source("task:copy")


def test_unknown_symbol_is_named():
    with pytest.raises(ValueError, match="'99' is no symbol"):
        SymbolTokenizer(32).encode("3 99")


def test_symbols_round_trip():
    tokenizer = SymbolTokenizer(32)
    text = "3 31 | 0 : ? _"
    assert tokenizer.decode(tokenizer.encode(text)) == text


class Solver(torch.nn.Module):
    """Features are one-hot next tokens by a rule of the whole row, wrong at chosen places."""

    def __init__(self, tokenizer: SymbolTokenizer, wrong: set[int]) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(tokenizer.vocab_size, 1)
        self.config = type("C", (), {"tokenizer": tokenizer.name, "train_context": 17})()
        self.wrong = wrong
        self.tokenizer = tokenizer

    @property
    def device(self):
        return self.embedding.weight.device

    def forward_features(self, tokens):
        features = torch.zeros(*tokens.shape, self.tokenizer.vocab_size)
        for number, row in enumerate(tokens.tolist()):
            middle = row.index(self.tokenizer.separator_id)
            target = row[1:middle][::-1]
            for place, token in enumerate(target):
                shift = 1 if number in self.wrong and place == 1 else 0
                features[number, middle + place, (token + shift) % 32] = 1.0
        return features

    def forward_head(self, features):
        return features


def test_exact_match_counts_whole_targets():
    """Three of four targets are right, one has a wrong token of eight."""
    solver = Solver(SymbolTokenizer(32), wrong={2})
    settings = ExactMatchSettings(samples=4, lengths=(8,))
    evaluator = ExactMatch(settings, {"source": "task:reverse?least=4&most=8"})
    rows = evaluator.rows(dict(evaluator.run(solver)))
    assert rows[0]["exact"] == 0.75
    assert rows[0]["tokens_right"] == pytest.approx(31 / 32)
    assert rows[0]["examples"] == 4


def test_default_lengths_are_of_sources():
    settings = ExactMatchSettings()
    evaluator = ExactMatch(settings, {"source": "task:reverse"})
    assert evaluator.trained_at(None) == 64
    assert settings.resolved_lengths(64) == (64, 96, 128, 256, 512, 1024)


def test_model_without_task_is_refused():
    with pytest.raises(ValueError, match="expected --source task:NAME"):
        ExactMatch(ExactMatchSettings(), {"source": "sotu"}).cells(None)


def test_greedy_writing_agrees():
    """Exact match by one reading is exact match of what the model writes greedily."""
    torch.manual_seed(0)
    model = zoo.create_model(
        "text_nape_tiny", tokenizer="symbols:32", vocab_size=40, train_context=17, num_layers=1
    ).eval()
    task = open_task("task:copy?least=2&most=4")
    tokenizer = SymbolTokenizer(32)
    for seed in range(6):
        example = task.example([seed], 2)
        written = greedy(model, example, tokenizer)
        target = example.target.tolist()
        row = torch.tensor(row_of(example, tokenizer))[None]
        likeliest = model(row[:, :-1]).argmax(-1)[0, -2:].tolist()
        assert (written == target) == (likeliest == target)


def greedy(model, example: Example, tokenizer: SymbolTokenizer) -> list[int]:
    prompt = [tokenizer.bos_id, *example.source.tolist(), tokenizer.separator_id]
    return model.generate([prompt], max_new_tokens=len(example.target), temperature=0.0)[0]
