"""Groups of three completions evaluated as separate sequences: what a packed stream has to reproduce."""

import torch
from fixtures import ID, IM_END, OUT, extend, family_of, gradients, load_model, position_ids, save_tensors
from make_cases import build_inputs, logits_of, model_inputs

# group -> (case that lends its prompt, completion lengths). Length 1 has no input row of its own.
GROUPS = {"g0": ("C", [1, 4, 6]), "g1": ("D2", [3, 5, 2]), "g2": ("B", [2, 1, 7])}
CLIP, BETA = 0.2, 0.04
TEMPERATURES = {"t1": 1.0, "t0.7": 0.7}


def token_stats(model, family, case, inputs, completion, temperature):
    """Log-prob and entropy of each completion token under softmax(logits / temperature)."""
    prompt = inputs["ids"]
    positions = position_ids(prompt, family, inputs["images"], inputs["videos"], inputs["seconds"])
    logits = logits_of(
        model, prompt + completion, extend(positions, len(completion)), model_inputs(inputs, case)
    )[len(prompt) - 1 : -1]
    logp_tv = (logits / temperature).log_softmax(-1)
    logp = logp_tv.gather(1, torch.tensor(completion)[:, None])[:, 0]
    return logp, -(logp_tv.exp() * logp_tv).sum(-1)


def grpo_loss(logp, old, ref, advantages):
    """Lists of per-completion tensors -> mean over completions of token means of the clipped term plus beta * k3."""
    terms = []
    for lp, o, r, a in zip(logp, old, ref, advantages):
        ratio = (lp - o).exp()
        policy = -torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
        k3 = (r - lp).exp() - (r - lp) - 1
        terms.append((policy + BETA * k3).mean())
    return torch.stack(terms).mean()


def run(name, cases):
    model, family = load_model(name), family_of(name)
    generator = torch.Generator().manual_seed(5)
    out, stats = {}, {}
    for group, (case, lengths) in GROUPS.items():
        completions = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
        completions[0][-1], completions[2][1] = IM_END, ID["<think>"]
        n = sum(lengths)
        # Ratios well inside and well outside the clip range, on both sides.
        old_noise = torch.tensor([0.05, -0.4, 0.4, -0.1])[torch.randint(0, 4, (n,), generator=generator)]
        ref_noise = 0.5 * torch.randn(n, generator=generator)
        advantages = torch.randn(3, generator=generator)
        out |= {
            f"{group}.completion_ids": torch.tensor(sum(completions, [])),
            f"{group}.lengths": torch.tensor(lengths),
            f"{group}.advantages": advantages,
        }
        for tag, temperature in TEMPERATURES.items():
            pairs = [token_stats(model, family, case, cases[case], c, temperature) for c in completions]
            logp = [lp for lp, _ in pairs]
            flat = torch.cat(logp).detach()
            old, ref = flat + old_noise, flat + ref_noise
            out |= {
                f"{group}.{tag}.logp": flat,
                f"{group}.{tag}.entropy": torch.cat([e for _, e in pairs]),
                f"{group}.{tag}.old": old,
                f"{group}.{tag}.ref": ref,
            }
            stats[group, tag] = (logp, old.split(lengths), ref.split(lengths), advantages.tolist())

    merged = tuple(sum((list(stats[g, "t1"][k]) for g in GROUPS), []) for k in range(4))
    losses = {
        "g0.t1": stats["g0", "t1"], "g0.t0.7": stats["g0", "t0.7"], "all.t1": merged,
    }
    for tag, arguments in losses.items():
        model.zero_grad(set_to_none=True)
        loss = grpo_loss(*arguments)
        loss.backward(retain_graph=True)
        out[f"loss.{tag}"] = loss.reshape(1)
        full = tag == "g0.t1" and name == "qwen2_5_vl_untied"
        out |= {f"{tag}.{k}": v for k, v in gradients(model, full).items()}
        print(name, tag, float(loss.detach()))
    save_tensors(OUT / f"packed/{name}.safetensors", out)


def main():
    cases = build_inputs()
    for name in ("qwen2_5_vl_untied", "qwen2_vl_tied"):
        run(name, cases)


if __name__ == "__main__":
    main()
