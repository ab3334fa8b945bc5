"""Causal LMs of `transformers` under the evaluators of text: the numbers of the zoo's own,
tokenizers of each kind, limits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
import transformers
from transformers import AutoModelForCausalLM

import zoo
from modalities.analysis import analyse
from modalities.decoder.generation import generate
from modalities.decoder.llama import as_llama
from modalities.decoder.outside import OutsideDecoder, open_causal_lm
from modalities.paired import paired_rows, scores_by_unit
from modalities.text.evaluators import EVALUATORS
from modalities.text.hf import wrap
from modalities.text.prompts import Template, open_haystack, state_facts
from modalities.text.tokenizers import load_tokenizer
from modalities.tokenizers.outside import open_tokenizer, split_arm
from recipes.cell_store import outside_hash
from recipes.commands import CommandError
from recipes.models import find_outside, modality_of
from recipes.targets import find_targets
from tests.recipes.test_evaluate import invoke
from tests.refusals import refuses
from tests.text.outside_models import character_tokenizer, close, gpt2, llama_of, load
from zoo import create_model
from zoo.adapters.released import open_released

LETTERS = [*map(chr, range(32, 127)), "\n"]


@pytest.fixture(scope="module")
def zoo_model():
    return create_model("text_rope_tiny.facts").eval()


@pytest.fixture(scope="module")
def folders(zoo_model, tmp_path_factory):
    """The same weights as a Llama, and in our own format."""
    folder = tmp_path_factory.mktemp("outside")
    wrap(zoo_model).save_pretrained(folder / "own")
    return {"llama": llama_of(zoo_model, folder / "llama"), "own": str(folder / "own")}


def plain(tmp_path, **options):
    return gpt2(tmp_path / "gpt2", character_tokenizer(LETTERS, ["<e>"], eos="<e>"), **options)


MEASURED = {
    "perplexity": dict(lengths=(64, 256), samples=3),
    "passkey": dict(lengths=(128,), samples=1, depths=3),
    "heads": dict(length=96, samples=2),
    "sinks": dict(length=96, samples=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("llama", name) for name in MEASURED), ("own", "perplexity"), ("own", "heads")],
)
def test_rows_equal_zoo_model(name, kind, zoo_model, folders):
    """Rows are those of the zoo s own model."""
    evaluator = EVALUATORS[name](EVALUATORS[name].settings_class(**MEASURED[name]))
    mine, theirs = (
        evaluator.rows(dict(evaluator.run(model))) for model in (zoo_model, load(folders[kind]))
    )
    if name == "heads":  # parameters of priors are the zoo's alone
        shared = {"head", "layer", *(score.column for score in evaluator.scores)}
        mine, theirs = (
            [{k: v for k, v in row.items() if k in shared} for row in rows]
            for rows in (mine, theirs)
        )
    close(mine, theirs)


def test_generation_pads_left(zoo_model, folders):
    """Generation pads on the left and goes on from the cache."""
    prompts = [[256, *b"The pass key"], [256, *b"A"], [256, *b"One two three four"]]
    outside = load(folders["llama"])
    assert generate(outside, prompts, max_new_tokens=12) == generate(
        zoo_model, prompts, max_new_tokens=12
    )
    theirs = AutoModelForCausalLM.from_pretrained(folders["llama"])
    ids = torch.tensor([prompts[0]])
    written = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    assert (
        generate(outside, prompts[:1], max_new_tokens=12)[0] == written[0, ids.shape[1] :].tolist()
    )


def test_attention_is_seen_exactly(tmp_path):
    """Weights are those of transformers' own eager attention."""
    folder = plain(tmp_path)
    tokens = torch.arange(20)[None] + 2
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    wanted = eager(tokens, output_attentions=True).attentions
    outside = load(folder)
    for found, layer in zip(analyse(outside, tokens, full=True), wanted, strict=True):
        torch.testing.assert_close(found.weights.float(), layer.detach(), rtol=1e-4, atol=1e-6)
    assert outside.model.config._attn_implementation == "sdpa"  # as it was before


SHAPE = dict(
    vocab_size=120,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)
SHAPE |= dict(intermediate_size=64)
# They have tables of positions, biases by distance, sliding windows, experts.
KINDS = {
    "opt": dict(SHAPE, ffn_dim=64, word_embed_proj_dim=32),
    "gpt_neox": SHAPE,
    "gptj": dict(vocab_size=120, n_embd=32, n_layer=2, n_head=2, n_positions=64, rotary_dim=8),
    "bloom": dict(vocab_size=120, hidden_size=32, n_layer=2, n_head=2),
    "mistral": dict(SHAPE, num_key_value_heads=1, sliding_window=8),
    "granite": dict(SHAPE, logits_scaling=3.0),
    "mixtral": dict(SHAPE, num_key_value_heads=1, num_local_experts=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_read_in_parts(kind, tmp_path):
    """Models of each kind read in parts and padded."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind])).save_pretrained(
        tmp_path
    )
    character_tokenizer(LETTERS, ["<e>"], eos="<e>", model_max_length=64).save_pretrained(tmp_path)
    outside = load(tmp_path)
    tokens = torch.randint(0, 100, (2, 24))
    assert outside.config.train_context == 64
    assert (outside.config.max_context == 64) == (kind in ("opt", "gptj"))
    same = dict(rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        whole = outside.model(tokens).logits.float()
        torch.testing.assert_close(outside(tokens), whole, **same)
        cache = outside.new_cache()
        parts = []
        for start, stop in ((0, 12), (12, 20), (20, 21), (21, 24)):
            mark = cache.mark()
            outside.forward_features(tokens[:, :5], cache=cache)
            cache.rewind(mark)
            parts.append(outside.forward_features(tokens[:, start:stop], cache=cache))
        torch.testing.assert_close(outside.forward_head(torch.cat(parts, dim=1)), whole, **same)
        padding = torch.zeros_like(tokens)
        padding[0, :7] = -1
        short = outside.model(tokens[:1, 7:]).logits.float()
        torch.testing.assert_close(outside(tokens, segments=padding)[:1, 7:], short, **same)
    if kind in ("bloom", "gptj"):
        refuses(f"attention of {kind} cannot be seen: [01] of 2 layers", analyse, outside, tokens)
    else:
        assert len(analyse(outside, tokens)) == 2


def tokenizer_of(tmp_path, *specials, **options):
    inner = character_tokenizer([*LETTERS, "▁"], specials, **options)
    if options.get("truncation_side"):
        inner.backend_tokenizer.enable_truncation(8, direction="left")
    inner.save_pretrained(tmp_path)
    return load_tokenizer(f"hf:{tmp_path}")


def test_ids_come_back(tmp_path):
    """Nothing is cut off and ids come back."""
    tokenizer = tokenizer_of(
        tmp_path, "<e>", eos="<e>", truncation_side="left", model_max_length=32
    )
    text = "The mill wheel turns again. " * 4
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (
        tokenizer.decode([tokenizer.vocab_size + 3, *tokenizer.encode("a")]) == "a"
    )  # a padded output layer
    assert [len(ids) for ids in tokenizer.encode_many(["ab", "abcd"])] == [2, 4]
    spaced = tokenizer_of(tmp_path / "spaced", "<b>", bos="<b>", adds_bos=True, spaces=True)
    prompt, answer, *_ = Template().draw(
        900, 0.5, np.random.default_rng(0), spaced, open_haystack("own", spaced)
    )
    assert len(prompt) + len(answer) == 900
    assert prompt[prompt == spaced.bos_id].tolist() == [spaced.bos_id]
    assert "  " not in spaced.decode(prompt)
    assert spaced.decode(answer).strip().isdigit()
    refuses("no bos_token, eos_token or cls_token", tokenizer_of, tmp_path / "none")


def test_position_table_is_limit(tmp_path, folders):
    """A table of positions is the limit."""
    folder = plain(tmp_path, positions=512)
    model = load(folder)
    assert model.config.max_context == 512
    assert load(folders["llama"]).config.max_context is None
    perplexity = EVALUATORS["perplexity"]
    assert perplexity().lengths_for(model) == (512,)  # default lengths end there
    with pytest.raises(
        ValueError, match="length 1024 is beyond the 512 positions that the model has"
    ):
        perplexity(perplexity.settings_class(lengths=(1024,))).points(model)
    with pytest.raises(ValueError, match=r"has positions for 512 tokens and is given 513"):
        model.forward_features(torch.zeros(1, 513, dtype=torch.int64))
    done = invoke(
        f"hf:{folder}", "passkey", "--lengths", "600", "--samples", 1, "--out", tmp_path / "out"
    )
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "512 positions" in done.stderr


@pytest.mark.slow
def test_command_measures_outside_models(tmp_path, folders):
    """The command measures models that are not ours."""
    out = tmp_path / "out"
    words = (
        "perplexity",
        "--lengths",
        "64",
        "--samples",
        2,
        "--out",
        out,
        "--against",
        "text_rope_tiny.facts",
    )
    assert (done := invoke(f"hf:{folders['llama']}", *words)).exit_code == 0, done.stderr
    (results,) = [json.loads(path.read_text()) for path in (out / "perplexity").glob("hf_*.json")]
    assert results["label"] == f"hf:{folders['llama']}"
    assert (out / "perplexity.paired.csv").exists()


def test_modality_and_forced_forms(folders, tmp_path):
    llama = folders["llama"]
    assert modality_of(f"hf:{llama}") == modality_of(f"hf:text:{llama}") == "text"
    assert find_outside(f"hf:text:{llama}")[::2] == ("text", llama)
    assert find_outside("text_x") is None
    refuses("hf has no models of vision", find_outside, f"hf:vision:{llama}", error=CommandError)
    character_tokenizer("xyz", ["<e>"], eos="<e>").save_pretrained(tmp_path / "strange")
    refuses(
        "read none of text, dna; to insist, hf:text:",
        find_outside,
        f"hf:{tmp_path}/strange",
        error=CommandError,
    )


def test_unopened_model_is_one_line(tmp_path, folders, monkeypatch):
    """What cannot be opened is one line."""

    def refused(word, *options):
        done = invoke(word, "perplexity", *options, "--out", tmp_path / "out")
        assert done.exit_code == 2, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    assert "no such folder" in refused(f"hf:{tmp_path}/nowhere", "--lengths", "64")
    monkeypatch.setattr(
        "huggingface_hub.model_info", lambda name, **_: (_ for _ in ()).throw(ConnectionError())
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out_llama").mkdir()
    assert "did you mean 'out_llama'?" in refused("hf:out_lama")
    (tmp_path / "empty").mkdir()
    assert "no tokenizer can be opened" in refused(f"hf:{tmp_path}/empty")
    assert "llama has no field 'ssmax'" in refused(f"hf:{folders['llama']}", "--set", "ssmax=true")
    for arm, what in (("yarn=-1", "expected a positive"), ("sinks=4", "one of window and soft")):
        assert what in refused(f"hf:{folders['llama']}@{arm}")
    own = tmp_path / "code"
    own.mkdir()
    (own / "config.json").write_text(
        json.dumps({"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd"}})
    )
    (own / "odd.py").write_text("raise SystemExit('run')")
    character_tokenizer(LETTERS, ["<e>"], eos="<e>").save_pretrained(own)
    assert "never run" in refused(f"hf:{own}")


@pytest.mark.parametrize("kind", ["Llama", "OPT"])
def test_packed_documents_stay_apart(kind):
    """OPT makes no mask from position_ids, so its documents are read one by one."""
    sizes = dict(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**sizes)
    )
    decoder = OutsideDecoder(zoo.adapt(model, "alibi"), "model")
    tokens = torch.randint(3, 60, (2, 20))
    apart = [decoder.forward_features(part) for part in (tokens[:, :12], tokens[:, 12:])]
    packed = decoder.packed_features(tokens, (torch.arange(20) % 12).expand(2, -1))
    torch.testing.assert_close(packed, torch.cat(apart, dim=1))
    assert decoder.separates == (kind == "Llama")


def test_peft_with_priors_is_refused(tmp_path, folders):
    """Neither may be lost without a word."""
    peft = pytest.importorskip("peft")
    model = zoo.adapt(open_causal_lm(folders["llama"]), "ggd", options={"init": "alibi"})
    settings = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["position_bias"], task_type="CAUSAL_LM"
    )
    adapter = peft.get_peft_model(model, settings)
    refuses("merge_and_unload", zoo.save_adapted, adapter, tmp_path / "lost")
    adapter.save_pretrained(tmp_path / "adapter")
    open_tokenizer(folders["llama"]).save_pretrained(tmp_path / "adapter")
    refuses(r"its adapter of PEFT has priors", open_causal_lm, str(tmp_path / "adapter"))


ARMS = {
    "yarn=2": {"rope_type": "yarn", "factor": 2.0},
    "linear=2": {"rope_type": "linear", "factor": 2.0},
    "rope_parameters.rope_theta=500.0": {"rope_theta": 500.0},
}


@pytest.mark.parametrize("arm", ARMS)
def test_settings_equal_saved_folder(arm, tmp_path, folders):
    """By --set they are the same model, and another one for the store of finished cells than the
    folder's own."""
    config = json.loads((Path(folders["llama"]) / "config.json").read_text())
    config["rope_parameters"] |= ARMS[arm]
    saved = AutoModelForCausalLM.from_pretrained(folders["llama"])
    saved = type(saved)(type(saved.config)(**config)).eval()
    saved.load_state_dict(AutoModelForCausalLM.from_pretrained(folders["llama"]).state_dict())
    tokens = torch.randint(0, 256, (1, 300))
    own = load(folders["llama"])
    named = load(f"{folders['llama']}@{arm}")
    torch.testing.assert_close(named(tokens), saved(tokens).logits)
    assert named.config.tokenizer == own.config.tokenizer
    assert outside_hash(named) != outside_hash(own)
    if arm.startswith("rope_parameters"):
        (target,) = find_targets(
            [f"hf:{folders['llama']}"], {"rope_parameters": {"rope_theta": 5e2}}, "cpu", "float32"
        )
        assert torch.equal(target.model(tokens), named(tokens))
        assert target.label.endswith("rope_theta=500.0")


@pytest.mark.slow
@torch.inference_mode()
def test_recall_equals_plain_loop(folders):
    """Each question after its own whole reading; intervals of a paired comparison are t-intervals
    over documents."""
    recall = EVALUATORS["recall"]
    arms = ("", "@yarn=2")
    settings = recall.settings_class(lengths=(300, 600), questions=3, samples=3)
    tokenizer = load_tokenizer(f"hf:{folders['llama']}")
    scores = []
    own = []
    for arm in arms:
        evaluator = recall(settings)
        model = load(folders["llama"] + arm)
        cells = {cell.name: cell for cell in evaluator.cells(model)}
        measured = dict(evaluator.run(model))
        scores.append(
            scores_by_unit(
                one for name in cells for one in evaluator.observed(name, measured[name])
            )
        )
        plain = open_released(folders["llama"], split_arm(arm.replace("@", "x@"))[1]).eval()
        for cell in cells.values():
            rng = np.random.default_rng([settings.seed, cell.data["document"]])
            text, _, facts = state_facts(cell.data["text"].tokens, 600, 3, rng, tokenizer)
            for length in (300, 600):
                stop = length - 600 + len(text)
                right = []
                nats = []
                exact = []
                for fact in (fact for fact in facts if fact.end <= stop):
                    ids = np.concatenate([text[:stop], fact.question, fact.answer])
                    logits = (
                        plain(torch.as_tensor(ids)[None])
                        .logits[0, -1 - len(fact.answer) : -1]
                        .double()
                    )
                    answer = torch.as_tensor(fact.answer)
                    nats += torch.nn.functional.cross_entropy(
                        logits, answer, reduction="none"
                    ).tolist()
                    right += (logits.argmax(-1) == answer).tolist()
                    exact.append(all(right[-len(answer) :]))
                unit = str(cell.data["document"])
                assert scores[-1][length, "nats"][unit] == pytest.approx(np.mean(nats), abs=1e-4)
                assert scores[-1][length, "tokens_right"][unit] == np.mean(right)
                assert scores[-1][length, "exact"][unit] == np.mean(exact)
                own.append((arm, length, np.mean(nats)))
    rows = {
        (row["score"], row["length"]): row for row in paired_rows(scores[1:], scores[:1], "length")
    }
    for length in (300, 600):
        plain, scaled = (
            np.array([x for a, n, x in own if (a, n) == (arm, length)]) for arm in arms
        )
        # t(0.975, 2)
        middle = (scaled - plain).mean()
        half = 4.302653 * (scaled - plain).std(ddof=1) / 3**0.5
        row = rows["nats", length]
        assert row["units"] == 3
        assert [row[x] for x in ("difference", "low", "high")] == pytest.approx(
            [middle, middle - half, middle + half], abs=3e-4
        )


def test_dynamic_scaling_per_length(folders):
    """What a longer text did to the angles is gone."""
    model = load(f"{folders['llama']}@ntk=2")
    recall = EVALUATORS["recall"]
    evaluator = recall(recall.settings_class(lengths=(300, 600), questions=3, samples=1))
    (cell,) = evaluator.cells(model)
    assert cell.cost == 900
    assert evaluator.measure(model, cell)["found"][1]["nll_sum"]
    first, again = (evaluator.measure(model, cell)["found"] for _ in range(2))
    assert all(a | {"seconds": 0} == b | {"seconds": 0} for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("arm", ["window=40", "soft=40,sinks=2"])
def test_limited_reach_in_parts(arm, folders):
    """A limited reach in one reading and in parts."""
    model = load(f"{folders['llama']}@{arm}")
    tokens = torch.randint(0, 256, (1, 20 + 80 * model.config.num_layers))
    cache = model.new_cache()
    with torch.inference_mode():
        whole = model(tokens)
        changed = model(torch.cat([tokens[:, :2], tokens[:, :18] * 0, tokens[:, 20:]], dim=1))
        parts = [
            model.forward_features(tokens[:, part], cache=cache)
            for part in (slice(0, 70), slice(70, None))
        ]
    torch.testing.assert_close(
        model.forward_head(torch.cat(parts, dim=1)), whole, rtol=1e-4, atol=1e-4
    )
    assert not torch.equal(whole[:, 21], changed[:, 21])
    torch.testing.assert_close(whole[:, -1], changed[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_adapter_measured_by_name(folders, tmp_path, monkeypatch):
    """An adapter is measured by its own name and on a base."""
    zoo.save_adapted(
        open_released(folders["llama"], {"soft": "40", "yarn": "2"}), tmp_path / "adapter"
    )
    tokens = torch.randint(0, 256, (1, 60))
    wanted, further = (
        load(f"{folders['llama']}@soft=40,yarn={factor}")(tokens) for factor in (2, 4)
    )
    monkeypatch.setattr(zoo.adapters, "WEIGHTS", tmp_path)  # as one that ships
    for adapter in (str(tmp_path / "adapter"), "adapter"):
        assert torch.equal(load(adapter)(tokens), wanted)
        assert torch.equal(load(f"{folders['llama']}@adapter={adapter}")(tokens), wanted)
        assert torch.equal(load(f"{folders['llama']}@yarn=4,adapter={adapter}")(tokens), further)
        assert torch.equal(load(f"{adapter}@yarn=4")(tokens), further)
        refuses("no field 'bogus'", load, f"{adapter}@bogus=1")
        refuses("soft and sinks do not apply", load, f"{adapter}@soft=9")
    zoo.adapt(open_causal_lm(folders["llama"]), "ggd").save_pretrained(tmp_path / "whole")
    open_tokenizer(folders["llama"]).save_pretrained(tmp_path / "whole")
    refuses("takes no settings, got yarn", load, f"{tmp_path}/whole@yarn=4")
    assert modality_of(f"hf:{tmp_path}/adapter") == "text"


@pytest.mark.slow
def test_gguf_file_is_a_base(tmp_path, zoo_model):
    """Opened by its name it is the model that was written; adapted, saved whole and generated
    from."""
    gguf = pytest.importorskip("gguf")
    llama = as_llama(zoo_model)
    file = str(tmp_path / "tiny.gguf")
    config = llama.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ", "ab"]
    letters += [f"<{n}>" for n in range(len(letters), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_types([1] * len(letters))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(config.vocab_size - 1)
    writer.add_eos_token_id(config.vocab_size - 1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in llama.state_dict().items():
        if name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):  # llama.cpp pairs columns in another order
            value = (
                value.view(config.num_attention_heads, 2, -1, config.hidden_size)
                .transpose(1, 2)
                .reshape(value.shape)
            )
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens = torch.randint(0, 256, (1, 60))
    torch.testing.assert_close(
        load(file)(tokens), llama(tokens).logits.detach(), rtol=1e-4, atol=1e-4
    )
    zoo.save_adapted(open_released(file, {"soft": "40", "yarn": "2"}), tmp_path / "adapter")
    assert torch.equal(load(tmp_path / "adapter")(tokens), load(f"{file}@soft=40,yarn=2")(tokens))
    open_released(file).save_pretrained(tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert torch.equal(whole(tokens).logits, open_released(file)(tokens).logits)
