"""Loads a directory that omnigrpo saved with transformers and compares every tensor with the checkpoint it came from.

    python tools/goldens/check_saved.py SAVED ORIGINAL
    python tools/goldens/check_saved.py SAVED

Exit status 0 when transformers finds every tensor, has none left over, and all are bitwise equal. Without an ORIGINAL that
transformers can load (a conversion from another layout) the model is loaded and asked about a picture through its own processor.
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor


def load(directory: str):
    """Model in the stored dtype; missing, surplus or mis-shaped tensors are errors, not warnings."""
    model, info = AutoModelForImageTextToText.from_pretrained(
        directory, dtype="auto", attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    problems = {k: sorted(map(str, v)) for k, v in info.items() if v}
    if problems:
        sys.exit(f"{directory}: transformers reports {problems}")
    return model


def run(directory: str):
    """One forward pass on a picture and a question, as the directory's own files make the input."""
    model, processor = load(directory), AutoProcessor.from_pretrained(directory, local_files_only=True)
    content = [{"type": "image", "image": Image.new("RGB", (90, 60), (200, 30, 30))}, {"type": "text", "text": "Red?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        logits = model(**inputs).logits
    if not torch.isfinite(logits).all():
        sys.exit(f"{directory}: logits are not finite")
    print(f"{sum(1 for _ in model.parameters())} tensors; {tuple(logits.shape)} logits are finite")


def settings(config: dict) -> dict:
    """A config without what may change by saving."""
    skip = {"transformers_version", "_name_or_path", "dtype", "torch_dtype"}
    return {k: settings(v) if isinstance(v, dict) else v for k, v in config.items() if k not in skip}


def main(saved: str, original: str):
    for directory in (saved, original):
        if not (Path(directory) / "config.json").is_file():
            sys.exit(f"{directory}: no config.json")
    # remove_duplicate=False lists a tied head under both its names.
    got, expected = (dict(load(d).named_parameters(remove_duplicate=False)) for d in (saved, original))
    if got.keys() != expected.keys():
        sys.exit(f"different parameters: {sorted(got.keys() ^ expected.keys())}")
    wrong = [
        n for n, p in expected.items()
        if got[n].dtype != p.dtype or got[n].shape != p.shape or not torch.equal(got[n], p)
    ]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(expected)} tensors differ: {wrong[:10]}")
    a, b = (settings(AutoConfig.from_pretrained(d, local_files_only=True).to_dict()) for d in (saved, original))
    differ = [k for k in a.keys() | b.keys() if a.get(k) != b.get(k)]
    if differ:
        sys.exit(f"config fields differ: {sorted(differ)}")
    AutoProcessor.from_pretrained(saved, local_files_only=True)
    print(f"{len(expected)} tensors equal")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(*sys.argv[1:])
    elif len(sys.argv) == 2:
        run(sys.argv[1])
    else:
        sys.exit(__doc__)
