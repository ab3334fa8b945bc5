"""Passkey documents: exact lengths, the number where it belongs, the same question in training and evaluation."""

from __future__ import annotations

import re

import numpy as np
import pytest

from modalities.text.passkey import FILLER, NUM_DIGITS, make_passkey, make_passkey_document, minimum_length
from modalities.text.tokenizers import load_tokenizer

BYTES = load_tokenizer()


def test_length_depth_and_digits():
    for length in (81, 82, 128, 129, 500, 4096):
        for depth in (0.0, 0.25, 0.5, 1.0):
            prompt, answer = make_passkey(length, depth, np.random.default_rng(length), BYTES)
            assert len(prompt) + len(answer) == length and len(answer) == NUM_DIGITS
            assert prompt.dtype == answer.dtype == np.int64 and prompt[0] == BYTES.bos_id
            text, key = BYTES.decode(prompt), BYTES.decode(answer)
            assert text.endswith("What is the pass key? The pass key is ")
            assert re.findall(r"\d+", text) == [key]
            # the tokens of filler ahead of the information are the asked share of all filler
            assert text.index(" The pass key is") == round(depth * (length - 81))


def test_a_128_byte_document_keeps_40_tokens_of_filler():
    assert minimum_length(BYTES) == 81
    assert 128 - minimum_length(BYTES) >= 40


def test_the_information_stands_between_whole_sentences():
    prompt, _ = make_passkey(600, 0.5, np.random.default_rng(3), BYTES)
    before, after = re.split(r" The pass key is \d{5}\. Remember it\.", BYTES.decode(prompt))
    assert any(before.endswith(sentence) for sentence in FILLER)
    assert any(after.startswith(sentence) for sentence in FILLER)


def test_random_parts_come_from_the_generator():
    same = [make_passkey(128, 0.3, np.random.default_rng(5), BYTES) for _ in range(2)]
    assert np.array_equal(same[0][0], same[1][0]) and np.array_equal(same[0][1], same[1][1])
    rng = np.random.default_rng(0)
    keys = {BYTES.decode(make_passkey(128, 0.3, rng, BYTES)[1]) for _ in range(64)}
    assert len(keys) > 60 and any(key.startswith("0") for key in keys)


def test_training_documents_ask_the_same_question_at_random_depths():
    rng = np.random.default_rng(1)
    depths = []
    for _ in range(200):
        document = make_passkey_document(129, rng, BYTES)
        assert document.shape == (129,) and document.dtype == np.int64
        text = BYTES.decode(document)
        first, last = re.findall(r"\d{5}", text)
        assert first == last and text.endswith(f"The pass key is {last}")
        depths.append(text.index(" The pass key is") / (129 - 81))
    assert np.histogram(depths, bins=4, range=(0, 1))[0].min() > 25


def test_one_token_per_digit_with_a_bpe_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(["is 48213. key is 482 13"] * 4, vocab_size=290, special_tokens=["<|endoftext|>"])
    model.save_model(str(tmp_path))
    tokenizer = load_tokenizer(f"gpt2:{tmp_path}")  # digits are not split here, and must be tokens of their own anyway
    prompt, answer = make_passkey(300, 0.5, np.random.default_rng(0), tokenizer)
    assert len(prompt) + len(answer) == 300 and len(answer) == 5
    assert tokenizer.decode(answer) in tokenizer.decode(prompt)


def test_errors():
    with pytest.raises(ValueError, match=r"\b80\b.*\b81\b"):
        make_passkey(80, 0.5, np.random.default_rng(0), BYTES)
    with pytest.raises(ValueError, match=r"depth 1\.5\b"):
        make_passkey(128, 1.5, np.random.default_rng(0), BYTES)
