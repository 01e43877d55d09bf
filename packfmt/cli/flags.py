"""How the options of sources are called here."""

from __future__ import annotations

import re

__all__ = ["FLAGS", "as_flags", "flag_of"]

# Where an option of a source has another name here.
FLAGS = {
    "labels": "--h5-labels",
    "value_range": "--range",
    "locking": "--no-locking",
    "labelled": "--flat",
}
# "labels" is not among them: in convert() it is the table, and messages say h5_labels for the other.
_NAMES = (
    *("image", "label", "key", "images", "h5_labels", "layout", "value_range", "channels", "locking", "encode"),
    *("timeout", "resolution", "which", "database", "raw_rgb", "carve", "root", "key_column", "label_column"),
    *("labelled", "follow_links"),
)
# What stands around it must not be a path's or a URL's.
_ARGUMENT = re.compile(rf"(?<![\w/.=?&-])({'|'.join(_NAMES)})=(?:('[^']*')|True|False)?(?![\w/='])")


def flag_of(option: str) -> str:
    """The flag for an option of a source."""
    return FLAGS.get(option) or f"--{option.replace('_', '-')}"


def as_flags(message: str) -> str:
    """A message that names arguments as Python has them, with flags instead: "locking=False" is --no-locking."""
    return _ARGUMENT.sub(lambda found: flag_of(found[1]) + (f" {found[2]}" if found[2] else ""), message)
