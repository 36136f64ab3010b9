#!/usr/bin/env python3
"""Reads what a run told TensorBoard and W&B with their own packages, and compares every value with metrics.jsonl.

    pip install tensorboard wandb
    WANDB_MODE=offline omnigrpo demo --max_steps 4 --logging_steps 1 --report_to tensorboard wandb --reward_python PYTHON \\
        --output_dir runs/tracked
    python3 tools/watch/check_trackers.py runs/tracked

A run with `--logging_steps 1`: each row of metrics.jsonl is one event.
"""

import json
import struct
import sys
from pathlib import Path


def f32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def tensorboard(run, rows):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    board = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    board.Reload()
    tags = board.Tags()
    found = {tag: {event.step: event.value for event in board.Scalars(tag)} for tag in tags["scalars"]}
    compared = 0
    for row in rows:
        for name, value in row.items():
            if name == "step" or value is None or (name == "epoch" and row["step"] == 0):
                continue
            assert found[name][row["step"]] == f32(value), (name, row["step"], found[name][row["step"]], value)
            compared += 1
    assert tags["images"], "no pictures of prompts"
    for tag in tags["images"]:
        for picture in board.Images(tag):
            assert picture.width > 0 and picture.height > 0 and picture.encoded_image_string[:4] in (b"\x89PNG", b"\xff\xd8\xff\xe0", b"GIF8")
    table = tensor_util.make_ndarray(board.Tensors("completions")[-1].tensor_proto)
    assert list(table[0][:4]) == [b"row", b"completion", b"reward", b"advantage"], table[0]
    last = max(path.name for path in (run / "rollouts").glob("step-*.jsonl"))
    lines = [json.loads(line) for line in (run / "rollouts" / last).read_text().splitlines()]
    for cells, line in zip(table[1:], lines):
        text = cells[1].decode().replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace("<br>", "\n")
        assert text.replace("\\", "") == line["completion"].replace("\\", ""), (text, line["completion"])
        assert float(cells[2]) == round(line["reward"], 4)
    print(f"tensorboard: {compared} values, {len(tags['images'])} pictures, a table of {len(table) - 1} completions")


def records(data, block=32768):
    """The records of a file of W&B: those of a LevelDB log behind a header of seven bytes."""
    assert data[:4] == b":W&B", data[:7]
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        # Whole, first, middle, last.
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            yield parts


def wandb(run, rows):
    from wandb.proto import wandb_internal_pb2

    (path,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    history, config = [], {}
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
        elif kind == "run":
            config.update({item.key: json.loads(item.value_json) for item in record.run.config.update})
            name = record.run.display_name
            project = record.run.project
    compared = 0
    for row in rows:
        told = {}
        for line in history:
            if line.get("train/global_step") == row["step"]:
                told.update({key: value for key, value in line.items() if key in row})
        for key, value in row.items():
            if key in ("step", "epoch") or value is None:
                continue
            assert told[key] == value, (key, row["step"], told.get(key), value)
            compared += 1
    tables = [line for line in history if line.get("completions/_type") == "table-file"]
    assert tables and all(table["completions/nrows"] > 0 for table in tables), tables
    media = []
    for table in tables:
        told = json.loads((path.parent / "files" / table["completions/path"]).read_text())
        at = told["columns"].index("image")
        media += [row[at] for row in told["data"] if row[at]]
    assert media, "no pictures in the tables"
    assert config["learning_rate"] is not None and config["num_generations"] == 8, config
    print(f"wandb: run {name!r} of {project!r}, {compared} values, {len(tables)} tables, {len(media)} pictures")


def main():
    run = Path(sys.argv[1])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    tensorboard(run, rows)
    wandb(run, rows)


main()
