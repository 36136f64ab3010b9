"""Compares the reward `bertscore` on a real BERT checkpoint with a direct computation by transformers, on 50 pairs of sentences.

usage: bertscore.py OMNIGRPO BERT_DIR      (such as the folder of all-MiniLM-L6-v2; needs torch and transformers)

The score is F1 over the last layer, without weights of words. The start and end tokens may be matched and do not count.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

LIMIT = 1e-5
FIRST = [
    "A man is playing a guitar on stage.", "The quick brown fox jumps over the lazy dog.", "She did not like the film at all.",
    "Two dogs run through the wet grass.", "The capital of France is Paris.", "He bought three tickets for 27.50 euros.",
    "Das Wetter in München ist heute schön.", "今天天气很好，我们去公园。", "naïve café résumé – “quoted” text…", "Water boils at 100 °C at sea level.",
    "The bank of the river was flooded after the storm.", "The emoji 😀 means happiness 🎉.", "def f(x): return x ** 2 + 1",
    "There are seven apples and four oranges in the basket.", "No.", "An astronaut rides a horse on the moon.",
    "The car is red because the paint reflects long wavelengths.", "The meeting was postponed until next Thursday.", "I think, therefore I am.",
    "Please turn off the lights before you leave.", "A well-known, state-of-the-art method.", "He is taller than his brother.", "The cat sat on the mat.",
    "The patient has a fever of 39.2 degrees.", "Rewards are normalised within a group.",
]
SECOND = [
    "A person plays guitar in front of an audience.", "A fast brown fox leaps over a dog that is lazy.", "She loved the film.",
    "Dogs are running on a wet lawn.", "Paris is the capital city of France.", "Three tickets cost him 27.5 €.", "Heute ist es in München sonnig.",
    "今天下雨了。", "naive cafe resume - \"quoted\" text...", "At sea level, water boils at one hundred degrees Celsius.", "He works at a bank.",
    "A smiley stands for joy.", "lambda x: x*x+1", "The basket holds 7 apples and 4 oranges.", "Yes.", "A horse rides an astronaut.",
    "The colour of the car is red.", "They moved the meeting to Thursday.", "Cogito ergo sum.", "Switch the lights off when you go.",
    "A modern method that many people know.", "His brother is taller than him.", "The mat was under the cat.", "39.2 °C, says the patient.",
    "GRPO standardises rewards per group.",
]


def main():
    program, bert = sys.argv[1:3]
    pairs = list(zip(FIRST, SECOND)) + list(zip(FIRST, SECOND[1:] + SECOND[:1]))
    tokenizer, model = AutoTokenizer.from_pretrained(bert), AutoModel.from_pretrained(bert, dtype=torch.float32).eval()

    def embedded(text):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden, dim=-1)

    with tempfile.TemporaryDirectory() as folder:
        rows, out = Path(folder) / "rows.jsonl", Path(folder) / "scored.jsonl"
        rows.write_text("".join(
            json.dumps(dict(id=str(i), prompt="Say it.", solution=f"<explain>{b}</explain>", completions=[f"<explain>{a}</explain>"])) + "\n"
            for i, (a, b) in enumerate(pairs)
        ))
        subprocess.run([program, "rewards", "run", "--input", rows, "--output", out, "--reward_funcs", "bertscore", "--bertscore_model", bert], check=True)
        scored = [json.loads(line)["rewards"]["bertscore"][0] for line in out.read_text().splitlines()]
    differences = []
    for (a, b), got in zip(pairs, scored):
        similar = embedded(a) @ embedded(b).T
        precision, recall = similar.max(1).values[1:-1].mean(), similar.max(0).values[1:-1].mean()
        # The reward is F1 within 0 and 1.
        f1 = float(2 * precision * recall / (precision + recall))
        differences.append(abs(min(max(f1, 0), 1) - got))
    worst = max(differences)
    print(f"{len(pairs)} pairs: largest difference {worst:.2g}, mean {sum(differences) / len(pairs):.2g} (at most {LIMIT:g})")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
