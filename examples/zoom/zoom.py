"""A model learns by reward alone to look closer: a digit of 12 px in a picture of 448 px can be read only in a part of it.

    python3 examples/zoom/zoom.py target/release/omnigrpo runs/zoom --seed 1

Needs no Python packages. The folder gets pictures, rows, runs, `results.json` and `curves.svg`; README.md describes them.
"""

import argparse
import json
import random
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

MODEL = Path(__file__).resolve().parents[2] / "crates/demo/assets/model"
SIDE_PX = 448
# The model sees the whole picture at a quarter of its size, and a part at twice its size.
SHOWN_PX = (56, 112)
PART_PX = 28
SQUARE_PX = 28
SIGN_PX = 24
DIGIT_PX = (9, 12)
# Number of columns and rows of places where the sign may stand.
PLACES = 4
QUESTION = "Which digit is on the sign?"
LOOK = "Look closer: which digit is on the sign?"
READ = "Which digit is it?"
NAME = "image_zoom_in_tool"
CALL = ['<tool_call>{"name": "' + NAME + '", "arguments": {"bbox_2d": [', "]}}</tool_call>"]
TOOLS = [{"type": "function", "function": {"name": NAME, "description": "Zooms in.", "parameters": {"type": "object", "properties": {}}}}]
# Texts that become tokens: the demo's tokenizer would write a call in a hundred of them.
TOKENS = [*CALL, ", ", NAME]
# Share of the answers that call the tool before GRPO.
CALLS = 0.12
READING_STEPS, LESSON_STEPS, GRPO_STEPS = 400, 800, 100
EVAL_ROWS = 200

FONT = """
01110 00100 01110 11111 00010 11111 00110 11111 01110 01110
10001 01100 10001 00010 00110 10000 01000 00001 10001 10001
10011 00100 00001 00100 01010 11110 10000 00010 10001 10001
10101 00100 00010 00010 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100
""".split()


def png(rows):
    """Returns a PNG file of a square picture, given its rows of RGB pixels."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    side = len(rows)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 1)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def draw(rng, centre, digit):
    """Draws a wall of squares with a sign that shows a digit. Red grows to the right and blue downwards, as if lamps stood there."""
    picture = []
    for y in range(0, SIDE_PX, SQUARE_PX):
        line = bytearray()
        for x in range(0, SIDE_PX, SQUARE_PX):
            red, blue = (20 + 120 * at // SIDE_PX + rng.randrange(12) for at in (x, y))
            line += bytes([red, rng.randrange(20, 60), blue]) * SQUARE_PX
        picture += [bytes(line)] * SQUARE_PX
    sign = [rng.randrange(160, 256) for _ in range(3)]
    ink = bytes(int(level * rng.uniform(0.0, 0.4)) for level in sign)
    left, top = (c - SIGN_PX // 2 for c in centre)
    for y in range(top, top + SIGN_PX):
        picture[y] = bytearray(picture[y])
        picture[y][3 * left:3 * (left + SIGN_PX)] = bytes(sign) * SIGN_PX
    width, height = DIGIT_PX
    left, top = centre[0] - width // 2, centre[1] - height // 2
    for y in range(height):
        bits = FONT[y * 7 // height * 10 + digit]
        for x in range(width):
            if bits[x * 5 // width] == "1":
                picture[top + y][3 * (left + x):3 * (left + x + 1)] = ink
    return picture


def scene(rng, folder, name, kinds=("picture", "part")):
    """Draws a picture and cuts out the part that the tool should return. Returns the files of `kinds`, the digit and the box."""
    digit = rng.randrange(10)
    step = SIDE_PX // PLACES
    left, top = (rng.randrange(PLACES) * step + (step - PART_PX) // 2 for _ in range(2))
    picture = draw(rng, [corner + PART_PX // 2 + rng.randrange(-1, 2) for corner in (left, top)], digit)
    part = [row[3 * left:3 * (left + PART_PX)] for row in picture[top:top + PART_PX]]
    files = {kind: f"images/{name}-{kind}.png" for kind in kinds}
    for kind, file in files.items():
        (folder / file).write_bytes(png({"picture": picture, "part": part}[kind]))
    return {**files, "digit": digit, "box": [left, top, left + PART_PX, top + PART_PX]}


def image(path):
    return {"type": "image", "image": path}


def asked(picture, text):
    return {"role": "user", "content": [image(picture), {"type": "text", "text": text}]}


def said(text):
    return {"role": "assistant", "content": text}


def reading(of):
    """Returns a lesson in reading a part."""
    return {"messages": [asked(of["part"], READ), said(f"<answer>{of['digit']}</answer>")]}


def lesson(rng, of):
    """Returns a conversation for supervised training. Asked to look closer, the model calls the tool and reads the part. Asked the
    question itself, it calls in few conversations and otherwise guesses: whether to call is left to the reward."""
    kind = rng.choices(["look", "question", "question without tool"], [60, 30, 10])[0]
    turns, digit = [asked(of["picture"], LOOK if kind == "look" else QUESTION)], of["digit"]
    if kind == "look" or (kind == "question" and rng.random() < CALLS):
        turns.append(said(CALL[0] + ", ".join(map(str, of["box"])) + CALL[1]))
        turns.append({"role": "tool", "content": [image(of["part"])]})
    else:
        digit = rng.randrange(10)
    turns.append(said(f"<answer>{digit}</answer>"))
    return {"messages": turns, **({} if kind == "question without tool" else {"tools": TOOLS})}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(folder, seed):
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)

    def scenes(name, size, *kinds):
        return [scene(rng, folder, f"{name}-{i}", *kinds) for i in range(size)]

    write_rows(folder / "reading.jsonl", map(reading, scenes("reading", 16 * READING_STEPS, ["part"])))
    # Each picture is in three different conversations.
    shown = scenes("lesson", 16 * LESSON_STEPS // 3)
    write_rows(folder / "lessons.jsonl", [lesson(rng, of) for _ in range(3) for of in shown])
    for split, size in [("train", 8 * GRPO_STEPS), ("eval", EVAL_ROWS)]:
        shown = scenes(split, size)
        rows = [{"image": of["picture"], "problem": QUESTION, "solution": f"<answer>{of['digit']}</answer>", "exchanged": other["part"]}
                for of, other in zip(shown, shown[1:] + shown[:1])]
        write_rows(folder / f"{split}.jsonl", rows)


def write_model(folder, seed):
    """Writes the demo's checkpoint with more tokens, a role for tools, and pictures of one size."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    config = json.loads((MODEL / "config.json").read_text())
    pixels = json.loads((MODEL / "preprocessor_config.json").read_text())
    plain = dict(lstrip=False, rstrip=False, normalized=False, single_word=False, special=False)
    first = config["vocab_size"]
    for token, text in enumerate(TOKENS, first):
        tokenizer["added_tokens"].append({"id": token, "content": text, **plain})
        settings["added_tokens_decoder"][str(token)] = {"content": text, **plain}
    template = (MODEL / "chat_template.jinja").read_text()
    template = ("{%- if tools -%}\n<|im_start|>system\n{% for tool in tools -%}\n{{ tool['function']['name'] }}\n{%- endfor -%}\n"
                "<|im_end|>\n{% endif -%}\n") + template
    settings["chat_template"] = template
    config["vocab_size"] = first + len(TOKENS)
    pixels["min_pixels"], pixels["max_pixels"] = (side * side for side in SHOWN_PX)
    for name, content in [("tokenizer.json", tokenizer), ("tokenizer_config.json", settings), ("config.json", config),
                          ("preprocessor_config.json", pixels)]:
        (folder / name).write_text(json.dumps(content, indent=1))
    (folder / "generation_config.json").write_bytes((MODEL / "generation_config.json").read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    file = (MODEL / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", file[:8])[0]
    header, body = json.loads(file[8:8 + length]), file[8 + length:]
    embedding = next(name for name in header if name.endswith("embed_tokens.weight"))
    rng = random.Random(seed)
    tensors, data = {}, b""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        numbers, shape = body[begin:end], entry["shape"]
        if name == embedding:
            assert entry["dtype"] == "F32"
            numbers += b"".join(struct.pack("<f", rng.gauss(0.0, 0.1)) for _ in range(len(TOKENS) * shape[1]))
            shape = [shape[0] + len(TOKENS), shape[1]]
        tensors[name] = {"dtype": entry["dtype"], "shape": shape, "data_offsets": [len(data), len(data) + len(numbers)]}
        data += numbers
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def exchange():
    """Answers calls as an environment whose parts show other pictures: a model that reads the part falls to chance."""
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"id": request["id"]}
        if request.get("probe"):
            answer["tools"] = TOOLS
        else:
            folder = Path(request["media"][0]).parents[1]
            answer["answer"] = [image(str(folder / request["columns"]["exchanged"]))]
        print(json.dumps(answer), flush=True)


class Runner:
    def __init__(self, program, folder, seed):
        self.program, self.folder, self.seed = program, folder, seed

    def omnigrpo(self, verb, **settings):
        settings = {"torch_dtype": "float32", "device": "cpu", "seed": self.seed, **settings}
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        with open(self.folder / "log.txt", "a") as log:
            done = subprocess.run([self.program, verb, *words], stdout=log, stderr=subprocess.STDOUT)
        if done.returncode:
            sys.exit(f"`{verb}` failed: see {self.folder}/log.txt")

    def train(self, verb, start, rows, name, steps, **settings):
        run = self.folder / name
        self.omnigrpo(verb, model_name_or_path=start, train_file=self.folder / rows, output_dir=run, tune_mm_vision="true", save_strategy="no",
                      max_steps=steps, gradient_accumulation_steps=1, eval_strategy="no", skip_data_check="true",
                      logging_steps=20, num_train_epochs=1000, resume_from_checkpoint="never", **settings)
        return run

    def evaluate(self, model, name, **settings):
        """Returns the share of correct answers and the calls per answer."""
        output = self.folder / f"{name}.jsonl"
        self.omnigrpo("eval", model_name_or_path=model, eval_file=self.folder / "eval.jsonl", output=output, max_completion_length=96,
                      **settings)
        numbers = json.loads(output.with_suffix(".summary.json").read_text())
        numbers = numbers.get("metrics", numbers)
        return numbers["eval_accuracy"], numbers.get("eval_tools/call_frequency")


def svg(curves):
    """Returns a chart of metrics by step: `curves` are (label, colour, numbers)."""
    width, height, left, bottom = 640, 280, 44, 32
    steps = max(len(numbers) for _, _, numbers in curves)
    def at(step, value):
        return f"{left + (width - left - 12) * step / max(steps - 1, 1):.1f},{12 + (height - bottom - 12) * (1 - value):.1f}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for tick in range(0, 11, 2):
        (x, y), end = at(0, tick / 10).split(","), at(steps - 1, 0).split(",")[0]
        parts.append(f'<path d="M{x},{y}H{end}" stroke="#ddd"/><text x="8" y="{float(y) + 4:.1f}">{tick * 10} %</text>')
    for step in range(0, steps, 20):
        parts.append(f'<text x="{at(step, 0).split(",")[0]}" y="{height - 12}">{step or "step 0"}</text>')
    for place, (label, colour, numbers) in enumerate(curves):
        points = " ".join(at(step, min(max(value, 0), 1)) for step, value in enumerate(numbers))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{width - 250}" y="{height / 2 + 16 * place:.0f}" fill="{colour}">{label}</text>')
    return "\n".join(parts + ["</svg>", ""])


def metric(run, name):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]


def learn(program, folder, seed):
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, seed)
    write_model(folder / "model", seed)
    own = Runner(program, folder, seed)
    lessons = dict(per_device_train_batch_size=16, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=20, adam_beta2=0.95)
    reader = own.train("sft", folder / "model", "reading.jsonl", "reader", READING_STEPS, **lessons)
    start = own.train("sft", reader, "lessons.jsonl", "start", LESSON_STEPS, **lessons)
    results = {"seed": seed}
    sampled = {"temperature": 1, "num_generations": 4}
    zoom = {"environment": "zoom", "max_turns": 2}
    results["start"], results["calls of the start"] = own.evaluate(start, "eval-start", **zoom, **sampled)
    grpo = dict(steps=GRPO_STEPS, per_device_train_batch_size=8, num_generations=8, learning_rate=2e-4, lr_scheduler_type="constant_with_warmup",
                warmup_steps=5, reward_funcs="accuracy", beta=0, max_completion_length=96)
    trained = own.train("train", start, "train.jsonl", "zoom", **grpo, **zoom)
    results["trained"], results["calls of the trained"] = own.evaluate(trained, "eval-zoom", **zoom)
    exchanged = f"cmd:{sys.executable} {Path(__file__).resolve()} exchange"
    results["exchanged parts"], _ = own.evaluate(trained, "eval-exchanged", environment=exchanged, max_turns=2)
    results["processor seconds"] = round(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]))
    blind = own.train("train", start, "train.jsonl", "blind", **grpo)
    results["trained without the tool"], _ = own.evaluate(blind, "eval-blind")
    accuracy, calls = metric(trained, "rewards/accuracy/mean"), metric(trained, "tools/call_frequency")
    without = metric(blind, "rewards/accuracy/mean")
    (folder / "curves.svg").write_text(svg([("calls per answer", "#b5651d", calls), ("correct answers", "#1f6f43", accuracy),
                                            ("correct answers without the tool", "#777", without)]))
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


def wrong(results):
    """Returns the limits that the results miss."""
    limits = [("start", 0.0, 0.4), ("calls of the start", 0.01, 0.3), ("trained", 0.9, 1.0), ("calls of the trained", 0.9, 1.2),
              ("exchanged parts", 0.0, 0.2), ("trained without the tool", 0.0, 0.2)]
    return [f"{name}: {results[name]:.3f}, expected from {low} to {high}" for name, low, high in limits if not low <= results[name] <= high]


def main():
    if sys.argv[1:] == ["exchange"]:
        return exchange()
    parser = argparse.ArgumentParser(description="Trains a small model to use the tool `zoom`.")
    parser.add_argument("program", help="the program `omnigrpo`")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    results = learn(arguments.program, arguments.folder.resolve(), arguments.seed)
    for name, value in results.items():
        print(f"{name:26} {value}")
    if problems := wrong(results):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
