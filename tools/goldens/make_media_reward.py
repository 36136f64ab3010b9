"""Scores of reward models that see: tiny checkpoints of a family with a scalar head on the last token of a conversation,
composed in PyTorch from the base model's last hidden state and a linear layer. Written to
crates/scorers/tests/golden/media_reward; run by make_scorers.py.
"""

import json
import shutil

import make_qwen3_vl as qwen3
import torch
from fixtures import CHECKPOINTS, FRAMES, load_model, position_ids, process_images, save_tensors
from jinja2 import Environment
from make_cases import expand
from make_checkpoints import CHAT_TEMPLATE, build_tokenizer
from make_scorers import GOLDEN

OUT = GOLDEN / "media_reward"
ROWS = [
    (["shapes.png"], "Which shape is red?", ["square", "the answer is a circle", "the answer is a square"]),
    (["alpha.png", "shapes.png"], "How many shapes are there?", ["two", "I see 5 shapes"]),
    ([], "What is 2+3?", ["<answer>5</answer>"]),
]
# Qwen3-VL's rows have clips, too: lists of frames that follow each other at this rate.
FPS = 3.0
CLIPS = [
    ([FRAMES[:5]], "Which way does the ball move?", ["right", "<answer>to the left</answer>"]),
    (["shapes.png", FRAMES[:4]], "Which is red?", ["the first", "none"]),
]


def conversation(media, question, completion, template=CHAT_TEMPLATE):
    content = [{"type": "video" if isinstance(medium, list) else "image"} for medium in media]
    content.append({"type": "text", "text": question})
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": completion}]}]
    env = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    return env.from_string(template).render(messages=messages, add_generation_prompt=False)


def scores(name, weight, bias):
    model, tokenizer, out = load_model(name), build_tokenizer(), []
    for pictures, question, completions in ROWS:
        numbers = []
        for completion in completions:
            ids = tokenizer.encode(conversation(pictures, question, completion), add_special_tokens=False).ids
            kwargs, grids = {}, []
            if pictures:
                pixels, grid = process_images(pictures)
                grids, kwargs = grid.tolist(), dict(pixel_values=pixels, image_grid_thw=grid)
            ids = expand(ids, grids, [])
            positions = position_ids(ids, "qwen2_5_vl", grids)
            with torch.no_grad():
                hidden = model.model(
                    input_ids=torch.tensor([ids]), position_ids=positions.unsqueeze(1),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long), use_cache=False, **kwargs,
                ).last_hidden_state
            numbers.append(float(hidden[0, -1] @ weight[0] + bias))
        out.append(numbers)
    print(name, out)
    assert max(map(max, out)) - min(map(min, out)) > 0.2
    return out


def scores_of_qwen3_vl(weight, bias):
    model, out = qwen3.new_model("qwen3_vl"), []
    for media, question, completions in ROWS + CLIPS:
        numbers, inputs = [], qwen3.inputs_of(media)
        for completion in completions:
            whole, rest = "", conversation(media, question, completion, qwen3.TEMPLATE)
            for medium in media:
                before, rest = rest.split("<|video_pad|>" if isinstance(medium, list) else "<|image_pad|>", 1)
                whole += before + qwen3.spelled(medium, FPS)
            ids = qwen3.encode(whole + rest)
            with torch.no_grad():
                hidden = model.model(
                    input_ids=torch.tensor([ids]), position_ids=qwen3.positions_of(model, ids, inputs).unsqueeze(1),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long), use_cache=False,
                    mm_token_type_ids=qwen3.kinds_of(torch.tensor([ids])), **inputs,
                ).last_hidden_state
            numbers.append(float(hidden[0, -1] @ weight[0] + bias))
        out.append(numbers)
    print("qwen3_vl", out)
    assert max(map(max, out)) - min(map(min, out)) > 0.2
    return out


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    width = json.loads((CHECKPOINTS / "qwen2_5_vl_tied/config.json").read_text())
    width = width.get("hidden_size") or width["text_config"]["hidden_size"]
    generator = torch.Generator().manual_seed(97)
    score, value = (torch.randn(1, width, generator=generator) / width**0.5 for _ in range(2))
    bias = torch.tensor([0.3])
    save_tensors(OUT / "score.safetensors", {"score.weight": score}, format="pt")
    save_tensors(OUT / "value_head.safetensors", {"v_head.summary.weight": value, "v_head.summary.bias": bias}, format="pt")
    width = qwen3.hub_config("qwen3_vl")["text_config"]["hidden_size"]
    wide = torch.randn(1, width, generator=generator) / width**0.5
    (OUT / "qwen3_vl").mkdir()
    save_tensors(OUT / "qwen3_vl/value_head.safetensors", {"v_head.summary.weight": wide, "v_head.summary.bias": bias}, format="pt")
    named = lambda rows: [dict(media=media, question=question, completions=completions) for media, question, completions in rows]
    golden = dict(
        rows=named(ROWS), clips=named(CLIPS), fps=FPS,
        score=scores("qwen2_5_vl_untied", score, 0.0),
        value_head=scores("qwen2_5_vl_tied", value, 0.3),
        qwen3_vl=scores_of_qwen3_vl(wide, 0.3),
    )
    (OUT / "goldens.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
