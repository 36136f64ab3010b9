"""Rows of Python as files of rows."""

import os
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path

from . import _omnigrpo
from ._reward import medium, to_json

_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}


def dumps(value):
    """Return a value as JSON, also with numbers and arrays of NumPy, enums, sets, data classes and types of numbers."""

    def plain(value):
        if hasattr(value, "tolist"):
            return value.tolist()
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, (set, frozenset)):
            return sorted(value)
        if is_dataclass(value):
            return asdict(value)
        if type(value).__name__ == "dtype":
            return str(value).replace("torch.", "")
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        raise TypeError(f"a row or a setting holds a {type(value).__name__}, expected a value that JSON can express")

    return to_json(value, plain)


class Folder:
    """A folder for media that are in memory: each medium once, in a file named by its hash."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def path(self, value):
        """Return the file of a picture, clip or sound."""
        found = medium(value)
        return found if isinstance(found, str) else str(self.folder.resolve() / _omnigrpo.keep(self.folder, found))

    def row(self, row):
        """Return a row for JSON, with paths in the place of media. A text is a question."""
        return self._plain({"prompt": row} if isinstance(row, str) else row)

    def _plain(self, value, name=None):
        if isinstance(value, (list, tuple)):
            return [self._plain(one, name) for one in value]
        if name in _MEDIA and value is not None:
            return self.path(value)
        if isinstance(value, Mapping):
            # A datasets.Dataset has None for each key that a part of a message lacks.
            return {key: self._plain(one, key) for key, one in value.items() if one is not None or name != "content"}
        return value


def file_of(dataset, folder, name):
    """Return the path of a file with the rows of a dataset. A path is returned as it is."""
    if isinstance(dataset, (str, os.PathLike)):
        return os.fspath(dataset)
    if hasattr(dataset, "cast_column"):
        # Bytes stay as they are, instead of being decoded and encoded again.
        import datasets

        for column, feature in dataset.features.items():
            inner = getattr(feature, "feature", feature)
            if isinstance(inner, (datasets.Image, datasets.Audio)):
                plain = type(inner)(decode=False)
                dataset = dataset.cast_column(column, plain if inner is feature else type(feature)(plain))
    media = Folder(Path(folder) / "media")
    file = Path(folder) / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as out:
        for number, row in enumerate(dataset):
            try:
                out.write(dumps(media.row(row)) + "\n")
            except ValueError as error:
                raise ValueError(f"row {number} of {name}_dataset: {error}") from None
    part.rename(file)
    return str(file)
