"""What leaves Python: every position method as an exported program, as ONNX and in int8, at sizes other than the example's.

A few of them here; with PRIORZOO_TEST_DEVICE=cuda every method in every form, and a compiled library.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from tests.device import DEVICE
from zoo import create_model
from zoo.methods import list_grid_positions, list_positions

LINE, GRID = list_positions(), list_grid_positions()
TINY = dict(num_layers=1, dim=32, num_heads=2, hidden_dim=32)
CONTEXT = 64

Inputs = tuple[Tensor, Tensor]  # the example, and one of another size


def line_model(method: str, *, modality: str = "text", **options: Any) -> nn.Module:
    return moved(create_model(f"{modality}_{method}_tiny", **TINY, train_context=CONTEXT, **options))


def grid_model(method: str, **options: Any) -> nn.Module:
    if "goat" in method or "spectral" in method:
        options["lanes"] = "beside"
    return moved(create_model(f"vision_{method}_tiny_patch8", **TINY, class_token=True, **options))


def moved(model: nn.Module) -> nn.Module:
    """Priors and embeddings off their inits, so that no identity holds by accident."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("norm.weight"):
                parameter += 1
    return model.eval()


def tokens() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 4, (2, 40), generator=generator), torch.randint(0, 4, (3, 57), generator=generator)


def images() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 48, 64, generator=generator), torch.randn(3, 3, 80, 40, generator=generator)


def line_shapes() -> Any:
    return ({0: Dim("batch", max=64), 1: Dim("length", min=2, max=CONTEXT)},)


def grid_shapes() -> Any:
    return ({0: Dim("batch", max=64), 2: 8 * Dim("rows", min=2, max=64), 3: 8 * Dim("columns", min=2, max=64)},)


def exported(model: nn.Module, example: Tensor, shapes: Any) -> Any:
    return torch.export.export(model, (example,), dynamic_shapes=shapes).module()


def onnx(model: nn.Module, example: Tensor, shapes: Any) -> Any:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), options)
    name = session.get_inputs()[0].name
    return lambda given: torch.from_numpy(session.run(None, {name: given.numpy()})[0])


def int8(model: nn.Module, example: Tensor, shapes: Any) -> Any:
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        smaller = quantize(model, {nn.Linear}, dtype=torch.qint8)
    assert not any(type(layer) is nn.Linear for layer in smaller.modules())  # those inside priors too
    return torch.no_grad()(smaller)


# A form, and the norm of the difference to the model beside that of the logits.
FORMS = {"export": (exported, 1e-5), "onnx": (onnx, 1e-4), "int8": (int8, 0.15)}
CASES = [
    (form, side, method) for form in FORMS for side, methods in (("line", LINE), ("grid", GRID)) for method in methods
]
if DEVICE.type == "cpu":  # an export takes a second, ONNX several
    CASES = [("export", "line", "goat"), ("export", "grid", "ggd2d"), ("onnx", "line", "ggd"), ("int8", "grid", "goat")]


def agree(run: Any, model: nn.Module, inputs: Inputs, tolerance: float) -> None:
    for given in inputs:
        with torch.no_grad():
            expected, found = model(given), run(given)
        expected, found = (x.masked_fill(x == -torch.inf, 0) for x in (expected, found))
        assert found.shape == expected.shape
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "side", "method"), CASES)
def test_every_method_in_every_form(form: str, side: str, method: str) -> None:
    """The same logits at the example's size and at another one; eager calls take the kernels they took before."""
    make, tolerance = FORMS[form]
    model = line_model(method) if side == "line" else grid_model(method, ssmax=True)
    inputs, shapes = (tokens(), line_shapes()) if side == "line" else (images(), grid_shapes())
    with torch.no_grad():
        before = model(inputs[1])
    agree(make(model, inputs[0], shapes), model, inputs, tolerance)
    assert not torch.compiler.is_exporting()
    with torch.no_grad():
        assert torch.equal(model(inputs[1]), before)


@pytest.mark.slow
def test_dna_grouped_keys_and_gates_leave_too() -> None:
    """What a method name does not say: DNA's head, SSMax on a line, grouped keys, the prior's gate, an untied head."""
    options = {"prior_gate": True, "temperature": 2.0}
    names = dict(modality="dna", num_kv_heads=1, logit_options=options, ssmax=True, scale_prior=False, tied=False)
    model = line_model("ggd", **names)
    agree(exported(model, tokens()[0], line_shapes()), model, tokens(), 1e-5)


@pytest.mark.parametrize(
    ("make", "shapes", "message"),
    [
        (lambda: (grid_model("goat"), images()[0]), ({2: Dim("h", max=512)},), r"8\*_h|8 \* _h|% 8"),
        (
            lambda: (line_model("learned"), tokens()[0]),
            ({1: Dim("n", min=2, max=4096)},),
            rf"n <= {CONTEXT}|max={CONTEXT}",
        ),
    ],
    ids=["sides that are no multiple of the patch", "learned positions beyond their number"],
)
def test_what_cannot_be_exported_names_the_size(make: Any, shapes: Any, message: str) -> None:
    model, example = make()
    with pytest.raises(Exception, match=message):
        torch.export.export(model, (example,), dynamic_shapes=shapes)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cpu" or shutil.which("g++") is None, reason="it compiles for a minute")
def test_a_compiled_library_of_an_exported_program(tmp_path: Path) -> None:
    model = grid_model("ggd2d")
    program = torch.export.export(model, (images()[0],), dynamic_shapes=grid_shapes())
    with torch._inductor.config.patch(
        {"aot_inductor.compile_wrapper_opt_level": "O0"}
    ):  # compiles in a third of the time
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    agree(torch._inductor.aoti_load_package(package), model, images(), 1e-5)
