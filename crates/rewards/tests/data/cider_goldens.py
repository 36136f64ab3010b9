"""CIDEr-D by pycocoevalcap 1.2 over a small corpus. Usage: python cider_goldens.py > cider_goldens.json"""

import json

from pycocoevalcap.cider.cider_scorer import CiderScorer

ITEMS = [
    ["there is a shower head inside", "a shower head hangs on the wall", "you can see the shower"],
    ["she is smiling at the camera", "the woman smiles", "her face shows a smile"],
    ["the sky is dark and the lights are on", "it is dark outside"],
    ["a man is holding a red umbrella in the rain"],
    ["the dog runs on the beach", "a dog is running", "the dog is on the sand near the sea", "it runs"],
]
CANDIDATES = [
    "there is a shower head on the wall",
    "she is smiling",
    "it is dark and the lights are on and the lights are on",
    "umbrella",
    "the dog the dog the dog is running on the beach",
]

scorer = CiderScorer(n=4, sigma=6.0)
for candidate, references in zip(CANDIDATES, ITEMS, strict=True):
    scorer += (candidate, references)
_, scores = scorer.compute_score()
print(json.dumps({"items": ITEMS, "candidates": CANDIDATES, "scores": [float(s) for s in scores]}, indent=1))
