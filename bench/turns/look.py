"""The tool of the measurement, for both sides."""

import itertools
import random

from PIL import Image

CALLS = itertools.count()


def look(box: int) -> list:
    """Looks into a box.

    Args:
        box: Number of the box, from 1.
    """
    # Every call shows another picture, so no side can keep it.
    coarse = Image.frombytes("RGB", (28, 28), random.Random(next(CALLS)).randbytes(28 * 28 * 3))
    return [{"type": "image", "image": coarse.resize((448, 448), Image.Resampling.BICUBIC)}, {"type": "text", "text": "the box"}]
