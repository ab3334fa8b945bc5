"""Prompts: exact lengths, the statement where it belongs, the published texts to the letter, and what errors name."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest

from modalities.text import prompts
from modalities.text.data import open_heldout
from modalities.text.facts import GRAMMARS
from modalities.text.prompts import PUBLISHED, TEMPLATES, Template, open_haystack
from modalities.text.tokenizers import load_tokenizer

TOKENIZERS = {name: load_tokenizer(name) for name in ("bytes", "bpe-1k")}
HAYS = ("own", "grass", "text", "file")
ASK = "What is the pass key? The pass key is"


@pytest.fixture(scope="module")
def hay_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("hay") / "hay.txt"
    path.write_text("It was so. Was it? It was not!\n" * 5 + "And then no mark for a long while ", encoding="utf-8")
    return path


def opened(name, tokenizer, path=None):
    if name == "text":
        return open_haystack("text", tokenizer, [d.tokens for d in open_heldout("sotu-excerpt", tokenizer.name).items])
    return open_haystack(f"file:{path}" if name == "file" else name, tokenizer)


def draw(template, length, depth, seed, tokenizer, haystack):
    return template.draw(length, depth, np.random.default_rng(seed), tokenizer, haystack)


def places_of(part, ids):
    """Where the tokens `part` stand in `ids`."""
    return [n for n in range(len(ids) - len(part) + 1) if ids[n : n + len(part)] == part]


@pytest.fixture
def drawn(monkeypatch):
    """The facts of the last prompt; the first is asked about."""
    last, real = [], prompts.draw_facts

    def drawing(*arguments, **options):
        last[:] = real(*arguments, **options)
        return list(last)

    monkeypatch.setattr(prompts, "draw_facts", drawing)
    return last


CONDITIONS = [
    (n, facts, others) for n in TEMPLATES for facts in ((1, 5) if n in GRAMMARS else (1,)) for others in (0, 4)
]


@pytest.mark.parametrize(
    ("name", "facts", "others", "hay", "kind"),
    [(*condition, HAYS[n % 4], list(TOKENIZERS)[n // 4 % 2]) for n, condition in enumerate(CONDITIONS)],
)
def test_lengths_values_and_depths(name, facts, others, hay, kind, hay_file, drawn):
    tokenizer = TOKENIZERS[kind]
    template, haystack = Template(name, facts, others), opened(hay, tokenizer, hay_file)
    for seed, depth in enumerate((0.0, 0.37, 1.0)):
        length = 1400 + seed
        prompt, answer = draw(template, length, depth, seed, tokenizer, haystack)
        if name == "bam":
            unit = len(haystack.texts[0]) if haystack.loop else 1
            assert length - unit < len(prompt) <= length and tokenizer.bos_id not in prompt
        else:
            assert len(prompt) + len(answer) == length
            assert prompt[0] == tokenizer.bos_id and tokenizer.bos_id not in prompt[1:]
        text, value = tokenizer.decode(prompt), tokenizer.decode(answer)
        # The answer has the tokens in which the text states it.
        assert len(places_of(answer.tolist(), prompt.tolist())) == (2 if name in PUBLISHED else 1)
        assert value[0] == " " and value[1:].isdigit() and (name == "mohtashami" or len(value) == 6)
        if hay in ("own", "grass"):
            numbers = re.findall(r"(?<!\d)\d{5}(?!\d)", text.replace(value, " key"))
            assert len(numbers) == len(set(numbers)) == facts - 1 + others
        if name in GRAMMARS:
            assert len(drawn) == facts and value == drawn[0].value
            assert text.endswith(drawn[0].question) and all(text.count("".join(f.statement)) == 1 for f in drawn)
            statement = "".join(drawn[0].statement)
        else:
            assert text.endswith(ASK)
            statement = f"The pass key is{value}. Remember it."
        before, after = text.split(statement)
        if (facts, others) == (1, 0):  # other statements move this one
            at = before.removeprefix(prompts.TASK).rstrip("\n")
            assert len(at) / len(at + after) == pytest.approx(depth, abs=0.16)
            assert name == "mohtashami" or depth == 1.0 or not at.strip() or at.rstrip(" ")[-1] in ".?!"


@pytest.mark.parametrize(("name", "kind"), [("heldout", "bytes"), ("invented", "bpe-1k")])
def test_every_fact_of_a_text_is_asked_for(name, kind):
    """At even depths, in their order; the longest question and its answer fill the length."""
    tokenizer = TOKENIZERS[kind]
    rng, hay = np.random.default_rng(4), open_haystack("own", tokenizer)
    text, asked = Template(name, facts=4, distractors=2).draw_all(2500, rng, tokenizer, hay)
    assert len(text) + max(len(question) + len(answer) for question, answer in asked) == 2500
    written, values = tokenizer.decode(text), [tokenizer.decode(answer) for _, answer in asked]
    assert len(set(values)) == 4 and len({tokenizer.decode(question) for question, _ in asked}) == 4
    depths = [written.index(value) / len(written) for value in values]
    assert depths == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=0.12) and depths == sorted(depths)
    assert len(re.findall(r"(?<!\d)\d{5}(?!\d)", written)) == 6
    with pytest.raises(ValueError, match="states one fact"):
        Template("own").draw_all(2500, rng, tokenizer, hay)


SEEDS = {"train_paraphrased": 8}  # with 7 it asks for "the door code", which has no name to be asked by
PINNED = {
    "own": "2ae9a0aa",
    "heldout": "b1ff57d4",
    "train": "c34c259d",
    "invented": "733fec6d",
    "mohtashami": "8c789422",
    "bam": "20ac66f1",
    "paraphrased": "7e303b01",
    "train_paraphrased": "e3c6cd8f",
}


def test_prompts_are_pinned():
    """A change here is a new version of the evaluators that use prompts."""
    digests, tokenizer = {}, TOKENIZERS["bytes"]
    for name in TEMPLATES:
        template, digest = Template(name, 3 if name in GRAMMARS else 1, 2), hashlib.blake2b(digest_size=4)
        for hay in ("own", "grass"):
            for side in draw(template, 700, 0.4, SEEDS.get(name, 7), tokenizer, opened(hay, tokenizer)):
                digest.update(side.tobytes())
        digests[name] = digest.hexdigest()
    assert digests == PINNED


@pytest.mark.parametrize("name", ["own", "mohtashami"])
def test_a_value_is_cut_alike_where_digits_are_merged(tmp_path, name):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(["is 48213. key is 482 13"] * 4, vocab_size=290, special_tokens=["<|endoftext|>"])
    model.save_model(str(tmp_path))
    tokenizer, sizes = load_tokenizer(f"gpt2:{tmp_path}"), set()
    for seed in range(40):
        prompt, answer = draw(Template(name), 700, 0.5, seed, tokenizer, opened("grass", tokenizer))
        assert len(prompt) + len(answer) == 700
        assert len(places_of(answer.tolist(), prompt.tolist())) == (2 if name in PUBLISHED else 1)
        sizes.add(len(answer))
    assert len(sizes) > 1


# ---- the published prompts ----

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
GARBAGE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@pytest.mark.parametrize(("depth", "ahead", "kind"), [(0.3, 0, "bpe-1k"), (0.34, 1, "bytes"), (1.0, 3, "bytes")])
def test_bams_prompt_to_the_letter(depth, ahead, kind):
    tokenizer = TOKENIZERS[kind]
    haystack = opened("grass", tokenizer)
    words = f"{TASK} The pass key is 123456. Remember it. 123456 is the pass key. {ASK} 1"
    least = len(tokenizer.encode(words)) + 3 * len(haystack.texts[0])
    for length in (least + 2, least + len(haystack.texts[0]) - 3):  # the fourth repetition does not fit
        prompt, answer = draw(Template("bam", given=1), length, depth, length, tokenizer, haystack)
        rest = tokenizer.decode(answer)
        assert len(answer) == len(rest) == 5 and rest.isdigit()
        key = tokenizer.decode(prompt)[-1] + rest
        assert "1" <= key[0] <= "9" and prompt[0] != tokenizer.bos_id
        parts = [TASK, *[GARBAGE] * ahead, f"The pass key is {key}. Remember it. {key} is the pass key."]
        parts += [*[GARBAGE] * (3 - ahead), f"{ASK} {key[0]}"]
        assert tokenizer.decode(prompt) == " ".join(parts)


@pytest.mark.parametrize(("length", "depth"), [(400, 0.0), (401, 0.21), (401, 1.0)])
def test_mohtashamis_prompt_to_the_letter(length, depth):
    """As their `generate_prompt_landmark` joins five lines, the filler cut to the letter and begun again."""
    tokenizer, lengths = TOKENIZERS["bytes"], set()
    for seed in range(30):
        prompt, answer = draw(Template("mohtashami"), length, depth, seed, tokenizer, opened("grass", tokenizer))
        key = tokenizer.decode(answer)[1:]
        assert 1 <= int(key) <= 50000 and key == str(int(key))
        lengths.add(len(key))
        information = f"The pass key is {key}. Remember it. {key} is the pass key."
        filler = length - 1 - len("\n".join([TASK, "", information, "", ASK])) - len(answer)
        garbage, ahead = " ".join([GARBAGE] * 50), round(depth * filler)
        lines = [TASK, garbage[:ahead], information, garbage[: filler - ahead], ASK]
        assert tokenizer.decode(prompt) == "\n".join(lines)
    assert lengths == {3, 4, 5}  # from 1 to 50,000 without a 0 in front


# ---- haystacks ----


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    "text", ["no mark at all\n" * 300, "naïve café " * 400, "落霞与孤鹜齐飞秋水共长天一色渔舟唱晚" * 80]
)
def test_a_file_without_sentences_has_statements_at_their_depth(text, kind, tmp_path):
    """Between lines, words or characters: none is cut but by the ends of the hay."""
    tokenizer = TOKENIZERS[kind]
    (tmp_path / "hay.txt").write_text(text, encoding="utf-8")
    haystack = open_haystack(f"file:{tmp_path}/hay.txt", tokenizer)
    for seed, depth in enumerate((0.0, 0.35, 1.0)):
        prompt, answer = draw(Template(), 1000, depth, seed, tokenizer, haystack)
        before, after = tokenizer.decode(prompt).split(f" The pass key is{tokenizer.decode(answer)}. Remember it.")
        assert len(before) / len(before + after) == pytest.approx(depth, abs=0.12)
        assert "\ufffd" not in re.sub(r"^\ufffd+|\ufffd+(?= What is)", "", before + after)


# ---- errors ----


@pytest.mark.parametrize(("name", "facts", "others"), [("own", 1, 0), ("heldout", 5, 4), ("bam", 1, 4)])
def test_too_short_a_length_names_what_is_needed(name, facts, others):
    tokenizer = TOKENIZERS["bpe-1k"]
    template, haystack = Template(name, facts, others), opened("own", tokenizer)
    with pytest.raises(ValueError, match=rf"length 10 .*'{name}'.*facts={facts}, .*\d+ tokens") as error:
        draw(template, 10, 0.5, 1, tokenizer, haystack)
    least = int(re.search(r"take (\d+) tokens", str(error.value))[1])
    prompt, answer = draw(template, least, 0.5, 1, tokenizer, haystack)  # what the error says is enough
    assert len(prompt) + (0 if name == "bam" else len(answer)) == least


def test_templates_refuse_what_they_cannot_state():
    for wrong, message in (
        ({"name": "heldot"}, "'heldot'.*'heldout'"),
        ({"facts": 2}, "'own'.*facts=2"),
        ({"distractors": -1}, "distractors.*-1"),
        ({"given": 1}, "'own'.*prefix_digits=1"),
        ({"name": "heldout", "values": "leters"}, "'leters'.*'letters'"),
        ({"name": "heldout", "values": "word", "distractors": 1}, "distractors.*'word'"),
        ({"values": "word"}, "'own'.*values='word'"),
    ):
        with pytest.raises(ValueError, match=message):
            Template(**wrong)


def test_haystacks_that_cannot_be_opened(tmp_path):
    tokenizer = TOKENIZERS["bytes"]
    with pytest.raises(ValueError, match=r"'gras'.*'grass'"):
        open_haystack("gras", tokenizer)
    with pytest.raises(FileNotFoundError, match=r"no file .*nothing\.txt"):
        open_haystack(f"file:{tmp_path}/nothing.txt", tokenizer)
    for content, message in (
        (b" \n\t ", "has no text"),
        ("caf\u00e9.".encode("latin-1"), "byte 0xe9 at 3"),
        (b"text.\0more", "byte 0x00 at 5"),
        (b"So it was. The pass\nkey is 11111. On.", "'pass key is 11111'"),
    ):
        (tmp_path / "wrong.txt").write_bytes(content)
        with pytest.raises(ValueError, match=rf"wrong\.txt'.*{message}"):
            open_haystack(f"file:{tmp_path}/wrong.txt", tokenizer)
    with pytest.raises(ValueError, match="'text' has no text"):
        open_haystack("text", tokenizer, [tokenizer.encode("")])
