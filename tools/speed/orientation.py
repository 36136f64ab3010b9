#!/usr/bin/env python3
"""Measures what the orientation tag of a photo of 12 megapixels costs a check of rows, which reads headers and decodes no pixels.

    python3 tools/speed/orientation.py BIN                   # fails if a tag costs 1 ms or more

Checks rows with as many photos with a tag as without one, in turns, and divides the difference of processor time by their number. The
best of several runs counts, since other work on the machine only slows down. Needs Pillow.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile

from PIL import Image
from rows import timed

PHOTOS = 500
RUNS = 7
LIMIT_MS = 1.0


def write(folder, turned):
    """Writes rows with a photo each, as a phone stores it: with tags of the camera and a thumbnail in front of the pixels."""
    noise = Image.effect_noise((4000, 3000), 40).convert("RGB")
    tags = Image.Exif()
    tags[0x010F], tags[0x0110] = "Maker", "Model"
    if turned:
        tags[0x0112] = 6
    first = folder / "0.jpg"
    noise.save(first, quality=85, exif=tags, comment=b"\0" * 60_000)
    for number in range(1, PHOTOS):
        os.link(first, folder / f"{number}.jpg")
    rows = [{"image": f"{number}.jpg", "problem": "What is it?", "solution": "noise"} for number in range(PHOTOS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return first.stat().st_size


def check(binary, folder, cache):
    """Returns the processor time of a check without stored headers, in seconds, and its report."""
    command = [binary, "data", "check", "--train_file", folder / "rows.jsonl", "--threads", "1"]
    return timed(command, {"HOME": str(cache), "XDG_CACHE_HOME": str(cache)})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    binary = parser.parse_args().binary
    times = {True: [], False: []}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        folders = {True: scratch / "turned", False: scratch / "plain"}
        for turned, folder in folders.items():
            folder.mkdir()
            size = write(folder, turned)
        for run in range(RUNS):
            for turned, folder in folders.items():
                cache = scratch / f"cache-{turned}-{run}"
                cache.mkdir()
                time, report = check(binary, folder, cache)
                if turned != (f"{PHOTOS} of {PHOTOS} images are stored sideways" in report):
                    sys.exit(f"unexpected report:\n{report}")
                times[turned].append(time)
    best = {turned: 1000 * min(of) / PHOTOS for turned, of in times.items()}
    print(f"a JPEG of 4000x3000 pixels, {size / 1e6:.1f} MB: {best[False]:.3f} ms without a tag, {best[True]:.3f} ms with one")
    print(f"the tag costs {best[True] - best[False]:.3f} ms, the whole check of the header {best[True]:.3f} ms")
    return int(best[True] - best[False] >= LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
