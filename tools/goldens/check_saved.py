"""Loads a directory that omnigrpo saved with transformers and compares every tensor with the checkpoint it came from.

    python tools/goldens/check_saved.py SAVED ORIGINAL

Exit status 0 when transformers finds every tensor, has none left over, and all are bitwise equal.
"""

import sys
from pathlib import Path

import torch
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
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
