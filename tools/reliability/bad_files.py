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
import copy
import json
import os
import random
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "crates/models/tests/golden"
CHECKPOINTS = GOLDEN / "checkpoints"
MEDIA = ROOT / "crates/media/tests/data"
MOST_SECS, MOST_BYTES = 60, 2 << 30
DEFAULT_CASES = 12_000
ROW = {"problem": "What is 2+3?", "solution": "<answer>5</answer>"}
GENERATE = ["generate", "--model", "m", "--prompt", "Hi", "--max_completion_length", "1", "--threads", "1"]
TRAIN = (
    "train --model m --train_file rows.jsonl --output_dir run --max_steps 1 --num_generations 2 --threads 1 "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 1 --max_completion_length 2"
).split()

# Values that take a setting's place: wrong types, edges of integer types, sizes that nothing has, text that is no text.
VALUES = [
    None, True, -1, 0, 1, 2, 3, 7, 1.5, 1e300, 2**16, 2**31, 2**32, 2**53, 2**62, 2**64, "", "x", "\0", "../..", [], [1], [2**31] * 3,
    {}, {"a": 1},
]


# --- Making a case: a function (rng, number, directory) -> arguments -----------------------------------------------------


def checkpoint(into, name):
    """A directory `m` of links to a checkpoint's files; what a case changes is replaced."""
    for path in (CHECKPOINTS / name).rglob("*"):
        if path.is_file():
            link = into / "m" / path.relative_to(CHECKPOINTS / name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return into / "m"


def put(path, content):
    """Writes a file in place of a link."""
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
    import zlib

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
        texts = [(b"zTXt", b"a\0\0" + __import__("zlib").compress(bytes(64 << 20)))] if rng.random() < 0.3 else []
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
            # Those from `ns` on are used up at once or fail.
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


# Class -> its share of the default number of cases.
CLASSES = {
    pictures: 900, animations: 300, videos: 400, sounds: 600, rows: 700, configs: 6500, safetensors: 500, templates: 700, tokenizers: 600,
    adapters: 400, yaml: 400,
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
        args = make(random.Random(f"{seed} {name} {number}"), number, place)
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
        said = (place / "stderr").read_bytes()[-4000:].decode("utf-8", "replace")
        code = process.returncode
        if why is None and (code < 0 or code >= 100):
            why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if why is None and "panicked at" in said and code != 0:
            why = "a panic"
        if why is None and code != 0 and not said.strip() and not (place / "stdout").stat().st_size:
            why = "failed without a word"
        if why:
            kept = out / "failures" / f"{name}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
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
    global ALL_CONFIGS
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--cases", type=int, default=DEFAULT_CASES, help="of all classes together; each has its share")
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
    scale = args.cases / DEFAULT_CASES
    todo = [(make.__name__, n) for make, share in CLASSES.items() if make.__name__ in wanted for n in range(max(1, round(share * scale)))]
    args.out.mkdir(parents=True, exist_ok=True)
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
