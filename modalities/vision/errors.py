"""The error of an image that cannot be used."""

from modalities.encoder.items import BadSample


class BadImage(BadSample):
    """An image that is skipped: `reason` is what reports count, `detail` is for people."""
