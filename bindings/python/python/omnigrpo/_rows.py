"""Rows of Python as files of rows."""

import hashlib
import io
import json
import os
from pathlib import Path

_MEDIA = {"image": "images", "video": "videos", "audio": "audios"}
_ENDINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"BM": "bmp", b"OggS": "ogg", b"fLaC": "flac", b"ID3": "mp3"}


def dumps(value):
    """Return a value as JSON, also with numbers and arrays of NumPy."""

    def plain(value):
        if hasattr(value, "tolist"):
            return value.tolist()
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        raise TypeError(f"a row or a setting holds a {type(value).__name__}, expected a value that JSON can express")

    return json.dumps(value, default=plain, allow_nan=False)


def _ending(content):
    if content[:4] == b"RIFF":
        return "wav" if content[8:12] == b"WAVE" else "webp"
    if content[4:8] == b"ftyp":
        return "mp4"
    return next((ending for start, ending in _ENDINGS.items() if content.startswith(start)), "bin")


class Folder:
    """A folder for media that are in memory: each medium once, in a file named by its hash."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def path(self, medium):
        """Return the file of a picture, clip or sound: a path, bytes, a dict of datasets, a PIL image or an array."""
        if isinstance(medium, (str, os.PathLike)):
            text = os.fspath(medium)
            return text if text.startswith(("http://", "https://", "data:")) else os.path.abspath(text)
        if isinstance(medium, dict):  # datasets.Image(decode=False)
            return self.path(medium["path"] if medium.get("bytes") is None else medium["bytes"])
        if isinstance(medium, (bytes, bytearray, memoryview)):
            return self._keep(bytes(medium))
        if not hasattr(medium, "save"):
            if getattr(medium, "ndim", 0) not in (2, 3):
                raise TypeError(f"a medium is a {type(medium).__name__}, expected a path, bytes, a PIL image or an array of pixels")
            from PIL import Image

            medium = Image.fromarray(medium)
        out = io.BytesIO()
        # Writing a PNG takes fifty times as long as writing a BMP, which has no transparency.
        medium.save(out, "BMP" if medium.mode == "RGB" else "PNG")
        return self._keep(out.getvalue())

    def _keep(self, content):
        file = self.folder / f"{hashlib.sha256(content).hexdigest()[:32]}.{_ending(content)}"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(content)
            part.rename(file)
        return str(file.resolve())

    def row(self, row):
        """Return a row with paths of media, for JSON. A text is a question."""
        row = {"prompt": row} if isinstance(row, str) else dict(row)
        found = {kind: [] for kind in _MEDIA}
        if isinstance(row.get("prompt"), list):
            row["prompt"] = [self._message(message, found) for message in row["prompt"]]
        for kind, plural in _MEDIA.items():
            for name in (kind, plural):
                media = row.pop(name, None)
                if media is not None:
                    found[kind] += [self.path(one) for one in (media if isinstance(media, (list, tuple)) else [media])]
            if found[kind]:
                row[plural] = found[kind]
        return row

    def _message(self, message, found):
        content = message.get("content")
        if not isinstance(content, list):
            return message
        parts = []
        for part in content:
            kind = part.get("type")
            if kind in found and part.get(kind) is not None:
                found[kind].append(self.path(part[kind]))
                part = {"type": kind}
            # A datasets.Dataset has None for each key that a part lacks.
            parts.append({name: value for name, value in part.items() if value is not None})
        return {**message, "content": parts}


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
        for row in dataset:
            out.write(dumps(media.row(row)) + "\n")
    part.rename(file)
    return str(file)
