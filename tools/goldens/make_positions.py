"""positions.json: position ids of many prompts, by the max + 1 rule, and whether transformers 5.23 agrees."""

import json

import torch
from fixtures import FAMILIES, IMG, OUT, VE, VID, VS, load_model, position_ids, tf5_position_ids

# parts: n = a run of n text tokens, (t, h, w) = an image, (t, h, w, seconds) = a video
PROMPTS = {
    "text": [7],
    "image": [3, (1, 6, 4), 4],
    "image_first": [(1, 4, 4), 2],
    "two_images_adjacent_markers": [1, (1, 4, 8), 0, (1, 2, 2), 3],
    "tall_and_wide": [2, (1, 20, 2), 1, (1, 2, 18), 5],
    "short_video": [4, (2, 8, 8, 0.5), 3],
    "one_slice_video": [2, (1, 4, 4, 1.0), 2],
    "long_video": [3, (9, 4, 6, 1.0), 6],
    "video_quarter_second": [2, (8, 4, 4, 0.25), 3],
    "video_third_second": [2, (10, 2, 4, 1 / 3), 3],
    "video_float32_rounding": [1, (44, 2, 2, 2 / 41), 2],  # float64 gives another T for slice 41
    "video_slow": [1, (5, 6, 6, 2.5), 2],
    "video_30_fps": [1, (31, 2, 2, 2 / 30), 2],
    "mixed": [3, (1, 6, 6), 2, (3, 4, 8, 0.5), 1, (1, 4, 4), 2, (4, 4, 4, 1.0), 5],
}


def build(parts):
    ids, images, videos, seconds = [], [], [], []
    for part in parts:
        if isinstance(part, int):
            ids += list(range(40, 40 + part))
            continue
        t, h, w = part[:3]
        ids += [VS] + [IMG if len(part) == 3 else VID] * (t * h * w // 4) + [VE]
        if len(part) == 3:
            images.append([t, h, w])
        else:
            videos.append([t, h, w])
            seconds.append(part[3])
    return ids, images, videos, seconds


def main():
    records = []
    for family in FAMILIES:
        model = load_model(f"{family}_tied")
        for name, parts in PROMPTS.items():
            ids, images, videos, seconds = build(parts)
            positions = position_ids(ids, family, images, videos, seconds)
            tf5 = tf5_position_ids(
                model, ids, torch.tensor(images) if images else None, torch.tensor(videos) if videos else None,
                seconds or None,
            )
            if not videos:
                assert torch.equal(positions, tf5), (family, name)
            # The rules differ only in where the text after a video goes on: inside media they agree relatively.
            first = next((i for i, t in enumerate(ids) if t == VID), len(ids))
            end = first
            while end < len(ids) and ids[end] == VID:
                end += 1
            assert torch.equal(positions[:, :end], tf5[:, :end]), (family, name)
            records.append(dict(
                family=family, name=name, ids=ids, image_grids=images, video_grids=videos, second_per_grid=seconds,
                tokens_per_second=2, position_ids=positions.tolist(), same_in_transformers=torch.equal(positions, tf5),
            ))
    lines = ",\n".join(json.dumps(r, separators=(",", ":")) for r in records)
    (OUT / "positions.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
