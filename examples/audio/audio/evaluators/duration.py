"""Accuracy against the frames of a window: the sound keeps its length, the noise grows."""

from functools import cached_property

import torch
from torch import Tensor

from audio.data import Clips, HeldoutClips
from audio.model import AudioTransformer
from audio.sounds import Clip, cut
from modalities.encoder.accuracy import SizeAccuracy
from modalities.encoder.config import Shape
from modalities.encoder.evaluation import SizeSettings
from modalities.loading import Heldout


class Duration(SizeAccuracy[SizeSettings, AudioTransformer]):
    name = "duration"
    summary = "accuracy of the class of a sound, against the frames of noise around it"
    unit = "clips"
    items_name = "clips"
    cells_name = "frames"
    grows = "width"

    @cached_property
    def heldout(self) -> Heldout[HeldoutClips]:
        clips = Clips("heldout")
        return Heldout("held-out sounds", clips.fingerprint, HeldoutClips(clips))

    def grid(self, model: AudioTransformer, item: Clip, shape: Shape, control: str) -> Tensor:
        return torch.from_numpy(cut(item, shape[1], item.place))
