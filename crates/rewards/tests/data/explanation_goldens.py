"""Scores of explanations by pycocoevalcap 1.2 (BLEU, ROUGE-L, CIDEr) and the METEOR 1.5 program that it carries.

    pip install pycocoevalcap; apt-get install default-jre-headless
    python explanation_goldens.py > explanation_goldens.json

METEOR runs with its exact and stem matchers and without the distinction of function words (delta 0.5), which is what
the crate covers; everything else as pycocoevalcap calls it. Words are separated by single spaces.
"""

import json
import os
import random
import subprocess

from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.meteor import meteor as meteor_module
from pycocoevalcap.rouge.rouge import Rouge

JAR = os.path.join(os.path.dirname(meteor_module.__file__), meteor_module.METEOR_JAR)
COMMAND = ["java", "-jar", "-Xmx1G", JAR, "-", "-", "-stdio", "-l", "en", "-norm"]
COMMAND += ["-m", "exact stem", "-w", "1.0 0.6", "-p", "0.85 0.2 0.6 0.5"]


def meteor(items):
    program = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def ask(line):
        program.stdin.write(line + "\n")
        program.stdin.flush()

    stats = []
    for prediction, references in items:
        ask(" ||| ".join(["SCORE", *references, prediction]))
        stats.append(program.stdout.readline().strip())
    ask(" ||| ".join(["EVAL", *stats]))
    scores = [float(program.stdout.readline()) for _ in items]
    total = float(program.stdout.readline())
    program.stdin.close()
    program.wait()
    return scores, total


def corpus(items):
    references = {i: refs for i, (_, refs) in enumerate(items)}
    predictions = {i: [text] for i, (text, _) in enumerate(items)}
    bleu, _ = Bleu(4).compute_score(references, predictions, verbose=0)
    rouge, rouge_each = Rouge().compute_score(references, predictions)
    cider, cider_each = Cider().compute_score(references, predictions)
    meteor_each, meteor_all = meteor(items)
    return {
        "items": [{"prediction": p, "references": r} for p, r in items],
        "bleu": list(bleu), "rouge_l": float(rouge), "rouge_each": [float(x) for x in rouge_each],
        "cider": float(cider), "cider_each": [float(x) for x in cider_each],
        "meteor": meteor_all, "meteor_each": meteor_each,
    }


VIETNAMESE = [
    ("người đàn ông đang cầm một chiếc ô màu đỏ", ["người đàn ông cầm ô đỏ", "anh ấy đang cầm một chiếc ô", "chiếc ô màu đỏ"]),
    ("bầu trời nhiều mây và mặt đường ướt", ["đường ướt vì trời mưa", "trời nhiều mây"]),
    ("có hai con mèo trên ghế", ["hai con mèo đang nằm trên ghế", "có hai con mèo trên ghế"]),
    ("xe buýt", ["đó là một chiếc xe buýt màu vàng trên đường phố"]),
    ("không liên quan gì", ["cô bé đang cười"]),
    ("cô bé đang cười với cô bé", ["cô bé đang cười", "với cô bé đang cười"]),
]


def random_items(seed, num_items, vocabulary, longest):
    draw = random.Random(seed)
    text = lambda: " ".join(draw.choice(vocabulary) for _ in range(draw.randint(1, longest)))
    return [(text(), [text() for _ in range(draw.randint(1, 3))]) for _ in range(num_items)]


if __name__ == "__main__":
    words = "cat cats run running runs the a dog dogs happy happily on mat mats sit sitting sits near generously generous".split()
    print(json.dumps({
        "vietnamese": corpus(VIETNAMESE),
        "stems": corpus(random_items(1, 60, words, 10)),
        "repeats": corpus(random_items(2, 40, words[:6], 14)),
    }, ensure_ascii=False, indent=None, separators=(",", ":")))
