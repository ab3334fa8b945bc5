"""What leaves Python: position methods as exported programs, as ONNX and in int8, at sizes other than the example's.

A few of them here; with PRIORZOO_TEST_DEVICE=cuda every method in every form, and a compiled library.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from tests.device import DEVICE
from zoo import create_model
from zoo.methods import list_grid_positions, list_positions

TINY = dict(num_layers=1, dim=32, num_heads=2, hidden_dim=32)
CONTEXT = 64

Shapes = tuple[dict[int, Any]]
Call = Callable[[Tensor], Tensor]


def model_of(side: str, method: str, *, modality: str = "text", **options: Any) -> nn.Module:
    """Priors and embeddings off their inits, so that no identity holds by accident."""
    if side == "line":
        model = create_model(f"{modality}_{method}_tiny", **TINY, train_context=CONTEXT, **options)
    else:
        options |= {"lanes": "beside"} if "goat" in method or "spectral" in method else {}
        model = create_model(f"vision_{method}_tiny_patch8", **TINY, class_token=True, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + name.endswith("norm.weight"))
    return model.eval()


def inputs(side: str) -> tuple[Tensor, Tensor]:
    """The example, and an input of another size."""
    generator = torch.Generator().manual_seed(1)
    if side == "line":
        return torch.randint(0, 4, (2, 40), generator=generator), torch.randint(0, 4, (3, 57), generator=generator)
    return torch.randn(2, 3, 48, 64, generator=generator), torch.randn(3, 3, 80, 40, generator=generator)


def shapes(side: str) -> Shapes:
    if side == "line":
        return ({0: Dim("batch", max=64), 1: Dim("length", min=2, max=CONTEXT)},)
    return ({0: Dim("batch", max=64), 2: 8 * Dim("rows", min=2, max=64), 3: 8 * Dim("columns", min=2, max=64)},)


def exported(model: nn.Module, example: Tensor, shapes: Shapes) -> Call:
    return torch.export.export(model, (example,), dynamic_shapes=shapes).module()


def onnx(model: nn.Module, example: Tensor, shapes: Shapes) -> Call:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), options)
    name = session.get_inputs()[0].name
    return lambda tokens: torch.from_numpy(session.run(None, {name: tokens.numpy()})[0])


def int8(model: nn.Module, example: Tensor, shapes: Shapes) -> Call:
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        smaller = quantize(model, {nn.Linear}, dtype=torch.qint8)
    assert not any(type(layer) is nn.Linear for layer in smaller.modules())  # those inside priors too
    return smaller


# A form, and the norm of the difference to the model beside that of the logits.
FORMS = {"export": (exported, 1e-5), "onnx": (onnx, 1e-4), "int8": (int8, 0.15)}
METHODS = {"line": list_positions(), "grid": list_grid_positions()}
CASES = [(form, side, method) for form in FORMS for side, methods in METHODS.items() for method in methods]
if DEVICE.type == "cpu":  # an export takes a second, ONNX several
    CASES = [("export", "grid", "ggd2d"), ("onnx", "line", "ggd"), ("int8", "grid", "goat")]


@torch.no_grad()
def agree(run: Call, model: nn.Module, side: str, tolerance: float) -> None:
    for batch in inputs(side):
        expected, output = (x.masked_fill(x == -torch.inf, 0) for x in (model(batch), run(batch)))
        assert output.shape == expected.shape and (output - expected).norm() <= tolerance * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "side", "method"), CASES)
def test_methods_in_every_form(form: str, side: str, method: str) -> None:
    """The same logits at the example's size and at another one; eager calls take the kernels they took before."""
    make, tolerance = FORMS[form]
    model = model_of(side, method, **({} if side == "line" else {"ssmax": True}))
    example, other = inputs(side)
    with torch.no_grad():
        before = model(other)
    agree(make(model, example, shapes(side)), model, side, tolerance)
    with torch.no_grad():
        assert torch.equal(model(other), before)


@pytest.mark.slow
def test_options_of_models() -> None:
    """What a method name does not say: DNA's head, SSMax on a line, grouped keys, an untied head."""
    options = dict(num_kv_heads=1, ssmax=True, scale_prior=False, tied=False)
    model = model_of("line", "ggd", modality="dna", **options)
    agree(exported(model, inputs("line")[0], shapes("line")), model, "line", 1e-5)


def test_a_size_that_cannot_be_exported_is_named() -> None:
    with pytest.raises(Exception, match=rf"n <= {CONTEXT}|max={CONTEXT}"):  # learned positions beyond their number
        exported(model_of("line", "learned"), inputs("line")[0], ({1: Dim("n", min=2, max=4096)},))


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cpu" or shutil.which("g++") is None, reason="it compiles for a minute")
def test_a_compiled_library(tmp_path: Path) -> None:
    model = model_of("grid", "ggd2d")
    program = torch.export.export(model, (inputs("grid")[0],), dynamic_shapes=shapes("grid"))
    # Compiles in a third of the time.
    with torch._inductor.config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    agree(torch._inductor.aoti_load_package(package), model, "grid", 1e-5)
