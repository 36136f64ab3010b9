#!/usr/bin/env python3
"""Runs lmms-eval, VLMEvalKit and lm-evaluation-harness on a served model: `python3 check.py PROGRAM`.

It serves the model of the demo and compares what the suites print with `omnigrpo eval` and `omnigrpo score` on the same rows: every
answer to the byte, and the scores. Needs the packages `lmms-eval`, `ms-vlmeval`, `lm-eval` with what they import, and no network.
"""

import argparse
import contextlib
import csv
import glob
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from PIL import Image
from transformers import AutoTokenizer

import rows

HERE = pathlib.Path(__file__).resolve().parent
MOST_TOKENS = 16
KEY = "0123456789abcdef"


class Suites:
    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        self.environment = {
            **os.environ, "OMNIGRPO_API_KEY": KEY, "OPENAI_API_KEY": KEY, "XDG_CACHE_HOME": str(folder), "HF_HOME": str(folder / "hf"),
            "HF_HUB_OFFLINE": "1", "LMUData": str(folder / "LMUData"),
        }

    def run(self, *command, **more):
        print("$", *(str(word) for word in command), flush=True)
        environment = {**self.environment, **more}
        done = subprocess.run([*command], cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout[-6000:]}\nstatus {done.returncode}")
        return done.stdout

    def omnigrpo(self, *command):
        return self.run(self.program, *command)

    @contextlib.contextmanager
    def served(self):
        """Serves the model and gives its address."""
        command = [self.program, "serve", "demo", "--port", "0"]
        server = subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()
            server.wait()

    def evaluated(self, name):
        """Answers of `omnigrpo eval` by the id of the row, and its accuracy."""
        self.omnigrpo("eval", "--model_name_or_path", "demo", "--eval_file", f"{name}.jsonl", "--output", f"{name}.eval.jsonl",
                      "--max_completion_length", str(MOST_TOKENS))
        answers = {row["id"]: row["completions"][0] for row in lines(self.folder / f"{name}.eval.jsonl")}
        return answers, json.loads((self.folder / f"{name}.eval.summary.json").read_text())["eval_accuracy"]


def lines(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def only(answers):
    """The answer in nested lists that have one entry."""
    while isinstance(answers, list):
        (answers,) = answers
    return answers


def newest(pattern):
    found = glob.glob(str(pattern), recursive=True)
    assert found, f"no file is called {pattern}"
    return max(found, key=os.path.getmtime)


def compare(suite, answers, score, own_answers, own_score):
    differ = [name for name in own_answers if answers[name] != own_answers[name]]
    print(f"{suite}: {len(answers)} rows, score {score:.4f}; omnigrpo: {own_score:.4f}; {len(differ)} answers differ", flush=True)
    assert answers.keys() == own_answers.keys() and not differ, differ[:5]
    assert abs(score - own_score) < 1e-9, (suite, score, own_score)
    # Neither chance nor certainty could tell an error.
    assert 0.1 < score < 0.9, score


def lmms_eval(suites, url):
    suites.run(
        sys.executable, "-m", "lmms_eval", "--model", "openai", "--model_args", f"model=demo,base_url={url},num_concurrent=8,max_retries=1",
        "--tasks", "shapes", "--include_path", HERE / "lmms_eval", "--batch_size", "1", "--log_samples", "--output_path", "lmms")
    score = json.loads(pathlib.Path(newest(suites.folder / "lmms/**/*_results.json")).read_text())["results"]["shapes"]["accuracy,none"]
    own = lines(suites.folder / "shapes.jsonl")
    samples = lines(newest(suites.folder / "lmms/**/*_samples_shapes.jsonl"))
    # The suite filters thoughts out before it scores.
    answers = {own[sample["doc_id"]]["id"]: only(sample["resps"]) for sample in samples}
    compare("lmms-eval", answers, score, *suites.evaluated("shapes"))


def vlmevalkit(suites, url):
    # Pictures keep their size, and the answer follows the thoughts.
    suites.run(
        sys.executable, "-m", "vlmeval.run", "--data", "Shapes", "--model", "demo", "--base-url", url, "--key", KEY, "--max-tokens", str(MOST_TOKENS),
        "--temperature", "0", "--judge", "exact_matching", "--work-dir", "vlm",
        SPLIT_THINK="True", VLMEVAL_MIN_IMAGE_EDGE="1", PRED_FORMAT="tsv", EVAL_FORMAT="csv")
    table = lambda path, delimiter: list(csv.DictReader(open(path, newline=""), delimiter=delimiter))
    predictions = table(newest(suites.folder / "vlm/**/demo_Shapes.tsv"), "\t")
    thought = lambda row: f"<think>{row['thinking']}</think>" if row["thinking"] else ""
    answers = {row["index"]: thought(row) + row["prediction"] for row in predictions}
    score = float(table(newest(suites.folder / "vlm/**/demo_Shapes*_acc.csv"), ",")[0]["Overall"])
    # omnigrpo gets the same rows, with the text of the question and the pictures as JPEG that VLMEvalKit sends.
    csv.field_size_limit(1 << 24)
    pictures = suites.folder / "jpeg"
    pictures.mkdir(exist_ok=True)
    with open(suites.folder / "vlm.jsonl", "w") as file:
        for row in table(suites.folder / "LMUData" / "Shapes.tsv", "\t"):
            picture = pictures / f"{row['index']}.jpg"
            with Image.open(suites.folder / "LMUData" / "images" / "Shapes" / f"{row['index']}.png") as png:
                png.convert("RGB").save(picture, "JPEG")
            choices = "".join(f"{letter}. {row[letter]}\n" for letter in "ABCD")
            question = f"Question: {row['question']}\nOptions:\n{choices}Please select the correct answer from the options above. \n"
            parts = [{"type": "image", "image": str(picture)}, {"type": "text", "text": question}]
            solution = row[row["answer"]]
            file.write(json.dumps({"id": row["index"], "messages": [{"role": "user", "content": parts}], "solution": solution}) + "\n")
    own_answers, own_score = suites.evaluated("vlm")
    # VLMEvalKit drops thoughts that are empty.
    own_answers = {name: answer.removeprefix("<think></think>") for name, answer in own_answers.items()}
    compare("VLMEvalKit", answers, score, own_answers, own_score)


def lm_eval(suites, url):
    suites.run(
        sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args",
        f"model=demo,base_url={url}/completions,tokenizer=demo,tokenizer_backend=huggingface,num_concurrent=4",
        "--tasks", "shapes_text", "--include_path", HERE / "lm_eval", "--log_samples", "--output_path", "lm")
    score = json.loads(pathlib.Path(newest(suites.folder / "lm/**/results_*.json")).read_text())["results"]["shapes_text"]["acc,none"]
    samples = {sample["doc_id"]: sample for sample in lines(newest(suites.folder / "lm/**/samples_shapes_text_*.jsonl"))}
    # The program scores the same tokens.
    encode = AutoTokenizer.from_pretrained(suites.folder / "demo").encode
    own = lines(suites.folder / "choices.jsonl")
    with open(suites.folder / "scored.jsonl", "w") as file:
        for row in own:
            start = encode(row["question"])
            rest = [{"completion_ids": encode(f"{row['question']} {choice}")[len(start):]} for choice in row["choices"]]
            file.write(json.dumps({"prompt": row["question"], "completions": rest}) + "\n")
    suites.omnigrpo("score", "--model_name_or_path", "demo", "--input", "scored.jsonl", "--output", "scores.jsonl", "--continue_text_prompts")
    right, furthest = 0, 0.0
    for at, (row, scored) in enumerate(zip(own, lines(suites.folder / "scores.jsonl"))):
        sums = [sum(completion["logprobs"]) for completion in scored["completions"]]
        theirs = [float(logprob) for logprob, _ in samples[at]["filtered_resps"]]
        furthest = max(furthest, *(abs(a - b) for a, b in zip(sums, theirs)))
        right += sums.index(max(sums)) == row["label"]
    print(f"lm-eval: {len(own)} rows, accuracy {score:.4f}; omnigrpo: {right / len(own):.4f}; log-probabilities differ by {furthest:.1e} nats at most")
    assert furthest < 1e-4 and abs(score - right / len(own)) < 1e-9


SUITES = {suite.__name__: suite for suite in (lmms_eval, vlmevalkit, lm_eval)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path, nargs="?", help="folder that keeps the files; a temporary one by default")
    parser.add_argument("--suites", default=",".join(SUITES), help="names, separated by commas; the default is all")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = (given.folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        suites = Suites(given.program.resolve(), folder)
        suites.omnigrpo("demo", "--max_steps", "1", "--output_dir", "demo")
        rows.write(folder / "demo", folder)
        with suites.served() as url:
            for name in given.suites.split(","):
                SUITES[name](suites, url)


if __name__ == "__main__":
    main()
