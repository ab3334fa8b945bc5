"""What every model of the zoo offers besides its forward: what must not decay, and saving and
loading whole models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from zoo.files import (
    file_digests,
    find_damage,
    read_object,
    read_tensors,
    replacing_path,
    write_json,
)
from zoo.positions import Positions
from zoo.priors.base import Prior
from zoo.rotary import Rotary2d
from zoo.sequence import SequenceGroup

SAVED = ("config.json", "model.safetensors")
MANIFEST = "manifest.json"
# dtypes of floating-point weights in files.
STORABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def saved_model_damage(folder: Path) -> str | None:
    """What is wrong with the files of a saved model, by its manifest.json; None where nothing is,
    or it has none."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        return find_damage(folder, read_object(folder / MANIFEST))
    except ValueError as error:
        return str(error)


class ZooModel(nn.Module):
    """A model made by `type(model)(config)` from a frozen, JSON-able dataclass.

    Attributes:
        config: everything that makes the model.
        config_class: its dataclass.
        modality: what it belongs to, the first part of its registered name; kept in config.json.
        class_names: of a classifier, by number; kept in config.json, and empty where unknown.
        sequence: the ranks that share its lines, of a model that `refuses_sequence` does not
            refuse; None: it is alone. With it the model takes whole lines, and gives features,
            logits and the loss's share of this rank's part of them.
    """

    config_class: ClassVar[type]
    modality: ClassVar[str]
    config: Any
    class_names: tuple[str, ...] = ()
    sequence: SequenceGroup | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What models of one modality have, such as `stream_text` and `classify`: torch's own
            annotation says that every attribute is a tensor or a module, which cannot be called."""

    def train_positions(self) -> Positions:
        """Where the tokens of a training sample are: on a line, or on a grid."""
        raise NotImplementedError

    def refuses_sequence(self, size: int) -> str | None:
        """Why `size` ranks cannot share its lines of tokens; None where they can."""
        return "a model that does not read lines of tokens cannot share them"

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not decay: norms, biases, SSMax's s, tokens, rotations,
        positions, all of priors."""
        owners = {"position_embedding", "prefix_tokens"}
        for name, module in self.named_modules():
            if isinstance(module, Prior | Rotary2d):
                owners.add(name)
        exempt = set()
        for name, parameter in self.named_parameters():
            inside = any(f"{name}.".startswith(f"{owner}.") for owner in owners)
            if inside or parameter.ndim < 2:
                exempt.add(name)
        return exempt

    def prior_parameters(self) -> set[str]:
        """Names of the parameters of priors, rotations, and SSMax's s: per head or frequency, no
        linear layers."""
        linears = {name for name, module in self.named_modules() if isinstance(module, nn.Linear)}
        names = set()
        for name, _ in self.named_parameters():
            owner = name.rpartition(".")[0]
            if owner not in linears and {"prior", "rotary", "ssmax"} & set(name.split(".")):
                names.add(name)
        return names

    def replaceable_parameters(self) -> set[str]:
        """Names of parameters that stay as initialised where loaded weights have another shape,
        such as a classifier's."""
        return set()

    def storable_state(
        self, dtype: torch.dtype | None = None, *, state: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The state dict as it is stored: `dtype` casts matrices; vectors, priors and positions
        stay as they are.

        Tensors in `state` replace the model's own of that name: an optimiser's float32 copies of
        bf16 weights.
        """
        uncast = self.no_weight_decay()
        tensors = self.state_dict()
        unknown = sorted(set(state or {}) - set(tensors))
        if unknown:
            raise ValueError(f"the model has no tensors named {', '.join(unknown)}")
        stored = {}
        for name, tensor in (tensors | (state or {})).items():
            if dtype is not None and name not in uncast and tensor.ndim >= 2:
                tensor = tensor.to(dtype)
            stored[name] = tensor.contiguous()
        return stored

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        """Write model.safetensors (`storable_state(dtype, state=state)`), config.json (with the
        modality, and names of classes where there are any), and manifest.json, the sizes and
        SHA-256 of both."""
        folder = Path(folder)
        weights = folder / "model.safetensors"
        # A manifest of older files would refuse the new ones, should this be killed on the way.
        (folder / MANIFEST).unlink(missing_ok=True)
        with replacing_path(weights) as file:
            try:
                save_file(self.storable_state(dtype, state=state), file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{weights} cannot be written: {error}") from error
        config = {"modality": self.modality, **asdict(self.config)}
        if self.class_names:
            config["class_names"] = self.class_names
        write_json(folder / "config.json", config)
        write_json(folder / MANIFEST, file_digests(folder, SAVED))

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], **overrides: Any) -> Self:
        """The model that `save_pretrained` wrote; `overrides` replace entries of its config.

        Raises:
            FileNotFoundError: when the folder lacks one of its two files.
            ValueError: for files that are not as they were written, a config with entries this
                version does not know or values it cannot have, damaged weights, weights that are
                not finite, or weights that do not fit it.
        """
        folder = Path(folder)
        missing = [name for name in SAVED if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder} is not a saved model: it lacks {' and '.join(missing)}"
            )
        damage = saved_model_damage(folder)
        if damage:
            raise ValueError(f"{folder}: {damage}. Where that was meant, delete {MANIFEST}")
        config = read_object(folder / "config.json") | overrides
        # Models saved before version 0.5 do not name theirs.
        modality = config.pop("modality", cls.modality)
        if modality != cls.modality:
            raise ValueError(
                f"{folder} holds a model of {modality!r}; "
                f"{cls.__name__} loads those of {cls.modality!r}"
            )
        names = config.pop("class_names", ())
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"{folder / 'config.json'}: class_names={names!r:.80}: expected a list of names"
            )
        unknown = sorted(set(config) - {f.name for f in fields(cls.config_class)})
        if unknown:
            raise ValueError(
                f"{folder / 'config.json'} has entries this version does not know: "
                f"{', '.join(unknown)}"
            )
        values = cls.config_class(**config)
        tensors = read_tensors(folder / "model.safetensors")
        try:
            # Shapes first, which take no memory: a configuration may ask for any amount of it.
            # Priors from elsewhere may read their numbers, and have none here.
            with suppress(NotImplementedError), torch.device("meta"):
                _check_shapes(cls(values).state_dict(), tensors)
            model = cls(values)
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(
                f"the weights in {folder} do not fit its config.json: {error}"
            ) from error
        model.class_names = tuple(names)
        return model


def _check_shapes(expected: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """RuntimeError for a tensor that only one of two state dicts has, or of another shape or
    kind."""
    for name in sorted(expected.keys() | stored.keys()):
        expected_shape = tuple(expected[name].shape) if name in expected else None
        stored_shape = tuple(stored[name].shape) if name in stored else None
        if expected_shape != stored_shape:
            raise RuntimeError(
                f"{name!r} has shape {stored_shape}, "
                f"expected {expected_shape} (None: it is not there)"
            )
        expected_dtype = expected[name].dtype
        stored_dtype = stored[name].dtype
        if expected_dtype == stored_dtype:
            continue
        if not expected_dtype.is_floating_point:
            raise RuntimeError(f"{name!r} has dtype {stored_dtype}, expected {expected_dtype}")
        if stored_dtype not in STORABLE:
            raise RuntimeError(
                f"{name!r} has dtype {stored_dtype}, expected float16, bfloat16, float32 or float64"
            )
