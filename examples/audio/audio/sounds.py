"""Clips of four seconds: half a second of one of five sounds, somewhere in white noise."""

from typing import NamedTuple

import numpy as np

# Samples a second, and of a frame.
RATE = 8000
WINDOW = 256
HOP = 128
MELS = 32
# Frames of a clip, and of the sound in it.
FRAMES = 256
SOUND = 32
CLASSES = ("tone", "chord", "rise", "fall", "burst")


class Clip(NamedTuple):
    """spectrogram: (MELS, FRAMES) float32. onset: first frame of the sound. place: 0 to 1, where
    the sound is in a window that evaluators cut."""

    spectrogram: np.ndarray
    onset: int
    place: float


def make_wave(label: int, rng: np.random.Generator) -> np.ndarray:
    """(SOUND · HOP,) one sound of the class; the noise has a standard deviation of 1."""
    seconds = np.arange(SOUND * HOP) / RATE
    pitch = 300 * 5 ** rng.random()
    match CLASSES[label]:
        case "tone":
            wave = np.sin(2 * np.pi * pitch * seconds)
        case "chord":
            pitches = pitch * np.array([[1], [5 / 4], [3 / 2]])
            wave = np.sin(2 * np.pi * pitches * seconds).sum(0) / 3**0.5
        case "burst":
            wave = rng.normal(size=len(seconds))
        case chirp:
            # From `pitch` to twice that: the phase is the integral of the frequency.
            octaves = seconds / seconds[-1]
            wave = np.sin(2 * np.pi * pitch * seconds[-1] / np.log(2) * 2**octaves)
            wave = wave if chirp == "rise" else wave[::-1]
    return wave * rng.uniform(0.5, 1)


def mel_filters() -> np.ndarray:
    """(MELS, WINDOW / 2 + 1) triangles between 100 Hz and RATE / 2; each sums to 1."""
    edges = 700 * (np.geomspace(1 + 100 / 700, 1 + RATE / 1400, MELS + 2) - 1)
    bins = np.fft.rfftfreq(WINDOW, 1 / RATE)
    filters = np.stack([np.interp(bins, edges[i : i + 3], [0, 1, 0]) for i in range(MELS)])
    return filters / filters.sum(1, keepdims=True)


FILTERS = mel_filters()
HANN = np.hanning(WINDOW)


def log_mel(samples: np.ndarray) -> np.ndarray:
    """(MELS, frames) float32: ln of the power in each band, relative to white noise of power 1."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    power = np.abs(np.fft.rfft(frames * HANN)) ** 2 / (HANN**2).sum()
    return np.log(FILTERS @ power.T + 1e-6).astype(np.float32)


def make_clip(number: int) -> tuple[Clip, int]:
    """The clip of a number, and its label."""
    rng = np.random.default_rng(number)
    label = number % len(CLASSES)
    onset = int(rng.integers(FRAMES - SOUND + 1))
    samples = rng.normal(size=(FRAMES - 1) * HOP + WINDOW)
    samples[onset * HOP : (onset + SOUND) * HOP] += make_wave(label, rng)
    return Clip(log_mel(samples), onset, rng.random()), label


def cut(clip: Clip, frames: int, place: float) -> np.ndarray:
    """(1, MELS, frames): a window with the whole sound, at its end (place 0) to its start (1)."""
    first = max(0, clip.onset + SOUND - frames)
    last = min(clip.onset, FRAMES - frames)
    start = first + round(place * (last - first))
    return clip.spectrogram[None, :, start : start + frames]
