"""`zoo.adapt`: priors in small models of transformers and timm, made on the spot."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import modalities.vision  # noqa: F401 - makes timm importable beside a CPU build of torch
import zoo
from tests.refusals import refuses
from zoo.adapters import hf, layer
from zoo.adapters.layer import LayerPrior
from zoo.positions import Positions

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm.optim") and pytest.importorskip("timm")

SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
IMAGES = SIZES | dict(image_size=32, patch_size=8)
SIZES |= dict(vocab_size=60, max_position_embeddings=64)
GROUPED = SIZES | dict(num_key_value_heads=2)
SPECIAL = dict.fromkeys([f"{role}_token_id" for role in ("pad", "bos", "eos", "cls", "sep")], 0)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
OPT = {key: value for key, value in SIZES.items() if key != "intermediate_size"} | dict(ffn_dim=48)
CLIP = {"text_config": SIZES, "vision_config": IMAGES}
GREEDY: dict[str, Any] = dict(do_sample=False, pad_token_id=0, eos_token_id=None)


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED | more))


DECODERS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GROUPED)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**GROUPED, head_dim=16)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=64)
    ),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**OPT)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **GROUPED, head_dim=16, sliding_window=64, query_pre_attn_scalar=9
        )
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **GROUPED, head_dim=16, num_local_experts=2, num_experts_per_tok=1, rope_parameters=ROPE
        )
    ),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES)),
    "llama4": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **GROUPED, head_dim=16, intermediate_size_mlp=48, num_local_experts=2
        )
    ),
}
ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "modernbert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(**SIZES, local_attention=64, **SPECIAL)
    ),
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**IMAGES)),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**IMAGES)),
    "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**IMAGES)),
    "dinov3": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**IMAGES, num_register_tokens=2)
    ),
    "timm": lambda: timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        dynamic_img_size=True,
    ),
}
EVERY = DECODERS | ENCODERS
LINES = [*DECODERS, "bert", "modernbert"]


def make(name: str) -> Any:
    torch.manual_seed(0)
    return EVERY[name]().eval()


def input_of(name: str, *, batch: int = 2, length: int = 17) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if name in LINES:
        return torch.randint(3, 60, (batch, length), generator=generator)
    return torch.randn(batch, 3, 32, 40 if name in ("dinov3", "timm") else 32, generator=generator)


def output(model: nn.Module, given: Tensor, **more: Any) -> Tensor:
    out = model(given, **more)
    return out if isinstance(out, Tensor) else out[0]


def disturb(model: nn.Module, std: float = 0.5) -> None:
    """Move every prior's parameters off their start, the same in all layers."""
    layers = [module for module in model.modules() if isinstance(module, LayerPrior)]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in layers[0].prior.parameters():
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))
        for layer in layers[1:]:
            layer.load_state_dict(layers[0].state_dict())


@pytest.mark.parametrize(
    ("name", "position"),
    [(name, ("ggd_goat", "ggd", "goat")[n % 3]) for n, name in enumerate(EVERY)],
)
def test_uniform_prior_changes_nothing(name: str, position: str) -> None:
    """A uniform prior changes no bit."""
    model = make(name)
    given = input_of(name)
    before = output(model, given).detach()
    position = "ggd2d" if position == "ggd" and name not in LINES else position
    zoo.adapt(model, position)
    limit = 1e-6 if name == "gpt_oss" else 0.0  # attention with learned sinks is the zoo's own
    assert (output(model, given) - before).abs().max() <= limit
    with torch.no_grad():
        assert (output(model, given) - before).abs().max() <= limit
    disturb(model)
    assert (output(model, given) - before).abs().max() > 3e-5


@pytest.mark.parametrize(
    "name", [name for name in LINES if name != "opt"]
)  # which takes its positions from the mask
def test_prior_is_added_to_logits(name: str) -> None:
    """Against the model itself with K as an additive mask, in float64 where its experts are
    served."""
    dtype, limit = (torch.float32, 1e-6) if name == "gpt_oss" else (torch.float64, 1e-9)
    model = make(name).to(dtype)
    given = input_of(name)
    adapted = zoo.adapt(copy.deepcopy(model), "ggd" if name == "gpt_oss" else "ggd_goat").to(dtype)
    disturb(adapted)
    layer = next(m for m in adapted.modules() if isinstance(m, LayerPrior))
    line = Positions.line(given.shape[1])
    causal = name in DECODERS
    bias = layer.prior.log_prior(line, line, causal=causal).detach().to(dtype)
    bias -= (
        0.0 if layer.level is None else layer.level[:, None, None]
    )  # where there are learned sinks
    if causal:
        bias = bias.masked_fill(torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1), -1e30)
    expected = output(model, given, attention_mask=bias.expand(2, -1, -1, -1))
    assert (output(adapted, given) - expected).abs().max() < limit


@pytest.mark.parametrize("name", ["vit", "siglip", "dinov2", "dinov3", "timm"])
def test_image_prior_on_grid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prior of images is on their grid."""
    given = input_of(name).double()
    attend = LayerPrior.attend
    shapes = []
    adapted = zoo.adapt(make(name).double(), "ggd_goat").double()
    disturb(adapted)

    def checked(
        module: LayerPrior, without: Any, q: Tensor, k: Tensor, v: Tensor, at: Any, **options: Any
    ) -> Tensor:
        result = attend(module, without, q, k, v, at, **options)
        prefix = at[1].num_prefix
        bias = module.prior.log_prior(*at, causal=False)[0]
        bias[:, prefix:, prefix:] -= module.level[:, None, None]
        torch.testing.assert_close(
            result, (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v, rtol=0, atol=1e-9
        )
        shapes.append(at[1].shape)
        return result

    monkeypatch.setattr(LayerPrior, "attend", checked)
    with torch.no_grad():
        output(adapted, given)
    assert shapes == [(4, given.shape[-1] // 8)] * 2


@pytest.mark.parametrize(
    ("name", "position"),
    [(name, ("ggd_goat", "alibi", "fire")[n % 3]) for n, name in enumerate(DECODERS)],
)
def test_cached_generation_is_uncached_generation(name: str, position: str) -> None:
    model = zoo.adapt(make(name), position)
    disturb(model)
    given = input_of(name, length=9)
    options = GREEDY | dict(max_new_tokens=12, attention_mask=torch.ones_like(given))
    plain = model.generate(given, use_cache=False, **options)
    assert torch.equal(model.generate(given, **options), plain)
    assert torch.equal(model.generate(given, cache_implementation="static", **options), plain)


@pytest.mark.parametrize("name", DECODERS)
def test_left_padding_moves_nothing(name: str) -> None:
    """Rows of different lengths, by a prior that knows absolute positions, and by one that does
    not."""
    for position in ("ggd_goat", "ggd"):
        model = zoo.adapt(make(name), position, ssmax=True)
        disturb(model)
        given = input_of(name, batch=1, length=9)
        padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), given], dim=1)
        mask = (padded > 0).long()
        options = GREEDY | dict(max_new_tokens=8)
        alone = model.generate(given, attention_mask=torch.ones_like(given), **options)
        assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 4:], alone)
        at = (mask.cumsum(-1) - 1).clamp(min=0)
        error = output(model, padded, attention_mask=mask, position_ids=at)[:, 4:] - output(
            model, given
        )
        assert error.abs().max() < 1e-4


@pytest.mark.parametrize("options", [{}, {"sinks": 2}], ids=str)
def test_packed_documents_are_documents_alone(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kernels without a T × S mask, with the numbers and gradients of one."""
    model = zoo.adapt(make("llama"), "ggd_goat", options=options, ssmax=True)
    disturb(model)
    given = input_of("llama", batch=1, length=20)
    masks = []
    at = torch.cat([torch.arange(12), torch.arange(8)])[None]
    attention = layer.prior_attention
    monkeypatch.setattr(
        layer, "prior_attention", lambda *a, **o: masks.append(o["mask"]) or attention(*a, **o)
    )
    packed = output(model, given, position_ids=at, use_cache=False)
    apart = torch.cat([output(model, given[:, :12]), output(model, given[:, 12:])], dim=1)
    assert (packed - apart).abs().max() < 1e-4
    assert masks
    assert not any(mask is not None for mask in masks)
    grads = []
    for documents in (hf._documents, lambda *_: None):
        monkeypatch.setattr(hf, "_documents", documents)
        model.zero_grad()
        model(given, position_ids=at, use_cache=False).logits.square().mean().backward()
        grads.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    assert masks[-1] is not None
    assert (grads[0] - grads[1]).abs().max() < 1e-5 * grads[1].abs().max()


@pytest.mark.parametrize("change", [(15, 3, True), (5, 4, False), (19, 11, True)], ids=str)
def test_other_masks_are_no_documents(change: tuple[int, int, bool]) -> None:
    """A key of another document is seen, one of the own is not, and a document that goes on after
    another one."""
    ids = torch.tensor([0] * 12 + [12] * 8)
    mask = (ids[:, None] == ids).tril()[None, None].clone()
    positions = hf._documents(mask)
    assert positions is not None
    assert torch.equal(positions.within, (torch.arange(20) - ids)[None])
    row, key, shown = change
    mask[0, 0, row, key] = shown
    window = torch.ones(20, 20, dtype=torch.bool).tril().triu(-5)[None, None]
    cached = mask.new_ones(1, 1, 3, 20).tril(17)
    assert [hf._documents(x) is None for x in (mask, window, cached)] == [True, True, False]


@pytest.mark.parametrize("options", [{}, {"sinks": 2}], ids=str)
def test_one_mask_serves_batch(options: dict[str, int]) -> None:
    """One mask for all rows, with documents; before it a static cache, while the prior is
    uniform."""
    model = zoo.adapt(make("llama"), "ggd", options=options)
    given = input_of("llama", batch=2, length=20)
    cache = transformers.StaticCache(config=model.config, max_cache_len=30)
    with torch.no_grad():
        steps = [
            model(part, past_key_values=cache).logits for part in (given[:, :12], given[:, 12:17])
        ]
    assert (torch.cat(steps, dim=1) - output(model, given)[:, :17]).abs().max() < 1e-4
    disturb(model)
    mask = (torch.arange(20)[:, None] // 12 == torch.arange(20) // 12).tril()[None, None]
    shared = output(
        model,
        given,
        attention_mask=mask,
        position_ids=(torch.arange(20) % 12)[None],
        use_cache=False,
    )
    apart = torch.cat([output(model, given[:, :12]), output(model, given[:, 12:])], dim=1)
    assert (shared - apart).abs().max() < 1e-4


def test_window_hides_far_keys() -> None:
    """A window hides what it hides."""
    model = transformers.MistralForCausalLM(
        transformers.MistralConfig(**GROUPED, sliding_window=8)
    ).eval()
    adapted = zoo.adapt(model, "ggd")
    disturb(adapted)
    given = input_of("mistral", length=30)
    options = GREEDY | dict(max_new_tokens=6, attention_mask=torch.ones_like(given))
    assert torch.equal(
        adapted.generate(given, **options), adapted.generate(given, use_cache=False, **options)
    )
    # Far tokens reach the last one by two layers of a window of 8 at most.
    other = given.clone()
    other[:, :10] = 3
    assert torch.equal(output(adapted, given)[:, -1], output(adapted, other)[:, -1])
    absolute = zoo.adapt(
        transformers.MistralForCausalLM(model.config.__class__(**GROUPED, sliding_window=8)), "goat"
    )
    disturb(absolute)
    refuses("sliding_window=None", absolute.generate, given, **options)


@pytest.mark.parametrize("name", EVERY)
def test_saved_model_has_priors(name: str, tmp_path: Path) -> None:
    """A saved model is loaded with its priors."""
    model = zoo.adapt(make(name), "ggd_goat", keep_rope=False, options={"spectral": {"rank": 3}})
    disturb(model)
    getattr(model, "config", model).max_position_embeddings = 512
    zoo.save_adapted(model, tmp_path)
    assert (
        len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    )  # others can read the weights too
    loaded = zoo.load_adapted(tmp_path).eval()
    given = input_of(name)
    assert torch.equal(output(loaded, given), output(model, given))
    assert json.loads((tmp_path / "config.json").read_text())["priorzoo"]["options"] == {
        "spectral": {"rank": 3}
    }
    if name == "timm":  # as features: no classifier, no pooling, one block
        model.prune_intermediate_layers([0], prune_norm=True)
        zoo.save_adapted(model, tmp_path / "features")
        assert torch.equal(
            output(zoo.load_adapted(tmp_path / "features").eval(), given), output(model, given)
        )


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2"])
def test_no_positions_is_a_bag(name: str) -> None:
    """One layer: the last token's output does not change when those before it change places, and
    does with positions."""
    model = make(name)
    del next(m for m in model.modules() if isinstance(m, nn.ModuleList))[1:]
    bag = zoo.adapt(copy.deepcopy(model), "ggd", keep_rope=False)
    given = input_of(name)
    other = torch.cat([given[:, :-1].flip(1), given[:, -1:]], dim=1)

    def moved(m: Any) -> float:
        return (
            (output(m, given, use_cache=False) - output(m, other, use_cache=False))[:, -1]
            .abs()
            .max()
            .item()
        )

    assert moved(bag) < 1e-5
    disturb(bag)
    assert min(moved(bag), moved(model)) > 1e-5
    if name == "gpt2":  # an embedding of 64 positions
        assert torch.isfinite(output(bag, input_of(name, length=90))).all()


def test_fused_optimiser_moves_priors() -> None:
    """Trainer's default; it gives parameters no new version."""
    model = zoo.adapt(make("llama"), "ggd_goat", train="priors")
    given = input_of("llama")
    start = output(model, given).detach()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".position_bias." in name for name in trained)
    optimiser = torch.optim.AdamW(trained.values(), lr=0.1, fused=True)
    for _ in range(2):
        model(given, labels=given).loss.backward()
        optimiser.step()
    twin = zoo.adapt(make("llama"), "ggd_goat")
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (output(twin, given) - start).abs().max() > 1e-4
        assert (output(twin, given) - output(model, given)).abs().max() < 1e-6


def test_optimisers_decay_no_prior() -> None:
    """Trainers and timms optimisers decay no prior."""
    decayed = transformers.Trainer.get_decay_parameter_names(
        None, zoo.adapt(make("llama"), "ggd_goat")
    )
    assert decayed
    assert not any(".position_bias." in name for name in decayed)
    images = zoo.adapt(make("timm"), "ggd_goat")
    groups = timm.optim.create_optimizer_v2(images, "adamw", lr=1e-3, weight_decay=0.1).param_groups
    priors = {id(p) for n, p in images.named_parameters() if ".position_bias." in n}
    assert not priors & {
        id(p) for group in groups if group["weight_decay"] for p in group["params"]
    }


def test_gradient_checkpointing_keeps_gradients() -> None:
    """Gradient checkpointing keeps gradients of priors."""
    model = zoo.adapt(make("llama"), "ggd_goat").train()
    tokens = input_of("llama")
    grads = []
    disturb(model)
    for switch in (model.gradient_checkpointing_enable, model.gradient_checkpointing_disable):
        switch()
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        grads.append(
            model.model.layers[0].self_attn.position_bias.prior.ggd.theta_beta.grad.clone()
        )
    assert grads[0].any()
    assert (grads[0] - grads[1]).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm", "llama"])
def test_adapted_model_compiles(name: str) -> None:
    """An adapted model compiles to one graph."""
    model = zoo.adapt(make(name), "ggd_goat")
    given = input_of(name)
    disturb(model)
    mask = torch.ones_like(given)
    mask[0, :5] = 0
    more = {} if name == "timm" else {"attention_mask": mask}
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        found, expected = (
            output(m, given, **more)[mask.bool() if more else ...] for m in (compiled, model)
        )
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (lambda: make("llama"), {"position": "rope"}, "rotation"),
        (lambda: make("llama"), {"position": "cable"}, "depends on the layer's input"),
        (lambda: make("llama"), {"position": "gdd"}, "unknown position method 'gdd'"),
        (lambda: make("llama"), {"train": "prior"}, "did you mean 'priors'"),
        (
            lambda: make("llama"),
            {"position": "alibi", "train": "priors"},
            "nothing would be trained",
        ),
        (lambda: zoo.adapt(make("llama"), "alibi"), {}, "has priors already"),
        (lambda: zoo.create_model("text_ggd_tiny"), {}, "model of the zoo"),
        (lambda: nn.Linear(2, 2), {}, "zoo.layers.Attention"),
        (lambda: timm.create_model("resnet18"), {}, "VisionTransformer"),
        (
            lambda: timm.create_model("vit_tiny_patch16_224", patch_drop_rate=0.5),
            {},
            "patch_drop_rate=0",
        ),
        (
            lambda: transformers.Gemma2Model(transformers.Gemma2Config(**SIZES)),
            {},
            "attn_logit_softcapping=None",
        ),
        (
            lambda: timm.create_model("vit_tiny_patch16_224", features_only=True),
            {},
            r"features\.model",
        ),
        (
            lambda: transformers.CLIPModel(transformers.CLIPConfig(**CLIP)),
            {},
            "made of several models",
        ),
        (
            lambda: transformers.T5Model(transformers.T5Config(d_model=8, d_ff=8, num_layers=1)),
            {},
            "cross-attention",
        ),
    ],
)
def test_unserved_is_said(
    build: Callable[[], Any], arguments: dict[str, Any], message: str
) -> None:
    """What is not served is said."""
    refuses(message, zoo.adapt, build(), **arguments)


def test_no_implementation_drops_priors() -> None:
    """No prior is left out by another implementation."""
    model = zoo.adapt(make("llama"), "alibi")
    model.set_attn_implementation("sdpa")
    refuses("by 'sdpa' would leave the priors out", model, input_of("llama"))


def test_copied_prior_reads_images() -> None:
    """A copy of a prior reads the images of its model."""
    model = zoo.adapt(make("timm"), "alibi")
    given = input_of("timm")
    before = output(model, given)
    for block in model.blocks:  # as PEFT's modules_to_save does
        block.attn.position_bias = copy.deepcopy(block.attn.position_bias)
    assert torch.equal(output(model, given), before)


@torch.inference_mode()
def test_images_padded_by_the_model() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, dynamic_img_size=True, dynamic_img_pad=True, depth=2
    )
    zoo.adapt(model, "alibi").eval()
    image = torch.randn(2, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    padded = nn.functional.pad(image, (0, 8, 0, 8))
    torch.testing.assert_close(
        model.forward_features(image), model.forward_features(padded), rtol=0, atol=0
    )
    assert model.blocks[0].attn.patch_grid.shape == (3, 4)


def test_trailing_tokens_are_refused() -> None:
    """Tokens behind the patches are refused."""
    config = transformers.YolosConfig(**IMAGES | {"image_size": [32, 32]})
    model = zoo.adapt(transformers.YolosModel(config), "ggd_goat")
    refuses(
        "117 tokens: expected 1 prefix tokens and 16 patches of a 4×4 grid",
        model,
        torch.zeros(1, 3, 32, 32),
    )
