#!/usr/bin/env python3
"""Starts the program on thousands of files that are damaged, hostile or absurd, and looks at how it ends.

    python3 tools/reliability/bad_files.py target/release/omnigrpo
    python3 tools/reliability/bad_files.py target/debug/omnigrpo --cases 600 --classes templates,configs

A case survives if the program ends by itself: no panic, no signal, within 60 s and 2 GB, and with a message where it fails.
Whether a file is refused or used is not judged here; the tests of each crate do that.

Cases are made from the repository's own fixtures. A case depends on `--seed`, its class and its number alone. Results are
appended to OUT/results.jsonl, so a run that was interrupted goes on where it stopped, and the directory of every case
that did not survive is kept below OUT/failures with the command in `command.sh`. Needs Linux and nothing but Python.
Videos other than GIF and WebP are only decoded where ffmpeg is installed.
"""

import argparse
import concurrent.futures
import contextlib
import copy
import ctypes
import hashlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "crates/models/tests/golden"
CHECKPOINTS = GOLDEN / "checkpoints"
MEDIA = ROOT / "crates/media/tests/data"
MOST_SECS, MOST_BYTES = 60, 2 << 30
ROW = {"problem": "What is 2+3?", "solution": "<answer>5</answer>"}
GENERATE = ["generate", "--model", "m", "--prompt", "Hi", "--max_completion_length", "1", "--threads", "1"]
TRAIN = (
    "train --model m --train_file rows.jsonl --output_dir run --max_steps 1 --num_generations 2 --threads 1 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 1 --max_completion_length 2 --allow_text_only true"
).split()

# Values that take a setting's place: wrong types, edges of integer types, sizes that nothing has, text that is no text.
VALUES = [
    None, True, -1, 0, 1, 2, 3, 7, 1.5, 1e300, 2**16, 2**31, 2**32, 2**53, 2**62, 2**64, "", "x", "\0", "../..", [], [1], [2**31] * 3,
    {}, {"a": 1},
]


# --- Making a case: a function (rng, number, directory) -> arguments, or (arguments, a judge of (exit code, stderr, directory)
# that gives a reason against survival or None) --------------------------------------------------------------------------


def checkpoint(into, name):
    """A copy of a checkpoint in the directory `m`, whose files a case replaces."""
    return shutil.copytree(CHECKPOINTS / name, into / "m")


def put(path, content):
    """Replaces a file."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))


def dump(value):
    return json.dumps(value, ensure_ascii=False)


def damaged(rng, data, other=b""):
    """Cut, flipped, overwritten, spliced, repeated, padded."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        if not data:
            return bytes(data)
        at = rng.randrange(len(data))
        if rng.random() < 0.5:
            at = rng.randrange(min(len(data), 64))  # headers
        match rng.randrange(9):
            case 0:
                del data[at:]
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 3:
                data[at : at + 4] = struct.pack(rng.choice("<>") + "I", rng.choice([0, 1, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1]))
            case 4:
                data[at:at] = rng.randbytes(rng.choice([1, 16, 1000]))
            case 5:
                data[at:at] = data[: rng.randrange(len(data))]
            case 6:
                del data[at : at + rng.choice([1, 4, 100])]
            case 7 if other:
                data[at:] = other[rng.randrange(len(other)) :]
            case _:
                data += bytes(rng.choice([1, 100, 10_000]))
        if len(data) > 1 << 22:
            del data[1 << 22 :]
    return bytes(data)


def one_of(rng, folder, *ends):
    files = sorted(p for p in folder.iterdir() if p.suffix in ends)
    return rng.choice(files)


def show(into, row):
    checkpoint(into, "qwen2_5_vl_tied")
    put(into / "rows.jsonl", dump(row | ROW) + "\n")
    return ["data", "show", "--model", "m", "--train_file", "rows.jsonl"]


def png(width, height, color=2, depth=8, body=b"", chunks=()):
    """A PNG with a header of any size."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    rest = b"".join(chunk(kind, data) for kind, data in chunks)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rest + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def pictures(rng, number, into):
    kinds = (".png", ".jpg", ".webp", ".bmp", ".tiff", ".gif")
    if number % 8 == 0:
        side = lambda: rng.choice([0, 1, 28, 4096, 20_000, 65_535, 2**31 - 1, 2**32 - 1])
        rows = bytes(rng.choice([0, 100, 1 << 20, 64 << 20]))
        texts = [(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20)))] if rng.random() < 0.3 else []
        data = png(side(), side(), rng.choice([0, 2, 3, 4, 6, 9]), rng.choice([1, 8, 16, 7]), rows, texts)
        name = "a.png"
    else:
        source, other = one_of(rng, MEDIA, *kinds), one_of(rng, MEDIA, *kinds)
        data = damaged(rng, source.read_bytes(), other.read_bytes())
        name = "a" + rng.choice([source.suffix, source.suffix, rng.choice(kinds), ".mp4", ""])
    put(into / name, data)
    kind = "image" if number % 5 else "video"
    return show(into, {kind: name, "problem": f"<{kind}>What?"})


def gif(width, height, frames, size=(1, 1)):
    """A GIF whose frames are a pixel each."""
    frame = b"\x21\xf9\x04\0\x01\0\0\0" + b"\x2c" + struct.pack("<HHHHB", 0, 0, *size, 0) + b"\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame * frames + b"\x3b"


def animations(rng, number, into):
    if number % 6 == 0:
        side = lambda: rng.choice([0, 1, 16, 1000, 65_535])
        data = gif(side(), side(), rng.choice([0, 1, 2, 100, 5_000]), (side(), side()))
        name = "a.gif"
    else:
        source = rng.choice([MEDIA / "animated.gif", MEDIA / "animated_lossless.webp", GOLDEN / "media/clip.gif"])
        data, name = damaged(rng, source.read_bytes()), "a" + source.suffix
    put(into / name, data)
    video = [name] if rng.random() < 0.3 else name
    return show(into, {"video": video, "problem": "<video>What?"})


def videos(rng, number, into):
    clips = [MEDIA / "audio/clip.mp4", MEDIA / "audio/mute.mp4"]
    data = damaged(rng, rng.choice(clips).read_bytes(), rng.choice(clips).read_bytes())
    name = "a" + rng.choice([".mp4", ".mp4", ".mkv", ".avi", ".webm", ".ts", ".m3u8", ".txt"])
    if number % 6 == 0:
        data = rng.choice([
            b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", b"ffconcat version 1.0\nfile '/etc/passwd'\n", b"v=0\nm=video 1 RTP/AVP 0\n",
            b"<?xml version='1.0'?><MPD><BaseURL>http://127.0.0.1/</BaseURL></MPD>", b"", b"\0" * 1000,
        ])
    if number % 9 == 0:
        name = rng.choice(["-f lavfi", "concat:a.mp4", "http:a", "`id`.mp4", "%d.mp4", "a\nb.mp4"])
    put(into / name.replace("/", "_"), data)
    more = rng.choice([{}, {"fps": rng.choice(VALUES)}, {"nframes": rng.choice(VALUES)}, {"video_start": rng.choice(VALUES)}])
    return show(into, {"video": name, "problem": "<video>What?"} | more)


def sounds(rng, number, into):
    kinds = (".wav", ".flac", ".mp3", ".aac", ".m4a", ".ogg", ".opus", ".mp4")
    source, other = one_of(rng, MEDIA / "audio", *kinds), one_of(rng, MEDIA / "audio", *kinds)
    name = "a" + rng.choice([source.suffix, source.suffix, rng.choice(kinds)])
    put(into / name, damaged(rng, source.read_bytes(), other.read_bytes()))
    checkpoint(into, "humanomni")
    put(into / "rows.jsonl", dump({"audio": name, "problem": "<audio>What?", "solution": "x"}) + "\n")
    return ["data", "show", "--model", "m", "--train_file", "rows.jsonl"]


def deep(rng):
    return rng.choice(["[", '{"a":', '[{"a":']) * rng.choice([10, 200, 100_000])


def rows(rng, number, into):
    checkpoint(into, "qwen2_5_vl_tied")
    shutil.copy(GOLDEN / "media/shapes.png", into / "s.png")
    shutil.copy(GOLDEN / "media/clip.gif", into / "c.gif")
    kind, name = rng.choice([("image", "s.png"), ("video", "c.gif")])
    row = {kind: name, "problem": f"<{kind}>What?", "solution": "<answer>x</answer>", "completions": ["y"]}
    keys = [
        *row, "id", "images", "videos", "messages", "conversations", "prompt", "answer", "accu_reward_method", "resized_width", "resized_height",
        "min_pixels", "max_pixels", "total_pixels", "fps", "nframes", "min_frames", "max_frames", "video_start", "video_end", "options",
    ]
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = rng.choice([*VALUES, "/etc/passwd", "http://127.0.0.1/", "\x1b]0;x\x07", "a" * 100_000, [name] * 50, [{"role": "user"}]])
        row[rng.choice(keys)] = value
    line = dump(row)
    match number % 5:
        case 0:
            line = damaged(rng, line.encode()).decode("latin-1")
        case 1:
            line = line[:-1] + ', "x": ' + deep(rng)
    put(into / "rows.jsonl", line + "\n" + dump(ROW) + "\n")
    verb = rng.choice([
        ["data", "show", "--model", "m", "--train_file", "rows.jsonl"],
        ["data", "check", "--model", "m", "--train_file", "rows.jsonl"],
        ["generate", "--model", "m", "--input", "rows.jsonl", "--output", "out.jsonl", "--max_completion_length", "1", "--threads", "1"],
        ["score", "--model", "m", "--input", "rows.jsonl", "--output", "out.jsonl", "--threads", "1"],
        ["eval", "--model", "m", "--eval_file", "rows.jsonl", "--max_completion_length", "1", "--threads", "1"],
        [*TRAIN, "--skip_data_check", "true"],
    ])
    return verb


def places(value, at=()):
    """Every key of nested objects."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*at, key)
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value[:2]):
            yield from places(inner, (*at, i))


def change(value, place, new):
    value = copy.deepcopy(value)
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    if new is DROP:
        del inner[place[-1]]
    else:
        inner[place[-1]] = new
    return value


DROP = object()
CONFIGS = ["qwen2_vl_tied", "qwen2_5_vl_tied", "internvl_original", "internvl_hf", "humanomni"]


def all_configs():
    """(checkpoint, file, key, value) of every case: each key of each configuration with up to 16 values, and garbage."""
    list_ = []
    for name in CONFIGS:
        for path in sorted((CHECKPOINTS / name).rglob("*.json")):
            file = str(path.relative_to(CHECKPOINTS / name))
            if "tokenizer" in file or "index" in file or "chat_template" in file:
                continue
            config = json.loads(path.read_text())
            for i, place in enumerate(places(config)):
                values = random.Random(f"{name} {file} {i}").sample(VALUES, 15)
                list_ += [(name, file, place, value) for value in [DROP, *values]]
            list_ += [(name, file, None, n) for n in range(8)]
    random.Random("configs").shuffle(list_)
    return list_


ALL_CONFIGS = None


def configs(rng, number, into):
    name, file, place, value = ALL_CONFIGS[number % len(ALL_CONFIGS)]
    path = checkpoint(into, name) / file
    text = path.read_text()
    if place is not None:
        text = dump(change(json.loads(text), place, value))
    else:
        text = [text[: len(text) // 2], "", "null", "[]", "{}", deep(rng), "\xff\xfe", text + text][value]
    put(path, text)
    if number % 4 == 0:
        media = GOLDEN / "media/shapes.png"
        put(into / "rows.jsonl", dump({"image": str(media), "problem": "<image>What?", "solution": "x"}) + "\n")
        return ["generate", "--model", "m", "--input", "rows.jsonl", "--output", "out.jsonl", "--max_completion_length", "1", "--threads", "1"]
    return GENERATE


def weights_header(rng, data):
    """A safetensors file whose header is changed."""
    length = struct.unpack("<Q", data[:8])[0]
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    for _ in range(rng.choice([1, 1, 3])):
        name = rng.choice(list(header))
        if name == "__metadata__":
            header[name] = rng.choice(VALUES)
            continue
        key = rng.choice(["dtype", "shape", "data_offsets", None])
        match key:
            case "dtype":
                header[name][key] = rng.choice(["F16", "BF16", "F64", "I8", "U64", "F8_E4M3", "zzz", 3])
            case "shape":
                header[name][key] = rng.choice([[], [0], [2**31, 2**31], [2**62, 4], [-1], "x", [1] * 1000])
            case "data_offsets":
                header[name][key] = rng.choice([[0, 0], [0, 2**62], [2**64 - 1, 0], [8, 4], [], [0]])
            case None:
                header[rng.choice(["x", "", "\0", name * 20])] = header.pop(name)
        if not isinstance(header, dict) or not header:
            break
    text = dump(header).encode()
    length = rng.choice([len(text)] * 6 + [0, 2**63, 2**64 - 1, len(text) + 1])
    return struct.pack("<Q", length) + text + rest


def safetensors(rng, number, into):
    if number % 5 == 0:
        m = checkpoint(into, "qwen2_5_vl_untied")
        path = m / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        key = rng.choice(list(index["weight_map"]))
        index["weight_map"][key] = rng.choice(["../x", "/dev/zero", "", "model.safetensors.index.json", None, "a/b", "."])
        put(path, rng.choice([dump(index), damaged(rng, path.read_bytes())]))
        return GENERATE
    m = checkpoint(into, rng.choice(["qwen2_5_vl_tied", "qwen2_vl_tied", "internvl_hf", "humanomni", "qwen2_5_vl_tied_bf16"]))
    path = m / "model.safetensors"
    data = path.read_bytes()
    put(path, weights_header(rng, data) if number % 2 else damaged(rng, data))
    return GENERATE


PIECES = [
    "{% set ns = namespace(a=[], s='aaaa', d={}) %}", "{% for i in range(99999) %}", "{% for i in range(60) %}", "{% for m in messages %}", "{% endfor %}",
    "{% set ns.a = [ns.a] %}", "{% set ns.a = [ns.a, ns.a] %}", "{% set ns.a = ns.a + [i] %}", "{% set ns.a = ns.a + ns.a %}", "{% set ns.s = ns.s + ns.s %}",
    "{% set ns.s = ns.s ~ ns.s %}", "{% set ns.d = {'a': ns.d} %}", "{% set ns.d = dict(ns.d, a=ns.d) %}", "{% set ns.a = ns %}", "{% set ns.a = [ns] %}",
    "{% set ns.s = ns.s * 99 %}", "{% set ns.a = ns.a * 99 %}", "{% set ns.a = ns.a[:] %}", "{% set ns.s = ns.s.replace('a', ns.s) %}",
    "{% set ns.s = ns.s.join(ns.s) %}", "{% set ns.s = [ns.s, ns.s]|join(ns.s) %}", "{% set ns.s = ns.s|indent(10**6) %}", "{% set ns.s = '%999999999d'|format(5) %}",
    "{% set ns.a = ns.a|slice(10**9)|list %}", "{% set ns.a = ns.a|batch(10**9, 1)|list %}", "{% set ns.a = ns.a|map('string')|list %}",
    "{% set ns.a = ns.a|reverse|list %}", "{% set ns.a = ns.a|unique|sort|list %}", "{% set ns.a = ns.a|zip(ns.a)|list %}", "{% set ns.s = ns.a|string %}",
    "{% set ns.s = ns.a|tojson(indent=9) %}", "{% set ns.s = ns.a|pprint %}", "{% set ns.s = ns.s|e|e|e %}", "{% set ns.a = ns.s|list %}", "{% set ns.a = ns.s.split('') %}",
    "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}", "{% set ns.s = f(ns.s) %}", "{% macro g() %}{{ g() }}{% endmacro %}{{ g() }}", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
    "{% if ns.a == ns.a %}{% endif %}", "{% if ns.s in ns.s %}{% endif %}", "{% if ns.a < [ns.a] %}{% endif %}", "{{ ns.a }}", "{{ ns.s }}", "{{ ns.a|length }}", "{{ ns.s[-1] }}",
    "{{ ns }}", "{{ debug() }}", "{{ messages }}", "{{ loop }}", "{{ self }}", "{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{% block b %}{{ self.b() }}{% endblock %}",
    "{{ range(10**9)|list }}", "{{ 9**9**9**9 }}", "{{ ('a' * 9999999)|upper }}", "{{ 'a' * 10**12 }}", "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{{ messages[10**18] }}",
    "{{ 'x'[::-1] }}", "{{ messages|groupby('role')|list }}", "{{ messages|selectattr('a.b.c.d')|list }}", "{{ ''.format(*range(9)) }}", "{{ '{:999999999}'.format(1) }}",
    "{{ 1 / 0 }}", "{{ 1 // 0 }}", "{{ 7 % 0 }}", "{{ -9223372036854775808 // -1 }}", "{{ 2**63 * 2**63 }}", "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}", "{{ '\\ud800' }}",
]
LONG = ["not ", "-", "+1", "~1", "|e", ".a", "[0]", "(", "[", "{'a':", "1 if 1 else ", "is defined ", "and 1 ", " == 1", "*1", "**2", "(1)("]


def templates(rng, number, into):
    m = checkpoint(into, rng.choice(["qwen2_5_vl_tied", "internvl_hf"]))
    path = m / "chat_template.jinja"
    match number % 4:
        case 0:
            source = "{{ 1 " + rng.choice(LONG) * rng.choice([100, 3_000, 20_000, 33_000]) + rng.choice(["1", "", ")"]) + " }}"
        case 1:
            source = damaged(rng, path.read_bytes()).decode("latin-1")
        case _:
            # Loops from `ns` on are used up at once or fail.
            grows, ends = PIECES[1 : PIECES.index("{{ ns }}")], PIECES[PIECES.index("{{ ns }}") :]
            pieces = [rng.choice(grows if rng.random() < 0.9 else ends) for _ in range(rng.choice([1, 2, 4, 8]))]
            opened = sum("{% for" in p and "endfor" not in p for p in pieces)
            source = PIECES[0] + rng.choice(PIECES[1:4]) * (number % 3 > 0) + "".join(pieces)
            source += "{% endfor %}" * (opened + (number % 3 > 0)) + rng.choice(["", "{{ ns.a }}", "{{ ns.s }}", "{{ ns.a|length }}"])
    put(path, source)
    return GENERATE


def tokenizers(rng, number, into):
    m = checkpoint(into, rng.choice(["qwen2_5_vl_tied", "internvl_hf", "humanomni"]))
    if number % 5 == 0:
        path = m / rng.choice(["tokenizer_config.json", "generation_config.json"])
        config = json.loads(path.read_text())
        put(path, dump(change(config, rng.choice(list(places(config))), rng.choice([DROP, *VALUES]))))
        return GENERATE
    path = m / "tokenizer.json"
    file = json.loads(path.read_text())
    replace = {"type": "Replace", "pattern": rng.choice([{"String": "i"}, {"Regex": "(a+)+$"}, {"Regex": ""}, {"String": ""}]), "content": "i" * rng.choice([0, 1, 10, 1000])}
    many = [replace] * rng.choice([1, 9, 200])
    new = {
        "normalizer": [{"type": "Precompiled", "precompiled_charsmap": rng.choice(["AAAA", "AAAAAGEA", "/////w==", "BAAAAAAAAABh"])},
                       {"type": "Sequence", "normalizers": many}, {"type": "Prepend", "prepend": "x" * rng.choice([1, 10 << 20])}, {"type": "Strip"}],
        "pre_tokenizer": [{"type": "FixedLength", "length": rng.choice([0, 1, 2**62])}, {"type": "Split", "pattern": {"Regex": rng.choice(["(a*)*b", "(", "(?=)", "."])},
                          "behavior": rng.choice(["Isolated", "Removed", "Contiguous"]), "invert": rng.random() < 0.5}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}],
        "decoder": [replace, {"type": "Strip", "content": "i", "start": 2**40, "stop": 2**40}, {"type": "ByteFallback"}, {"type": "WordPiece", "prefix": "", "cleanup": True}],
        "post_processor": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, None],
    }
    match number % 3:
        case 0:
            part = rng.choice(list(new))
            file[part] = rng.choice(new[part])
        case 1:
            model = file["model"]
            key = rng.choice([*model, None])
            if key is None:
                file["added_tokens"] = [t | {"id": rng.choice([0, 2**32 - 1, 2**24, t["id"]])} for t in file.get("added_tokens", [])]
            elif key == "vocab" and isinstance(model[key], dict):
                for token in rng.sample(list(model[key]), min(5, len(model[key]))):
                    model[key][token] = rng.choice([0, 2**31, 2**32 - 1, 2**32, -1, "x"])
            else:
                model[key] = rng.choice(VALUES)
        case 2:
            put(path, damaged(rng, path.read_bytes()))
            return GENERATE
    put(path, dump(file))
    return GENERATE


def adapters(rng, number, into):
    adapter, base = rng.choice([("attention", "qwen2_vl_untied"), ("everywhere", "qwen2_5_vl_tied"), ("tiles_hf", "internvl_hf")])
    checkpoint(into, base)
    source = GOLDEN / "lora" / adapter
    for path in source.iterdir():
        put(into / "a" / path.name, path.read_bytes())
    config_path, weights = into / "a/adapter_config.json", into / "a/adapter_model.safetensors"
    match number % 3:
        case 0:
            config = json.loads(config_path.read_text())
            put(config_path, dump(change(config, rng.choice(list(places(config))), rng.choice([DROP, *VALUES, "regex(", ["(a+)+"] * 9]))))
        case 1:
            put(weights, weights_header(rng, weights.read_bytes()))
        case 2:
            path = rng.choice([config_path, weights])
            put(path, damaged(rng, path.read_bytes()))
    return [*GENERATE, "--adapter_name_or_path", "a"]


SETTINGS = {
    "learning_rate": 1e-5, "num_generations": 2, "max_steps": 1, "temperature": 1.0, "beta": 0.04, "loss_type": "grpo", "max_completion_length": 2,
    "reward_funcs": ["accuracy", "format"], "image_folders": ["."], "seed": 1, "warmup_ratio": 0.1, "save_steps": 10, "max_pixels": 12544,
}


def yaml(rng, number, into):
    checkpoint(into, "qwen2_5_vl_tied")
    put(into / "rows.jsonl", dump(ROW) + "\n")
    lines = [f"{key}: {dump(value)}" for key, value in SETTINGS.items()]
    for _ in range(rng.choice([1, 1, 3])):
        key = rng.choice([*SETTINGS, "x", "", "a" * 1000, "model", "output_dir"])
        value = rng.choice([
            *map(dump, VALUES), "&a [*a]", "&a {b: *a}", "!!python/object/apply:os.system ['id']", "!!binary AAAA", "|\n  " + "x" * 100_000, "[" * 10_000, "{a: " * 5_000,
            "*undefined", "<<: {a: 1}", "0x7fffffffffffffff", "1_000", ".inf", ".nan", "1e999", "~", "? a", "'unclosed", "2001-01-01", "\t", "\x00", "%TAG ! x",
        ])
        lines = [line for line in lines if not line.startswith(f"{key}: ")]
        lines.insert(rng.randrange(len(lines) + 1), f"{key}: {value}")
    if number % 7 == 0:
        anchors = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        anchors += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
        lines = anchors
    text = "\n".join(lines) + "\n"
    put(into / "c.yaml", damaged(rng, text.encode()) if number % 4 == 0 else text)
    return ["train", "--config", "c.yaml", "--model", "m", "--train_file", "rows.jsonl", "--output_dir", "run", "--print_config", "true"]


# --- Flags: each mistake is refused, and all of them are named at once ---------------------------------------------------


def settings_of(verb):
    """(name, what it takes) of each setting of a verb, from the page that is written from the table of flags."""
    for line in (ROOT / "docs/generated/flags.md").read_text().splitlines():
        cells = line.replace("\\|", "/").split(" | ")
        if line.startswith("| `") and verb in cells[3].rstrip(" |").split(", "):
            # The last bracket says what it takes; words list their choices behind it.
            yield cells[0].split("`")[1], cells[1].split("<br>")[0].rsplit("(", 1)[-1] if "<br>" not in cells[1] else "a choice"


def wrong_values(takes):
    if takes.startswith(("a whole number", "a number", "a share", "numbers")):
        return ["x", "nan", "-7e9", "1e999", "0x10", "--", "1,2;3", "\u0663", "1 x"]
    if takes.startswith(("a choice", "true or false")):
        return ["bogus", "\x1b[2J", "tru e", "9" * 400, "\u202e"]
    return []


# Contradictions of `train`: what is given, and the name that must be in the error.
CONTRADICTIONS = [
    ("--beta 0 --kl k1_seq", "kl"), ("--eval_steps 10", "eval_steps"), ("--category_column k", "category_column"),
    ("--reward_weights 1 2 3", "reward_weights"), ("--lora_r 4", "lora_r"),
    ("--loss_type sapo --epsilon_high 0.3", "epsilon_high"), ("--metric_for_best_model eval_accuracy", "metric_for_best_model"),
    ("--save_strategy no --save_steps 3", "save_steps"), ("--bertscore_idf true", "bertscore_idf"), ("--lora_dropout 0.1", "lora_dropout"),
]


def flags(rng, number, into):
    """Some right settings and some mistakes, as flags or in a file."""
    put(into / "rows.jsonl", dump(ROW) + "\n")
    verb = rng.choice(["train", "train", "sft", "generate", "score", "eval", "data check", "rewards run", "bench", "demo"])
    chosen, words, config = [], [], []
    candidates = [(name, value) for name, takes in settings_of(verb) for value in wrong_values(takes)]
    for name, value in rng.sample(candidates, rng.choice([1, 1, 2, 3, 8])):
        if name in chosen:
            continue
        chosen.append(name)
        if rng.random() < 0.3:
            config.append(f"{name}: {dump(value)}")
        else:
            words += [f"--{name}={value}"] if value.startswith("-") or rng.random() < 0.5 else [f"--{name}", value]
    if rng.random() < 0.3:
        chosen.append(name := rng.choice(["num_generation", "zzz", "a" * 3000, "x\x1b]0;y\x07", "\u00e9", "learning_rat"]))
        words += [f"--{name}", "1"]
    if verb == "train" and rng.random() < 0.4:
        for text, name in rng.sample(CONTRADICTIONS, rng.choice([1, 2, 4])):
            given = [word[2:] for word in text.split() if word.startswith("--")]
            # One mistake in a setting may hide what it contradicts.
            if not any(word in " ".join([*chosen, *words, *config]) for word in given):
                chosen.append(name)
                words += text.split()
    args = [*verb.split(), *words]
    if config:
        put(into / "c.yaml", "\n".join(config) + "\n")
        args += ["--config", "c.yaml"]

    def judge(code, said, _):
        if code != 2:
            return f"exit code {code}, expected 2"
        missing = [name for name in chosen if name.isascii() and name.isprintable() and name[:60] not in said]
        if missing:
            return f"not named: {', '.join(missing)}"
        return control_characters(said)

    return args, judge


# Texts that `{:?}` and `serde` write for values and types.
NAMES_OF_RUST = re.compile(r"\bSome\(|\b\w*Error\s?[({]|\binvalid (type|value): |\buntagged enum |\bexpected (struct|enum|[iu](8|16|32|64|size)\b)")


def control_characters(said):
    return "control characters on the terminal" if any(unicodedata.category(c) == "Cc" and c != "\n" for c in said) else None


# --- Completions: what a model writes reaches every reward ---------------------------------------------------------------

TEXTS = [
    "<", "<answer>", "</answer>", "<think>", "</think>", "<explain>", "(A)", "(", "A, ", "[", "[1,", "[0,0,1,1]", "{", '{"bbox_2d":[0,0,1,1],"label":"a"},',
    "```json\n", "```", "\\boxed{", "\\frac", "\\frac{1}{", "\\text{", "\\sqrt", "$", "^", "9^", "1/", "1e999", "-", "1,000,", "yes ", "kh\u00f4ng ", "a", "a ",
    "aaaaaaaa!", "\u0301", "\u0130", "\ud800", "\0", "\x1b[2J", "\u202e", "\n", "\r\n", "\U0001d7d9", "x" * 99, "(a+)+$", ".*", '{"a":', "&lt;", "%s%n", "../",
]
TEXT_REWARDS = (
    "accuracy format label emotion mcq mcq_iou yes_no short_text math iou od_ap od_ap50 odLength weighted_sum all_match fuzzy cider repetition"
).split()
MODES = (
    "auto label emotion mcq_exact mcq_iou short_text math yes_no iou od_ap od_ap50 odLength weighted_sum all_match fuzzy r1v"
).split()


def hostile_text(rng, most):
    size = rng.choice([100, 10_000, most])
    text = "".join(rng.choice(TEXTS) * rng.choice([1, 1, 3, 1000]) for _ in range(rng.choice([1, 3, 9])))
    text = (text * (size // max(len(text), 1) + 1))[:size]
    return rng.choice(["{}", "<answer>{}</answer>", "<think>x</think><answer>{}</answer>", "<answer>```json\n[{}\n```</answer>"]).replace("{}", text)


def completions(rng, number, into):
    def row():
        truth = rng.choice(["<answer>5</answer>", "(B) x", "[1,2,3,4]", '[{"bbox_2d":[0,0,9,9],"label":"a"}]', "yes", "happy", None])
        if truth is None:
            truth = hostile_text(rng, 100_000)
        made = [hostile_text(rng, 1 << 20) for _ in range(rng.choice([1, 1, 2]))]
        return {"problem": rng.choice(["Which?", hostile_text(rng, 10_000)]), "solution": truth, "explanation": truth, "completions": made}

    lines = [dump(row()) for _ in range(rng.choice([1, 2]))]
    if number % 10 == 0:
        value = rng.choice([*VALUES, deep(rng), [[["x"]]], [{"role": "assistant", "content": "x"}], ["x"] * 5_000])
        lines.append('{"problem": "x", "solution": "x", "completions": ' + (value if isinstance(value, str) and value else dump(value)) + "}")
    data = ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    put(into / "rows.jsonl", damaged(rng, data) if number % 10 == 1 else data)
    if number % 6 == 0:
        checkpoint(into, "qwen2_5_vl_tied")
        return ["score", "--model", "m", "--input", "rows.jsonl", "--output", "out.jsonl", "--threads", "1"]
    mode = rng.choice(MODES)
    rewards = rng.sample(TEXT_REWARDS, rng.choice([1, 3, len(TEXT_REWARDS)]))
    args = ["rewards", "run", "--input", "rows.jsonl", "--output", "out.jsonl", "--threads", "1", "--reward_funcs", ",".join(rewards)]
    if "accuracy" in rewards:
        args += ["--accuracy_mode", mode]

    def judge(code, said, place):
        if code == 0:
            for line in (place / "out.jsonl").read_text().splitlines():
                scored = json.loads(line)
                numbers = [x for column in scored["rewards"].values() for x in column if x is not None]
                if set(scored["rewards"]) != set(rewards) or not all(-1 <= x <= 3 for x in numbers):
                    return "rewards that are missing or out of range"
        return control_characters(said)

    return args, judge


# --- Playlists: no file but the row's own is opened, no address asked, no command run ------------------------------------


def watch(paths):
    """A function that says whether one of the files was opened since."""
    libc = ctypes.CDLL(None, use_errno=True)
    watcher = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    for path in paths:
        if watcher < 0 or libc.inotify_add_watch(watcher, os.fsencode(path), 0x20) < 0:  # IN_OPEN
            raise OSError(ctypes.get_errno(), "inotify")

    def opened():
        try:
            return bool(os.read(watcher, 4096))
        except BlockingIOError:
            return False
        finally:
            os.close(watcher)

    return opened


def listen():
    """A port of this machine, and a function that says whether anything was connected to it since."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    def connected():
        with listener:
            try:
                listener.accept()[0].close()
                return True
            except BlockingIOError:
                return False

    return listener.getsockname()[1], connected


def playlists(rng, number, into):
    secret = into / "outside/secret.mp4"
    put(secret, (MEDIA / "audio/clip.mp4").read_bytes())
    put(into / "outside/1.png", (GOLDEN / "media/shapes.png").read_bytes())
    opened, (port, connected) = watch([secret, into / "outside/1.png"]), listen()
    address = f"127.0.0.1:{port}"
    target = rng.choice([
        str(secret), "../outside/secret.mp4", f"file:{secret}", f"file://{secret}", f"http://{address}/a.mp4", f"tcp://{address}", f"udp://{address}",
        f"rtmp://{address}/a", f"concat:{secret}|{secret}", f"subfile,,start,0,end,0,,:{secret}", f"crypto:{secret}", f"async:{secret}", f"cache:{secret}",
        f"pipe:0", f"ftp://{address}/a", f"data:text/plain,{secret}", f"\\\\{address}\\a", "../outside/%d.png", f"movie={secret}", f"tee:{secret}",
    ])
    text = rng.choice([
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{target}\n#EXT-X-ENDLIST\n", f'#EXTM3U\n#EXT-X-MAP:URI="{target}"\n#EXTINF:1,\n{target}\n',
        f'#EXTM3U\n#EXT-X-KEY:METHOD=AES-128,URI="{target}"\n#EXTINF:1,\n{target}\n', f"ffconcat version 1.0\nfile '{target}'\nduration 1\n",
        f"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {port} RTP/AVP 96\na=rtpmap:96 H264/90000\n",
        f"<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011' type='static'><Period><AdaptationSet mimeType='video/mp4'><Representation id='1' bandwidth='1'>"
        f"<BaseURL>{target}</BaseURL></Representation></AdaptationSet></Period></MPD>", f"<asx version='3.0'><entry><ref href='{target}'/></entry></asx>",
        f"[playlist]\nFile1={target}\nNumberOfEntries=1\n", f"<smil><body><video src='{target}'/></body></smil>", f"RTSPtext\n{target}\n",
        f"<svg xmlns='http://www.w3.org/2000/svg' xmlns:x='http://www.w3.org/1999/xlink'><image x:href='{target}' width='9' height='9'/></svg>",
        f"import vapoursynth as vs\nopen('{into}/ran', 'w')\n", f"AVISource(\"{target}\")\n", f"[InternetShortcut]\nURL={target}\n", f"movie={secret}",
        "#!/bin/sh\ntouch ran\n", f"<?xml version='1.0'?><!DOCTYPE a [<!ENTITY b SYSTEM 'file://{secret}'>]><MPD>&b;</MPD>",
    ])
    ending = rng.choice([".mp4", ".m3u8", ".m3u", ".ts", ".mkv", ".avi", ".mpd", ".sdp", ".asx", ".txt", ".gif", ".png", ".wav", ".mp3", ".opus", ".svg", ".vpy", ".avs", ""])
    name, kind = "a" + ending, rng.choice(["video", "video", "audio", "image"])
    data = text.encode()
    match number % 5:
        case 0:
            # A QuickTime file whose samples lie in another file.
            reference = f"{target}\0".encode()
            entry = struct.pack(">I4sI", 12 + len(reference), b"url ", 0) + reference
            data = (MEDIA / "audio/clip.mp4").read_bytes().replace(struct.pack(">I4sI", 12, b"url ", 1), entry)
            name = "a.mp4"
        case 1:
            name = target if rng.random() < 0.5 else rng.choice([
                "-f lavfi", "-i", "`touch ran`.mp4", "$(touch ran).mp4", "a;touch ran;.mp4", "|touch ran", "lavfi:color", "x11grab::0", "http:%d.mp4", "a%d.png", "a\n-i.mp4",
            ])
        case 2:
            (into / "in").mkdir()
            (into / "in" / name).symlink_to(secret)
        case 3:
            (into / "in/frames").mkdir(parents=True)
            (into / "in/frames/1.png").symlink_to("../../outside/1.png")
            name, kind = "frames", "video"
    if number % 5 in (0, 1, 4):
        put(into / "in" / name.replace("/", "_")[:200], data)
    checkpoint(into, "humanomni" if kind == "audio" else "qwen2_5_vl_tied")
    put(into / "rows.jsonl", dump({kind: [name] if rng.random() < 0.2 else name, "problem": f"<{kind}>What?", "solution": "x"}) + "\n")
    args = ["data", "show", "--model", "m", "--train_file", "rows.jsonl", f"--{kind}_folders", "in"]
    if rng.random() < 0.3:
        args += ["--allow_urls", "public"]

    def judge(code, said, place):
        escapes = [("opened a file outside of its root", opened()), ("connected to an address", connected()), ("ran a command", (place / "ran").exists())]
        return ", ".join(what for what, did in escapes if did) or control_characters(said)

    return args, judge


# --- Damaged run directories: a resumed run is right, or says what is not ----------------------------------------------

RESUME = (
    "train --model m --train_file rows.jsonl --eval_file rows.jsonl --eval_steps 2 --output_dir run --max_steps 6 --save_steps 2 --num_generations 2 "
    "--gradient_accumulation_steps 1 --max_completion_length 3 --reward_funcs random --learning_rate 1e-3 --threads 1"
).split()
WHOLE_RUN = None


def whole_run(binary, into):
    """A finished run of six steps."""
    shutil.rmtree(into, ignore_errors=True)
    checkpoint(into, "qwen2_5_vl_tied")
    put(into / "rows.jsonl", "".join(dump({"id": str(i), **ROW, "problem": f"{i}?"}) + "\n" for i in range(9)))
    subprocess.run([binary, *RESUME], cwd=into, check=True, capture_output=True)
    return into


def sums(path):
    """Makes the digests of a checkpoint those of its files."""
    if not (path / "SHA256SUMS").is_file():
        return
    names = [line.split("  ", 1)[1] for line in (path / "SHA256SUMS").read_text().splitlines()]
    lines = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}\n" for name in names if (path / name).is_file()]
    put(path / "SHA256SUMS", "".join(lines))


def logged(path):
    """Rows of metrics without clocks and memory."""
    try:
        rows = [json.loads(line) for line in path.read_bytes().splitlines()] if path.is_file() else []
    except ValueError:
        return None
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/", "machine/", "step_time", "data/ahead_time"))} for row in rows]


def run_directories(rng, number, into):
    checkpoint(into, "qwen2_5_vl_tied")
    shutil.copy(WHOLE_RUN / "rows.jsonl", into)
    whole, run = WHOLE_RUN / "run", into / "run"
    shutil.copytree(whole, run)
    # The state of a run that was killed after step 4.
    shutil.rmtree(run / "checkpoint-6")
    for path in [*(whole / "checkpoint-6").iterdir(), run / "README.md"]:
        (run / path.name).unlink(missing_ok=True)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    forged = False
    for _ in range(rng.choice([1, 1, 1, 3])):
        path = rng.choice([p for p in files if "checkpoint-" in str(p)] if rng.random() < 0.7 else files)
        other = Path(str(path).replace("checkpoint-4", "checkpoint-x").replace("checkpoint-2", "checkpoint-4").replace("checkpoint-x", "checkpoint-2"))
        if not path.is_file():
            continue
        match rng.randrange(10):
            case 0:
                path.unlink()
            case 1:
                put(path, b"")
            case 2:
                put(path, path.read_bytes()[: rng.randrange(path.stat().st_size + 1)])
            case 3 if other != path and other.is_file():
                a, b = path.read_bytes(), other.read_bytes()
                put(path, b)
                put(other, a)
            case 4:
                put(path, other.read_bytes() if other.is_file() else b"\0" * 99)
            case 5:
                # Checkpoints may come from elsewhere; nobody puts pipes into logs.
                endless = [lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path)] * ("checkpoint-" in str(path))
                path.unlink()
                rng.choice([path.mkdir, lambda: path.symlink_to("nowhere"), *endless])()
            case 6 if (state := run / "checkpoint-4/trainer_state.json").is_file():
                try:
                    value = json.loads(state.read_text())
                except ValueError:
                    continue
                put(state, dump(change(value, rng.choice(list(places(value))), rng.choice([DROP, *VALUES]))))
                if forged := rng.random() < 0.7:
                    sums(run / "checkpoint-4")
            case 7 if (run / "checkpoint-4").is_dir():
                target = run / rng.choice(["checkpoint-7", "checkpoint-99999999999999999999", "checkpoint-", "checkpoint-04", "tmp-checkpoint-6"])
                if not target.exists():
                    (run / "checkpoint-4").rename(target)
            case 8:
                put(run / rng.choice(["tmp-old-checkpoint-2/x", "checkpoint-6/model.safetensors", "checkpoint-5/trainer_state.json", "tmp-x", "superseded-1/x"]), b"{}")
            case _:
                put(path, damaged(rng, path.read_bytes()))

    def judge(code, said, place):
        if code != 0:
            return control_characters(said)
        if not forged and (run / "model.safetensors").read_bytes() != (whole / "model.safetensors").read_bytes():
            return "went on to other weights without a word"
        if not forged and logged(run / "metrics.jsonl") != logged(whole / "metrics.jsonl") and "metrics.jsonl" not in said:
            return "went on with other metrics without a word"
        return control_characters(said)

    return RESUME, judge


# --- Reward servers and programs -----------------------------------------------------------------------------------------

ANSWERS = [
    b"", b"{}", b"[]", b"null", b'"x"', b"[" * 100_000, b'{"rewards":' * 50_000, b'{"rewards": []}', b'{"rewards": [1, 2, 3]}', b'{"rewards": ["1"]}', b'{"rewards": [NaN]}',
    b'{"rewards": [1e999]}', b'{"rewards": [true]}', b'{"rewards": 1}', b'{"rewards": [[1]]}', b'{"rewards": [1]', b'{"error": "\\u001b]0;x\\u0007"}', b"\xff\xfe{", b"\0" * 1000,
    b'{"error": "' + b"x" * 2_000_000 + b'"}', b'{"rewards": [1], "metrics": {"\\u001b[2J": "x"}}', b'{"rewards": [1], "metrics": []}',
    b'{"rewards": [1], "columns": {"a": [1, 2, 3]}}', b" " * 20_000_000, b'{"id": 77, "rewards": [1]}', b'{"rewards": [null, 1]}', b'{"rewards": [1]}{"rewards": [1]}',
]


def serve(rng, canary, good_first):
    """A server on this machine that answers badly, after one good answer or at once; its port, and a function that ends it."""
    listener = socket.create_server(("127.0.0.1", 0))
    body = rng.choice(ANSWERS)
    head = rng.choice([b"HTTP/1.1 200 OK"] * 8 + [b"HTTP/1.1 500 x", b"HTTP/1.1 404 \x1b[2J", b"HTTP/9.9 999", b"garbage", b"HTTP/1.1 204 x", b"HTTP/1.1 100 Continue"])
    length = rng.choice([len(body)] * 6 + [len(body) + 5, 0, -1, 2**64, "x"])
    whole = head + b"\r\nContent-Type: application/json\r\nContent-Length: " + str(length).encode() + b"\r\n\r\n" + body
    way = rng.choice(["answer"] * 6 + ["gzip", "chunks", "hang", "close", "drip", "endless body", "endless header", "redirect", "reset", "half"])
    stop = threading.Event()

    def answer(link, number):
        link.settimeout(20)
        with link:
            asked = b""
            while b"\r\n\r\n" not in asked and (part := link.recv(65536)):
                asked += part
            head, _, rest = asked.partition(b"\r\n\r\n")
            sizes = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            while sizes and len(rest) < sizes[0] and (part := link.recv(65536)):
                rest += part
            if good_first and number == 0:
                good = dump({"rewards": [0.5] * rest.count(b'"completion":')}).encode()
                link.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: " + str(len(good)).encode() + b"\r\n\r\n" + good)
                return
            ok = b"HTTP/1.1 200 OK\r\n"
            match way:
                case "answer":
                    link.sendall(whole)
                case "half":
                    link.sendall(whole[: len(whole) // 2])
                case "gzip":
                    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
                    data = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(200)) + bomb.flush()
                    link.sendall(ok + b"Content-Encoding: gzip\r\nContent-Length: " + str(len(data)).encode() + b"\r\n\r\n" + data)
                case "chunks":
                    link.sendall(ok + b"Transfer-Encoding: chunked\r\n\r\n" + rng.choice([b"FFFFFFFFFFFFFFFF\r\nx", b"-1\r\n", b"zz\r\n", b"5\r\n{}\r\n0\r\n\r\n"]))
                case "hang":
                    stop.wait(15)
                case "drip":
                    for byte in whole:
                        link.sendall(bytes([byte]))
                        if stop.wait(0.05):
                            return
                case "endless body" | "endless header":
                    link.sendall(ok + (b"\r\n" if way == "endless body" else b""))
                    while not stop.is_set():
                        link.sendall(b"x: " + b"y" * 65533 if way == "endless body" else b"x: " + b"y" * 1000 + b"\r\n")
                case "redirect":
                    link.sendall(f"HTTP/1.1 {rng.choice([301, 302, 307, 308])} x\r\nLocation: http://127.0.0.1:{canary}/\r\nContent-Length: 0\r\n\r\n".encode())
                case "reset":
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def quietly(link, number):
        with contextlib.suppress(OSError, ValueError):
            answer(link, number)

    def accept():
        number = 0
        with contextlib.suppress(OSError):
            while not stop.is_set():
                link, _ = listener.accept()
                threading.Thread(target=quietly, args=(link, number), daemon=True).start()
                number += 1

    threading.Thread(target=accept, daemon=True).start()

    def end():
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()

    return listener.getsockname()[1], end


PROGRAMS = [
    "sleep 99", "exit 0", "exit 1", "kill -9 $$", "cat", "cat >/dev/null", "yes", "yes >&2", "exec >&-; sleep 99", "exec <&-; sleep 99", "head -c 50000000 /dev/zero",
    "head -c 50000000 /dev/zero >&2; cat", "while read -r line; do cat answer; done", "while read -r line; do cat answer; echo; done",
    "trap '' TERM HUP INT; while :; do sleep 1; done", "sleep 99 & sleep 99 & read -r line; exit 0", "read -r line; cat answer; echo; exit 3", "printf '{\"id\": 0, '; sleep 99",
    "while read -r line; do printf '\\033]0;x\\007' >&2; exit 4; done",
]


def scorers(rng, number, into):
    canary, connected = listen()
    put(into / "rows.jsonl", dump(ROW | {"completions": ["<answer>5</answer>", "y"]}) + "\n" + dump(ROW | {"completions": ["z"]}) + "\n")
    end = lambda: None
    if number % 3:
        # A run asks once before it samples anything.
        port, end = serve(rng, canary, number % 8 == 0)
        reward = rng.choice(["", "", "judge:"]) + f"http://127.0.0.1:{port}/" + rng.choice(["", "v1"])
    else:
        put(into / "prog.sh", rng.choice(PROGRAMS) + "\n")
        put(into / "answer", rng.choice(ANSWERS)[:100_000])
        reward = "cmd:sh prog.sh"
    args = ["rewards", "run", "--input", "rows.jsonl", "--output", "out.jsonl", "--threads", "1"]
    if number % 4 == 0:
        checkpoint(into, "qwen2_5_vl_tied")
        args = TRAIN
    args = [*args, "--reward_funcs", reward, "--reward_timeout_secs", "0.4"]

    def judge(code, said, place):
        end()
        if connected():
            return "followed a redirect"
        if code == 0:
            lines = (place / "out.jsonl").read_text().splitlines() if "rewards" in args else []
            for row in map(json.loads, lines):
                if not all(isinstance(x, (int, float)) or x is None for column in row["rewards"].values() for x in column):
                    return "rewards that are no numbers"
        return control_characters(said)

    return args, judge


# Class -> its share of the default number of cases.
CLASSES = {
    pictures: 900, animations: 300, videos: 400, sounds: 600, rows: 700, configs: 6500, safetensors: 500, templates: 700, tokenizers: 600,
    adapters: 400, yaml: 400, flags: 800, completions: 600, playlists: 500, run_directories: 400, scorers: 200,
}


# --- Running a case ------------------------------------------------------------------------------------------------------


def tree_bytes(pid):
    """Resident memory of a process and its children."""
    total = 0
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            total += tree_bytes(child)
    except (OSError, IndexError):
        pass
    return total


def limits():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # the machine survives too
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))


def run(binary, seed, name, number, out):
    """Runs a case and says how it ended."""
    make = next(make for make in CLASSES if make.__name__ == name)
    place = Path(tempfile.mkdtemp(prefix=f"bad-{name}-{number}-"))
    try:
        made = make(random.Random(f"{seed} {name} {number}"), number, place)
        args, judge = made if isinstance(made, tuple) else (made, lambda *_: None)
        started, peak, why = time.monotonic(), 0, None
        with open(place / "stdout", "wb") as stdout, open(place / "stderr", "wb") as stderr:
            process = subprocess.Popen(
                [binary, *args], cwd=place, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True, preexec_fn=limits,
                env={"PATH": os.environ["PATH"], "HOME": str(place), "RUST_BACKTRACE": "0"},
            )
            while process.poll() is None:
                peak = max(peak, tree_bytes(process.pid))
                if time.monotonic() - started > MOST_SECS:
                    why = f"longer than {MOST_SECS} s"
                elif peak > MOST_BYTES:
                    why = "more than 2 GB"
                if why:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    break
                time.sleep(0.01)
        secs = time.monotonic() - started
        said = (place / "stderr").read_bytes()[-1_000_000:].decode("utf-8", "replace")
        code = process.returncode
        verdict = judge(code, said, place)
        why = why or verdict
        if why is None and (code < 0 or code >= 100):
            why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if why is None and "panicked at" in said and code != 0:
            why = "a panic"
        if why is None and code != 0 and (rust := NAMES_OF_RUST.search(said)):
            why = f"a name of Rust: {rust[0]}"
        if why is None and code != 0 and not said.strip() and not (place / "stdout").stat().st_size:
            why = "failed without a word"
        if why:
            kept = out / "failures" / f"{name}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
            with contextlib.suppress(shutil.Error):  # pipes
                shutil.copytree(place, kept, symlinks=True)
            (kept / "command.sh").write_text(f"cd {shlex.quote(str(kept))} && {shlex.join([str(binary), *args])}\n")
        return {"class": name, "number": number, "seed": seed, "code": code, "secs": round(secs, 2), "bytes": peak, "why": why, "said": said[-300:]}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def table(results):
    print(f"\n| {'class':<12} | cases | survived | used | refused | slowest | largest |")
    print("|---|---|---|---|---|---|---|")
    for name in [*(make.__name__ for make in CLASSES), "all"]:
        part = [r for r in results if name in (r["class"], "all")]
        if part:
            survived = [r for r in part if r["why"] is None]
            used = sum(r["code"] == 0 for r in survived)
            slowest, largest = max(r["secs"] for r in part), max(r["bytes"] for r in part)
            print(
                f"| {name:<12} | {len(part)} | {len(survived)} | {used} | {len(survived) - used} | {slowest:.1f} s | {largest / 1e6:.0f} MB |"
            )
    for r in sorted((r for r in results if r["why"]), key=lambda r: (r["class"], r["number"])):
        print(f"{r['class']} {r['number']}: {r['why']}: {' '.join(r['said'].split())[-200:]}")


def main():
    global ALL_CONFIGS, WHOLE_RUN
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--cases", type=int, default=sum(CLASSES.values()), help="of all classes together; each has its share")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--classes", default=",".join(make.__name__ for make in CLASSES))
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bad_files")
    args = parser.parse_args()
    binary = args.binary.resolve(strict=True)
    ALL_CONFIGS = all_configs()
    wanted = args.classes.split(",")
    if unknown := set(wanted) - {make.__name__ for make in CLASSES}:
        parser.error(f"no such class: {', '.join(sorted(unknown))}")
    scale = args.cases / sum(CLASSES.values())
    todo = [(make.__name__, n) for make, share in CLASSES.items() if make.__name__ in wanted for n in range(max(1, round(share * scale)))]
    args.out.mkdir(parents=True, exist_ok=True)
    if "run_directories" in wanted:
        WHOLE_RUN = whole_run(binary, args.out.resolve() / "whole")
    log = args.out / "results.jsonl"
    results = {}
    if log.exists():
        for line in log.read_text().splitlines():
            if (r := json.loads(line))["seed"] == args.seed:
                results[r["class"], r["number"]] = r
    todo_now = [case for case in todo if case not in results]
    print(f"{len(todo)} cases, {len(todo) - len(todo_now)} of them done before")
    with open(log, "a") as file, concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = [pool.submit(run, binary, args.seed, name, number, args.out) for name, number in todo_now]
        try:
            for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
                r = job.result()
                results[r["class"], r["number"]] = r
                file.write(json.dumps(r) + "\n")
                file.flush()
                if r["why"]:
                    print(f"{r['class']} {r['number']}: {r['why']}", flush=True)
                if done % 500 == 0:
                    print(f"{done} of {len(jobs)}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
    results = [results[case] for case in todo if case in results]
    table(results)
    sys.exit(any(r["why"] for r in results))


if __name__ == "__main__":
    main()
