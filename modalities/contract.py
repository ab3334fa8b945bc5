"""What the training loop and the evaluate command know of a modality.

A modality is one object of class `Modality`, registered under the entry-point group
`priorzoo.modalities`:

    [project.entry-points."priorzoo.modalities"]
    toy = "toy:MODALITY"

Those that ship are found without installation too (`modalities.SHIPPED`). CONTRIBUTING adds one,
step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, runtime_checkable

from torch import Tensor, nn
from typing_extensions import TypeVar

from modalities.loading import Batch, State
from zoo.model import ZooModel
from zoo.plugins import load_modality
from zoo.plugins import modality_names as modality_names

if TYPE_CHECKING:
    from modalities.evaluation import Evaluator

# A recipe's data section.
Data = TypeVar("Data", default=Any)
Model = TypeVar("Model", bound=ZooModel, default=Any)
DataIn = TypeVar("DataIn", contravariant=True, default=Any)


class Loader(Protocol):
    """Endless training batches of one rank (`modalities.loading` has two)."""

    @property
    def report(self) -> object:
        """str() of it says what was converted or skipped; empty where there is nothing to say."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> State:
        """JSON values from which `load_state_dict` continues with the next sample.

        Equal on all ranks, or this rank's own.
        """

    def load_state_dict(self, state: State) -> None:
        """Raises ValueError for a state of other data, or of a set-up in which samples would
        differ."""


class OpenLoader(Protocol[DataIn]):
    """Opens the training split, of which `rank` reads its share in batches of `micro_batch`."""

    def __call__(self, data: DataIn, /, *, rank: int, world: int, micro_batch: int) -> Loader: ...


class OpenHeldout(Protocol[DataIn]):
    """Opens the first held-out samples: this rank's batches, the same at every iteration, equally
    many on every rank."""

    def __call__(
        self, data: DataIn, /, *, samples: int, rank: int, world: int, micro_batch: int
    ) -> Iterable[Batch]: ...


class Loss(Protocol):
    """Mean loss over the targets of a batch of `modalities.loading.to_device`, and a tensor for
    each of the `metrics`. The model is one of the modality, or the engine round it, which has its
    attributes."""

    def __call__(self, model: Any, batch: Batch, /) -> tuple[Tensor, dict[str, Tensor]]: ...


# What a command of the command line asks of a model. Inputs that a model cannot read are a
# ValueError, files also an OSError.


@runtime_checkable
class Writer(Protocol):
    """A model that continues text: `priorzoo generate`."""

    def stream_text(
        self, prompt: str, *, max_new_tokens: int, **sampling: float | None
    ) -> Iterator[str]:
        """Yields what follows the prompt as it is written.

        Sampling: temperature, top_k, top_p, seed.
        """


@runtime_checkable
class Classifier(Protocol):
    """A model that names what an image shows: `priorzoo predict`."""

    def classify(self, path: str, /, *, size: int | None = None) -> list[tuple[str, float]]:
        """Every class and its probability, likeliest first.

        size: side in pixels; None: as trained.
        """


@dataclass(frozen=True)
class Cost:
    """Estimated cost of one training sample.

    Attributes:
        units: tokens or images.
        flops: forward and backward.
        activation_bytes: alive between forward and backward, without logits.
        logit_bytes: of float32 logits.
        most_logit_bytes: upper bound of a micro-batch's logits that exist at once.
    """

    units: int
    flops: float
    activation_bytes: float
    logit_bytes: float = 0.0
    most_logit_bytes: float = math.inf


@dataclass(frozen=True)
class Outside:
    """Models of another library, which a modality's evaluators take as PREFIX:NAME.

    load: NAME → the model, with the interface that the modality's evaluators use, and whether it is
        trained. Raises ValueError, in one line, for what cannot be measured.
    claim: NAME → 0 to 1, how far the model reads this modality. The modality with the largest claim
    has the model; 0 is none.
    """

    load: Callable[[str], tuple[nn.Module, bool]]
    claim: Callable[[str], float] = lambda name: 1.0


class Evaluators(Mapping[str, "type[Evaluator]"]):
    """The evaluators of a package, by name; its modules are imported when one is needed, not for
    training."""

    def __init__(self, package: str) -> None:
        self.package = package

    @cached_property
    def kinds(self) -> dict[str, type[Evaluator]]:
        from modalities.evaluation import find_evaluators

        return find_evaluators(self.package)

    def __getitem__(self, name: str) -> type[Evaluator]:
        return self.kinds[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


@dataclass(frozen=True)
class Modality(Generic[Data, Model]):
    """One kind of data, with its models, loaders, loss and evaluators.

    Attributes:
        name: "dna"; the first part of its models' and recipes' names.
        unit: what throughput counts, "tokens" or "images".
        model: class of its models; a saved model is loaded by `model.from_pretrained`.
        config: dataclass of a recipe's data section; raises ValueError for values that cannot work.
        build: (registered model name, options, data config) → model with fresh weights; options
            override what follows from the data.
        loader, heldout: open the training split and held-out samples.
        loss: of a batch, with `metrics` of held-out data.
        weight: batch → (what its targets weigh together, how many there are).
        cost: (model, data config, bytes per number) → `Cost` of one sample.
        evaluators: by name.
        baselines: by name (the module may list them as BASELINES), (train_context) → a module
            measured next to models.
        outside: by prefix, models that are not the zoo's; the module may list the prefixes as
            OUTSIDE_PREFIXES.
        metrics: what `loss` measures besides the loss.
        headline: scores that `list --pretrained` may show of a model card, the most telling first;
            the module may give them as HEADLINE.
        recipes: dotted name of the module whose RECIPES are its named recipes; the module may give
            it as RECIPES_MODULE.
        task: the hub's name for what its models do (`pipeline_tag` of a model card); empty: none.
    """

    name: str
    unit: str
    model: type[Model]
    config: type[Data]
    build: Callable[[str, Mapping[str, Any], Data], ZooModel]
    loader: OpenLoader[Data]
    heldout: OpenHeldout[Data]
    loss: Loss
    weight: Callable[[Batch], tuple[float, int]]
    cost: Callable[[Model, Data, int], Cost]
    evaluators: Mapping[str, type[Evaluator]]
    baselines: Mapping[str, Callable[[int], nn.Module]] = field(default_factory=dict)
    outside: Mapping[str, Outside] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    headline: tuple[str, ...] = ()
    recipes: str = ""
    task: str = ""


def find_modality(name: str) -> Modality:
    """The modality of this name.

    ValueError for an unknown name, or an entry point that is not a `Modality`; ImportError, which
    names the extra, where a package is not installed.
    """
    modality = load_modality(name)
    if not isinstance(modality, Modality):
        kind = type(modality).__name__
        raise ValueError(
            f"entry point {name!r} of priorzoo.modalities is {kind}, expected a Modality"
        )
    return modality
