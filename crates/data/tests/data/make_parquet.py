"""Writes hub.parquet: a table as the `datasets` library (5.2) uploads it, with images inside."""

import datasets
from PIL import Image

red, blue = Image.new("RGB", (4, 3), "red"), Image.new("RGB", (3, 4), "blue")
rows = {
    "problem": ["Màu gì?", "Same?", "By path?"],
    "solution": ["<answer>red</answer>", "<answer>yes</answer>", "<answer>no</answer>"],
    "images": [[red, blue], [red], [{"bytes": None, "path": "kept.png"}]],
    "scores": [[0.5, 1.5], [], [2.0]],
    "level": [3, 1, None],
}
features = datasets.Features(
    problem=datasets.Value("string"),
    solution=datasets.Value("string"),
    images=datasets.List(datasets.Image()),
    scores=datasets.List(datasets.Value("float64")),
    level=datasets.Value("int64"),
)
table = datasets.Dataset.from_dict(rows, features=features)
# Row by row without the library's embedding step, which would open kept.png.
import pyarrow.parquet as pq

pq.write_table(table.data.table.replace_schema_metadata(None), "hub.parquet", compression="snappy")
