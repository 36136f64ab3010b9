"""Checks the loss of make_replay.py against TRL's own: value, every gradient, and the parameters without weight decay.

One prompt (the image row) with a reference that differs from the policy; TRL 1.16, `loss_type="grpo"`,
`use_bias_correction_kl=False`. Not part of make_all.py, since it needs trl and datasets.
"""

import tempfile

import torch
from datasets import Dataset
from fixtures import CHECKPOINTS, EOT, IMG, family_of, load_model, published
from make_checkpoints import build_tokenizer
from make_replay import HYPER, all_logps, grpo_terms, prepare
from transformers import AutoProcessor, Trainer
from trl import GRPOConfig, GRPOTrainer

NAME = "qwen2_5_vl_tied"


def reference_logps(item):
    """The policy's weights with noise, or the KL term and its gradient would vanish."""
    model, generator = load_model(NAME), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator))
        return all_logps(model, [item])


def trl_loss(trainer, item, ref):
    group, longest = len(item["completions"]), max(map(len, item["completions"]))
    ids = torch.full((group, longest), EOT)
    mask, padded_ref = torch.zeros_like(ids), torch.zeros(group, longest)
    for row, completion in enumerate(item["completions"]):
        ids[row, : len(completion)] = torch.tensor(completion)
        mask[row, : len(completion)] = 1
        padded_ref[row, : len(completion)] = ref[row]
    prompt = torch.tensor([item["prompt"]] * group)
    inputs = dict(
        prompt_ids=prompt, prompt_mask=torch.ones_like(prompt), completion_ids=ids, completion_mask=mask,
        advantages=torch.tensor(item["advantages"]), ref_per_token_logps=padded_ref, num_items_in_batch=mask.sum(),
        pixel_values=item["kwargs"]["pixel_values"].repeat(group, 1),
        image_grid_thw=item["kwargs"]["image_grid_thw"].repeat(group, 1), num_images=[1] * group,
        mm_token_type_ids=torch.where(torch.cat([prompt, ids], 1) == IMG, 1, 0).int(),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer._compute_loss(trainer.model, inputs)


def main():
    tokenizer = build_tokenizer()
    item = prepare(lambda s: tokenizer.encode(s, add_special_tokens=False).ids, family_of(NAME))[0]
    ref = reference_logps(item)
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch, loss_type=HYPER["loss_type"], beta=HYPER["beta"], epsilon=HYPER["epsilon"],
            num_generations=HYPER["num_generations"], temperature=HYPER["temperature"],
            use_bias_correction_kl=HYPER["use_bias_correction_kl"], per_device_train_batch_size=3,
            gradient_accumulation_steps=1, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=load_model(NAME), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
            train_dataset=Dataset.from_list([{"prompt": "-"}] * 3),
            processing_class=AutoProcessor.from_pretrained(CHECKPOINTS / NAME),
        )
        theirs = trl_loss(trainer, item, ref)
        theirs.backward()

    model = load_model(NAME)
    policy, kl = grpo_terms(all_logps(model, [item]), ref, item["advantages"])
    ours = policy + HYPER["beta"] * kl
    ours.backward()
    assert abs(float((ours - theirs).detach())) < 1e-6, (ours, theirs)
    got = dict(trainer.model.named_parameters())
    worst = max(
        (float((got[n].grad - p.grad).norm() / p.grad.norm()), n) for n, p in model.named_parameters()
    )
    assert worst[0] < 1e-4, worst
    decayed = [{published(n) for n in names} for names in (
        trainer.get_decay_parameter_names(trainer.model), Trainer.get_decay_parameter_names(None, model),
    )]
    assert decayed[0] == decayed[1]
    print(f"loss {float(ours.detach()):.6f}, largest relative gradient difference {worst[0]:.1e}")


if __name__ == "__main__":
    main()
