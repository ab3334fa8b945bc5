"""Text models in `transformers`: logits, loss, Trainer, generation with the cache, adapters, int8,
files of a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from modalities.text import CausalLM
from modalities.text.tokenizers import load_tokenizer
from tests.launching import ROOT, command
from tests.refusals import refuses
from tests.text.test_model import small as small_model
from zoo.priors import Prior

transformers = pytest.importorskip("transformers")
from modalities.text import hf  # noqa: E402

FEW = [
    "goat",
    "cable",
    "ggd",
    "fire",
    "rope",
]  # lanes, a running sum, a table, a dense bias, a rotation
GREEDY = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
BOS = 256
PAD = 258


def small(method: str = "goat", **options) -> CausalLM:
    """A two-layer model of bytes in float32 whose priors are moved off their inits."""
    options = dict(vocab_size=264, tokenizer="bytes", ssmax=True) | options
    return small_model(f"text_{method}_tiny", torch.float32, **options)


@pytest.fixture(scope="module")
def models():
    model = small()
    return model, hf.wrap(model)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(3))


def padded() -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Two prompts, and the same as a batch with padding on the left and its mask."""
    prompts = [[BOS, 65, 66, 67, 70, 71, 65, 66], [BOS, 80, 66]]
    ids = torch.tensor([prompts[0], [PAD] * 5 + prompts[1]])
    return prompts, ids, (ids != PAD).long()


# Logits, outputs and arguments


@torch.no_grad()
def test_same_logits_loss_and_padding(models, tokens) -> None:
    model, wrapped = models
    out = wrapped(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(out.logits, model(tokens))
    torch.testing.assert_close(
        out.loss, F.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    )
    left, right = (F.pad(torch.ones_like(tokens), sides) for sides in ((3, 0), (0, 3)))
    for mask, part in ((left, slice(3, None)), (right, slice(0, 12))):
        ids = torch.zeros(2, 15, dtype=torch.int64)
        ids[:, part] = tokens
        logits = wrapped(ids, attention_mask=mask).logits[:, part]
        torch.testing.assert_close(logits, out.logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_requested_outputs(models, tokens) -> None:
    """Outputs that may be asked for."""
    model, wrapped = models
    out = wrapped(tokens, output_hidden_states=True)
    assert [tuple(state.shape) for state in out.hidden_states] == [(2, 12, 64)] * 3
    assert torch.equal(out.hidden_states[0], model.embedding(tokens))
    torch.testing.assert_close(model.forward_head(out.hidden_states[-1]), out.logits)
    full = wrapped(tokens).logits
    assert torch.allclose(wrapped(tokens, logits_to_keep=3).logits, full[:, -3:], atol=1e-5)
    assert torch.allclose(
        wrapped(tokens, logits_to_keep=torch.tensor([0, 5])).logits, full[:, [0, 5]], atol=1e-5
    )
    assert torch.equal(wrapped(inputs_embeds=model.embedding(tokens)).logits, full)
    assert torch.equal(wrapped(tokens, return_dict=False, use_cache=False)[0], full)


def test_unserved_is_named(models, tokens) -> None:
    """What is not served is named."""
    _, wrapped = models
    for name in ("position_ids", "token_type_ids", "encoder_hidden_states"):
        refuses(name, wrapped, tokens, **{name: tokens}, error=TypeError)
        refuses(
            name,
            wrapped.generate,
            tokens,
            **{name: tokens},
            **GREEDY,
            error=(TypeError, ValueError),
        )
    for kind in ("static", "quantized", "offloaded"):
        refuses(
            r"new_cache\(tokens\)", wrapped.generate, tokens, cache_implementation=kind, **GREEDY
        )
    for call, message in (
        (
            lambda: wrapped(tokens, past_key_values=transformers.DynamicCache()),
            "DynamicCache; expected a cache that",
        ),
        (
            lambda: wrapped(tokens, attention_mask=torch.ones(2, 3)),
            r"shape \(2, 3\); expected \(2, 12\)",
        ),
        (wrapped, "either input_ids or inputs_embeds"),
        (lambda: wrapped(tokens, output_attentions=True), "modalities.analysis"),
        (lambda: hf.PriorzooTextConfig(vocab_size=7), "disagrees with architecture"),
        (lambda: hf.PriorzooTextConfig(architecture={"depth": 3}), "depth"),
    ):
        refuses(message, call, error=(TypeError, ValueError))


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_resized_and_saved(tied, tokens, tmp_path) -> None:
    wrapped = hf.wrap(small(tied=tied))
    before = wrapped(tokens).logits
    wrapped.resize_token_embeddings(270)
    logits = wrapped(tokens).logits
    assert logits.shape[-1] == 270
    assert torch.equal(logits[..., :264], before)
    wrapped.save_pretrained(tmp_path)
    assert torch.equal(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, logits
    )


@pytest.mark.slow
@torch.no_grad()
def test_compiles_to_one_graph(tokens) -> None:
    """Compiles to one graph whatever the mask holds."""
    torch._dynamo.reset()
    wrapped = hf.wrap(small(num_layers=1))
    compiled = torch.compile(wrapped, fullgraph=True, backend="eager")
    for mask in (
        torch.ones_like(tokens),
        torch.ones_like(tokens).index_fill(1, torch.arange(3), 0),
    ):
        out, expected = (
            call(tokens, attention_mask=mask, use_cache=False).logits
            for call in (compiled, wrapped)
        )
        torch.testing.assert_close(out[:, 3:], expected[:, 3:], atol=1e-5, rtol=1e-5)


# Generation


@pytest.mark.parametrize("method", FEW)
@torch.no_grad()
def test_generation_equals_ours(method, tmp_path) -> None:
    """Left padding, greedy; then the model that was saved, also in bfloat16, where priors stay in
    float32."""
    model = small(method)
    wrapped = hf.wrap(model)
    prompts, ids, mask = padded()
    written = wrapped.generate(ids, attention_mask=mask, **GREEDY)[:, 8:].tolist()
    assert written == model.generate(prompts, max_new_tokens=6)
    wrapped.save_pretrained(tmp_path)
    assert torch.equal(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, wrapped(ids).logits
    )
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for m in half.modules() if isinstance(m, Prior) for p in m.parameters()} <= {
        torch.float32
    }
    assert (half(ids).logits - wrapped(ids).logits).abs().max() < 0.1


@pytest.mark.parametrize("method", FEW[:3])
@torch.no_grad()
def test_beams_lookup_and_assistants(method) -> None:
    """Beams with the cache are those without it; drafts change nothing, whoever makes them."""
    wrapped = hf.wrap(small(method))
    other = hf.wrap(small("nope"))
    _, ids, mask = padded()
    beams = dict(num_beams=3, attention_mask=mask, **GREEDY)
    found = wrapped.generate(ids, **beams)
    assert torch.equal(found, wrapped.generate(ids, use_cache=False, **beams))
    expected = wrapped.generate(ids[:1], **GREEDY)
    drafts = [dict(prompt_lookup_num_tokens=3), dict(assistant_model=other)]
    for draft in [*drafts, dict(assistant_model=wrapped)]:
        assert torch.equal(wrapped.generate(ids[:1], **draft, **GREEDY), expected)
    assert torch.equal(wrapped.generate(ids, past_key_values=wrapped.new_cache(32), **beams), found)


@torch.no_grad()
def test_turns_and_stop_strings(models) -> None:
    _, wrapped = models
    _, ids, _ = padded()
    first = wrapped.generate(ids[:1], return_dict_in_generate=True, **GREEDY)
    longer = torch.cat(
        [first.sequences, ids[:1, :2]], dim=1
    )  # a second turn reads what is new alone
    again = wrapped.generate(longer, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(again, wrapped.generate(longer, **GREEDY))
    written = first.sequences[:, 8:]
    assert torch.equal(
        wrapped.generate(inputs_embeds=wrapped.model.embedding(ids[:1]), **GREEDY), written
    )
    tokenizer = hf.fast_tokenizer("bytes")
    stop = dict(stop_strings=[tokenizer.decode(written[0, 1:2])], tokenizer=tokenizer)
    assert len(wrapped.generate(ids[:1], **stop, **GREEDY)[0, 8:]) <= 2


# Trainer, adapters, int8


class Rows(torch.utils.data.Dataset):
    """Rows of random bytes with different numbers of labels."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(n))
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(20) < n, -100)}


def test_base_model_of_transformers(tokens) -> None:
    """TRL computes losses from its features and the head, in a forward of its own."""
    wrapped = hf.wrap(small()).train()
    expected = wrapped(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    wrapped.forward = lambda **inputs: (
        wrapped.base_model(**inputs, use_cache=False).last_hidden_state
    )
    assert isinstance(wrapped.base_model, transformers.PreTrainedModel)
    assert wrapped.base_model.training
    features = wrapped(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    torch.testing.assert_close(wrapped.get_output_embeddings()(features), expected)
    features.sum().backward()
    assert wrapped.get_input_embeddings().weight.grad is not None
    assert not wrapped.eval().base_model.training
    assert {*map(id, wrapped.base_model.parameters())} == {*map(id, wrapped.parameters())}


def trainer(folder: Path, rows: int = 16, steps: int = 1):
    pytest.importorskip("accelerate")
    options = dict(
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=steps,
        max_steps=1,
        logging_steps=1,
    )
    options |= dict(
        weight_decay=0.1, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True
    )
    model = hf.wrap(small(num_layers=1)).train()
    arguments = transformers.TrainingArguments(str(folder), **options)
    return transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())


@pytest.mark.slow
def test_accumulation_changes_nothing(tmp_path) -> None:
    """Of rows with different numbers of labels, which are padded on the right."""
    results = []
    for rows, steps in ((16, 1), (2, 8)):
        run = trainer(tmp_path, rows, steps)
        tokenizer = hf.fast_tokenizer("bytes")
        tokenizer.padding_side = "right"
        run.data_collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        run.train_dataset = [tokenizer("a" * (4 + n % 7)) for n in range(16)]
        run.train()
        [log] = [log for log in run.state.log_history if "grad_norm" in log]
        results.append((log["loss"], log["grad_norm"]))
    assert results[0][0] < 7
    assert results[1] == pytest.approx(results[0], rel=1e-6)


def test_trainer_decays_no_prior(tmp_path) -> None:
    """Trainer decays no prior and evaluates."""
    run = trainer(tmp_path)
    run.create_optimizer()
    names = {id(p): name.removeprefix("model.") for name, p in run.model.named_parameters()}
    groups = {
        group["weight_decay"]: {names[id(p)] for p in group["params"]}
        for group in run.optimizer.param_groups
    }
    assert groups[0.0] == run.model.model.no_weight_decay()
    assert any(name.endswith("ssmax.s") for name in groups[0.0])
    assert any(".prior." in name for name in groups[0.0])
    assert groups[0.1] == set(names.values()) - groups[0.0]
    other = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)
    )  # is decayed as before
    assert run.get_decay_parameter_names(other) == ["0.weight"]
    run.args.prediction_loss_only = False
    assert run.evaluate()["eval_loss"] == pytest.approx(
        float(run.predict(Rows()).metrics["test_loss"])
    )


@pytest.mark.parametrize("method", FEW[:2])
def test_adapters_on_every_linear_layer(method, tokens) -> None:
    peft = pytest.importorskip("peft")
    wrapped = hf.wrap(small(method))
    before = wrapped(tokens).logits
    adapted = peft.get_peft_model(
        wrapped, peft.LoraConfig(target_modules="all-linear", r=2, task_type="CAUSAL_LM")
    )
    assert torch.equal(adapted(input_ids=tokens).logits, before)
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    moved = {name: p.grad for name, p in adapted.named_parameters() if "lora_B" in name}
    assert len(moved) >= 14
    assert all(grad is not None and grad.abs().sum() > 0 for grad in moved.values())


# Tokenizers and folders


FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
FILES |= {"modeling_priorzoo.py"}

READ = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
assert "modalities" not in sys.modules
folder, more = sys.argv[1], {"trust_remote_code": True}
config = AutoConfig.from_pretrained(folder, **more)
tokens = AutoTokenizer.from_pretrained(folder, **more)(["The people", "a"], padding=True, return_tensors="pt")
assert AutoModel.from_pretrained(folder, **more)(**tokens).last_hidden_state.shape == (2, 11, config.hidden_size)
model = AutoModelForCausalLM.from_pretrained(folder, **more)
from transformers import Trainer, pipeline
write = pipeline("text-generation", folder, device="cpu", **more)
written = write(["The people", "a"], batch_size=2, max_new_tokens=5, do_sample=False)
model.save_pretrained(folder + "/again")
print([one["generated_text"] for [one] in written])
"""


@pytest.mark.slow
def test_fresh_process_reads_folder(tmp_path) -> None:
    """The folder's own file imports the package. Trainer is importable afterwards."""
    model = small()
    hf.wrap(model).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    where = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    printed = command([sys.executable, "-c", READ, str(tmp_path)], folder=tmp_path, **where)
    tokenizer = load_tokenizer("bytes")
    prompts = ["The people", "a"]
    written = model.generate(
        [[BOS, *tokenizer.encode(p)] for p in prompts], max_new_tokens=5, eos_id=257
    )
    expected = [p + tokenizer.decode(new) for p, new in zip(prompts, written, strict=True)]
    assert printed.splitlines()[-1] == str(expected)
    assert {path.name for path in (tmp_path / "again").iterdir()} == FILES
