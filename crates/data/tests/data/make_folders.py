"""Writes folders.json: folders of pictures, and the rows that `imagefolder` of `datasets` reads from them.

    pip install datasets pillow && python3 crates/data/tests/data/make_folders.py

A case has the texts of its files (null for a picture of one pixel), and for each split the rows: the path of the picture within the folder
as `image`, the name of a class as `label`, and the other columns. Missing values are left out.
"""

import io
import json
import pathlib
import tempfile

import datasets
import PIL.Image

CASES = {
    "metadata.csv": {
        "metadata.csv": 'file_name,question,answer\na.png,"Which, and ""why""?",red\nsub/b.png,How many?,12\nsub/c.png,,7\n',
        "a.png": None,
        "sub/b.png": None,
        "sub/c.png": None,
    },
    "metadata.csv in each split": {
        "train/metadata.csv": "file_name,solution\n1.png,yes\n2.png,no\n",
        "train/1.png": None,
        "train/2.png": None,
        "validation/metadata.csv": "file_name,solution\n3.png,no\n",
        "validation/3.png": None,
    },
    "metadata.jsonl": {
        "metadata.jsonl": '{"file_name": "x/a.png", "problem": "Where?", "solution": [1, 2]}\n{"file_name": "x/b.png", "problem": "What?", '
        '"solution": [3]}\n',
        "x/a.png": None,
        "x/b.png": None,
    },
    "another name of the picture": {
        "metadata.jsonl": '{"photo_file_name": "a.png", "solution": "1"}\n',
        "a.png": None,
    },
    "several pictures": {
        "metadata.jsonl": '{"file_names": ["a.png", "b.png"], "solution": "1"}\n',
        "a.png": None,
        "b.png": None,
    },
    "a folder for each class": {
        "dog/1.png": None,
        "dog/2.png": None,
        "cat/1.png": None,
        "notes.txt": "nothing",
    },
    "classes in splits": {
        "train/dog/1.png": None,
        "train/cat/1.png": None,
        "test/dog/2.png": None,
        "test/cat/3.png": None,
    },
    "one class": {"dog/1.png": None, "dog/2.png": None},
    "classes at two depths": {"dog/1.png": None, "cat/old/2.png": None},
}


def pixel():
    out = io.BytesIO()
    PIL.Image.new("RGB", (1, 1)).save(out, "png")
    return out.getvalue()


def rows(folder, table):
    """Returns the rows of a split, with paths within the folder."""
    names = {name: feature.names for name, feature in table.features.items() if isinstance(feature, datasets.ClassLabel)}
    for name, feature in list(table.features.items()):
        if isinstance(feature, datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            table = table.cast_column(name, datasets.List(datasets.Image(decode=False)))
    within = lambda own: str(pathlib.Path(own["path"]).relative_to(folder))

    def shown(name, value):
        if name in names:
            return names[name][value]
        if isinstance(value, dict):
            return within(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return [within(own) for own in value]
        return value

    return [{name: shown(name, value) for name, value in row.items() if value is not None} for row in table]


def main():
    out = {}
    for case, files in CASES.items():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
            folder = pathlib.Path(folder).resolve()
            for name, text in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(pixel() if text is None else text.encode())
            found = datasets.load_dataset("imagefolder", data_dir=str(folder), cache_dir=cache)
            out[case] = {"files": files, "splits": {split: rows(folder, table) for split, table in found.items()}}
    text = json.dumps(out, indent=1, ensure_ascii=False)
    (pathlib.Path(__file__).parent / "folders.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
