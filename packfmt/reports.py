"""What copying and checking report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from packfmt.errors import ConvertError

__all__ = ["Bad", "BadImage", "BadImagesError", "PackReport"]

Bad = Literal["fail", "skip", "keep"]

LISTED = 100  # bad images that a message names one by one


@dataclass(frozen=True, slots=True)
class BadImage:
    """An image that is none, or cannot be read: where it is, and why.

    ``kept`` says whether its bytes are in the pack all the same: they are not where there are none, or where a column
    of the pack would be without a value.
    """

    key: str
    reason: str
    kept: bool = False


class BadImagesError(ConvertError):
    """Bad images were found and ``bad="fail"`` forbids them. ``problems`` lists all; nothing was written."""

    def __init__(self, where: str, problems: Sequence[BadImage]) -> None:
        lines = [f"  {problem.key!r}: {problem.reason}" for problem in problems[:LISTED]]
        more = [f"  and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        super().__init__(
            "\n".join(
                [
                    f"{where}: {len(problems)} bad image(s), nothing was written; --bad skip leaves them out, "
                    "--bad keep stores what bytes there are",
                    *lines,
                    *more,
                ]
            )
        )
        self.where = where
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return (BadImagesError, (self.where, self.problems))


@dataclass(slots=True)
class PackReport:
    """What a copy did.

    Attributes:
        path: the pack (with several shards, its manifest).
        files: the files written.
        records, bytes: how many, and the sum of their sizes.
        classes: class name to number of records; of boxes, where boxes have the labels.
        boxes: how many boxes there are.
        formats: image format to number of records; "unknown" for kept bad images.
        skipped: reason to number of entries passed over on purpose.
        problems: bad images; each says whether it was kept, which ``bad="keep"`` does where it can.
        rotated: images whose EXIF orientation is not upright.
        cmyk: images of four colour components.
        notes: what the source wants a person to know.
        seconds: wall time.
        content_id: of the pack.
    """

    path: str
    files: tuple[str, ...] = ()
    records: int = 0
    bytes: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    boxes: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    bad: Bad = "fail"
    problems: list[BadImage] = field(default_factory=list)
    rotated: int = 0
    cmyk: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    content_id: str = ""
