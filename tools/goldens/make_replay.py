"""Three AdamW steps of GRPO over three prompts with given completions and rewards, as TRL computes them."""

import copy
import json

import torch
from fixtures import (
    FRAMES, OUT, extend, family_of, load_model, parameters, position_ids, process_frames, process_images,
    published, save_tensors, sketch, write_json,
)
from make_cases import expand, logits_of, render, text, user
from make_checkpoints import build_tokenizer
from transformers import Trainer

REPLAY = OUT / "replay"
STEPS = 3
HYPER = dict(
    learning_rate=1e-3, lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8,
    weight_decay=0.1, max_grad_norm=1.0, beta=0.04, epsilon=0.2, loss_type="grpo", scale_rewards="group",
    use_bias_correction_kl=False, temperature=1.0, num_generations=3, prompts_per_step=3,
)
VIDEO_LIMITS = dict(fps=2.0, min_pixels=3136, max_pixels=12544)

# question with its placeholder, media column, completions, rewards
ROWS = [
    dict(
        id="image", question="<image>\nWhich shape is red?", media={"image": "media/shapes.png"}, solution="square",
        completions=["<think>A red box.</think><answer>square</answer><|im_end|>", "the circle<|im_end|>", "red"],
        rewards=[1.0, 0.0, 0.25],
    ),
    dict(
        id="text", question="What is 2 + 3?", media={}, solution="5",
        completions=["5<|im_end|>", "<answer>6</answer><|im_end|>", "It is five, naïvely.<|im_end|>"],
        rewards=[1.0, 0.5, 0.0],
    ),
    dict(
        id="video", question="<video>Which way does the ball move?", media={"video": "media/clip.gif"}, solution="right",
        completions=["left<|im_end|>", "right<|im_end|>", "<answer>to the right</answer><|im_end|>"],
        rewards=[0.0, 1.0, 1.0],
    ),
]


def write_rows(encode):
    """rows.jsonl: completion text and the GIF; rows_ids.jsonl: completion ids and the same clip as a frame directory."""
    for ids in (False, True):
        lines = []
        for row in ROWS:
            line = dict(id=row["id"], **row["media"])
            if "video" in line:
                line |= VIDEO_LIMITS
                if ids:
                    line["video"] = "media/frames"
            line["conversations"] = [
                {"from": "human", "value": row["question"]}, {"from": "gpt", "value": row["solution"]},
            ]
            if ids:
                line["completion_ids"] = [encode(c) for c in row["completions"]]
            else:
                line["completions"] = row["completions"]
            line["rewards"] = row["rewards"]
            lines.append(json.dumps(line, ensure_ascii=False))
        path = REPLAY / ("rows_ids.jsonl" if ids else "rows.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")


def prepare(encode, family):
    """Rows -> prompt ids, model inputs, positions, completions, advantages."""
    prepared = []
    for row in ROWS:
        question, kwargs, images, videos, seconds = row["question"], {}, [], [], []
        content = [text(question)]
        if "image" in row["media"]:
            pixels, images = process_images(["shapes.png"])
            kwargs = dict(pixel_values=pixels, image_grid_thw=images)
            content = [{"type": "image"}, text(question.removeprefix("<image>"))]
        elif "video" in row["media"]:
            pixels, videos = process_frames(FRAMES)
            kwargs = dict(pixel_values_videos=pixels, video_grid_thw=videos)
            seconds = [1.0]
            content = [{"type": "video"}, text(question.removeprefix("<video>"))]
        prompt = expand(encode(render(user(*content))), images, videos)
        rewards = torch.tensor(row["rewards"], dtype=torch.float64)
        prepared.append(dict(
            row=row["id"], prompt=prompt, kwargs=kwargs, positions=position_ids(prompt, family, images, videos, seconds),
            completions=[encode(c) for c in row["completions"]],
            advantages=((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist(),
        ))
    return prepared


def all_logps(model, prepared):
    """Log-probs of every completion, prompt-major."""
    out = []
    for item in prepared:
        for completion in item["completions"]:
            logits = logits_of(
                model, item["prompt"] + completion, extend(item["positions"], len(completion)), item["kwargs"]
            )[len(item["prompt"]) - 1 : -1]
            out.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    return out


def grpo_terms(logps, ref, advantages):
    """Policy and KL term of on-policy GRPO: means over completions of token means."""
    policy, kl = [], []
    for lp, r, a in zip(logps, ref, advantages):
        ratio = (lp - lp.detach()).exp()
        clipped = ratio.clamp(1 - HYPER["epsilon"], 1 + HYPER["epsilon"])
        policy.append(-torch.minimum(ratio * a, clipped * a).mean())
        kl.append(((r - lp).exp() - (r - lp) - 1).mean())
    return torch.stack(policy).mean(), torch.stack(kl).mean()


def train(model, prepared):
    """Runs the steps in place; returns per-step records and the reference log-probs."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    names = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            dict(params=[p for n, p in names.items() if n in decayed], weight_decay=HYPER["weight_decay"]),
            dict(params=[p for n, p in names.items() if n not in decayed], weight_decay=0.0),
        ],
        lr=HYPER["learning_rate"], betas=(HYPER["adam_beta1"], HYPER["adam_beta2"]), eps=HYPER["adam_epsilon"],
    )
    with torch.no_grad():
        ref = all_logps(model, prepared)
    advantages = [a for item in prepared for a in item["advantages"]]
    records = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        logps = all_logps(model, prepared)
        policy, kl = grpo_terms(logps, ref, advantages)
        loss = policy + HYPER["beta"] * kl
        loss.backward()
        assert all(p.grad is not None for p in names.values())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), HYPER["max_grad_norm"])
        optimizer.step()
        records.append(dict(
            loss=loss.detach(), policy_loss=policy.detach(), kl=kl.detach(), grad_norm=norm,
            logp=torch.cat(logps).detach(),
        ))
    return records, torch.cat(ref), sorted(published(n) for n in names if n not in decayed)


def scalars(record):
    return {k: float(record[k]) for k in ("loss", "policy_loss", "kl", "grad_norm")}


def run(name, encode):
    model = load_model(name)
    prepared = prepare(encode, family_of(name))
    start = copy.deepcopy(model)
    records, ref, no_decay = train(model, prepared)
    exact = copy.deepcopy(start).double()
    exact_prepared = [
        item | dict(kwargs={k: v.double() if v.is_floating_point() else v for k, v in item["kwargs"].items()})
        for item in prepared
    ]
    exact_records, _, _ = train(exact, exact_prepared)

    out = {f"step{k}.logp": r["logp"] for k, r in enumerate(records)} | {"ref_logp": ref}
    before, precise = parameters(start), parameters(exact)
    deviation = {}
    for n, p in parameters(model).items():
        delta = p - before[n]
        out[f"delta_sketch.{n}"] = sketch(delta)
        if name == "qwen2_5_vl_tied":
            out[f"param.{n}"] = p
        deviation[n] = float(((p - precise[n]).norm() / delta.norm()).detach())
    worst = max(deviation, key=deviation.get)
    save_tensors(REPLAY / f"{name}.safetensors", out)
    write_json(REPLAY / f"{name}.json", dict(
        hyper=HYPER,
        rows=[
            dict(id=i["row"], prompt_ids=i["prompt"], completion_ids=i["completions"], advantages=i["advantages"])
            for i in prepared
        ],
        steps=[scalars(r) for r in records],
        no_decay=no_decay,
        float64_steps=[scalars(r) for r in exact_records],
        # How far these float32 steps are from the same in float64, ||difference|| / ||update|| per parameter.
        float64_deviation=dict(
            worst=worst, worst_value=deviation[worst], median=sorted(deviation.values())[len(deviation) // 2]
        ),
    ))
    for r in records:
        print(name, scalars(r))
    print(worst, deviation[worst])


def main():
    tokenizer = build_tokenizer()
    encode = lambda s: tokenizer.encode(s, add_special_tokens=False).ids
    write_rows(encode)
    for name in ("qwen2_5_vl_tied", "qwen2_vl_untied"):
        run(name, encode)


if __name__ == "__main__":
    main()
