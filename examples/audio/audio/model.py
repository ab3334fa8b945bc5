"""The grid transformer on spectrograms, and its names."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from audio.data import AudioData
from audio.sounds import CLASSES, MELS
from modalities.encoder.config import GridConfig, Shape
from modalities.encoder.model import GridTransformer
from zoo.catalog import ModelFamily, create_model, register_family
from zoo.errors import bounded
from zoo.methods import check_grid_position, list_grid_positions

TINY = dict(patch_size=4, dim=64, num_layers=3, num_heads=4, hidden_dim=128)


@dataclass(frozen=True)
class AudioConfig(GridConfig):
    frames: int = bounded(64, 1, 2**16)

    @property
    def train_size(self) -> Shape:
        return MELS, self.frames


class AudioTransformer(GridTransformer):
    config_class = AudioConfig
    modality = "audio"


def _config(position: str, size: str, ssmax: bool) -> dict[str, object]:
    return asdict(AudioConfig(**TINY, position=position, ssmax=ssmax))


def _create(**config: object) -> AudioTransformer:
    return AudioTransformer(AudioConfig(**config))


METHODS = (list_grid_positions, check_grid_position)
register_family(ModelFamily("audio", _create, {"tiny": TINY}, _config, *METHODS))


def build(name: str, options: Mapping[str, object], data: AudioData) -> AudioTransformer:
    options = {"frames": data.frames, "num_classes": data.num_classes} | dict(options)
    model = create_model(name, **options)
    model.class_names = CLASSES
    return model
