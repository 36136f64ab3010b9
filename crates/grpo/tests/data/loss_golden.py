"""Writes loss_golden.json: values and gradients of every loss in torch float64, by autograd.

The formulas are those of TRL 1.16 `GRPOTrainer._compute_loss` on padded [completion, token] arrays, with autograd
doing the derivative; the crate has the derivative in closed form on flat arrays. Run: python loss_golden.py
(torch 2.11, CPU).
"""
import json
import pathlib

import torch

torch.manual_seed(20)
F64 = torch.float64
LENGTHS = [5, 3, 0, 7, 1, 4]
TRUNCATED = [False, False, False, True, False, False]
ADVANTAGES = [0.9, -1.3, 0.4, 0.7, 0.0, -0.6]
MAX_LENGTH = 8
B, T = len(LENGTHS), max(LENGTHS)
MASK = torch.zeros(B, T, dtype=F64)
for row, length in enumerate(LENGTHS):
    MASK[row, :length] = 1.0

LOGP = -torch.rand(B, T, dtype=F64) * 3
OLD = LOGP + torch.randn(B, T, dtype=F64) * 0.4  # ratios on both sides of the clip range
REF = LOGP + torch.randn(B, T, dtype=F64) * 0.6
ENTROPY = torch.rand(B, T, dtype=F64) * 2
SAMPLER = OLD + torch.randn(B, T, dtype=F64) * 0.3


def policy(kind, c, a, lp, s):
    if kind == "clip":
        free = c if s.get("delta") is None else torch.clamp(c, max=s["delta"])
        return -torch.min(free * a, torch.clamp(c, 1 - s["low"], 1 + s["high"]) * a)
    if kind == "ratio":
        return -c * a
    if kind == "cispo":
        return -torch.clamp(c, max=s["cap"]).detach() * a * lp
    if kind == "sapo":
        # Numbers in `where` would become float32.
        tau = torch.where(a > 0, torch.tensor(s["pos"], dtype=F64), torch.tensor(s["neg"], dtype=F64))
        return -torch.sigmoid(tau * (c - 1)) * 4 / tau * a
    if kind == "log_prob":
        return -a * lp
    raise ValueError(kind)


def loss(case, lp, entropy):
    mask = MASK.clone()
    if case["mask_truncated"]:
        mask = mask * (~torch.tensor(TRUNCATED)).to(F64).unsqueeze(1)
    a = torch.tensor(ADVANTAGES, dtype=F64).unsqueeze(1)
    old = OLD if case["off_policy"] else lp.detach()
    d = lp - old
    if case["ratio"] == "sequence":
        d = ((d * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    c = torch.exp(d)
    ell = policy(case["surrogate"], c, a, lp, case["settings"]).expand(B, T)

    bonus_mask = mask
    if case["top_entropy"] < 1.0:
        threshold = torch.quantile(ENTROPY[mask.bool()], 1 - case["top_entropy"])
        bonus_mask = mask * (ENTROPY >= threshold)
        ell = ell * bonus_mask

    if case["correction"] != "off":
        d = (old.detach() - SAMPLER) * mask
        if case["correction"].startswith("sequence"):
            d = d.sum(-1, keepdim=True)
        v, low, high = torch.exp(d), case["correction_min"] or 0.0, case["correction_max"]
        if case["correction"].endswith("truncate"):
            v = torch.clamp(v, min=low, max=high)
        else:
            v = v * ((v >= low) & (v <= high))
        ell = ell * v

    x = REF - lp
    k3 = torch.exp(x) - x - 1
    kl = {"off": 0 * x, "k3": k3, "k3_corrected": k3 * c, "k1": -x}[case["kl"]]
    per_token = ell + case["beta"] * kl

    def aggregate(y):
        kind = case["aggregation"]
        if kind == "sequence_mean":
            return ((y * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        if kind in ("token_mean_local", "token_mean_global"):
            return (y * mask).sum() / mask.sum().clamp(min=1.0)
        if kind == "constant_length":
            return (y * mask).sum() / (B * MAX_LENGTH)
        if kind == "token_sum":
            return (y * mask).sum() / B
        raise ValueError(kind)

    bonus = (entropy * bonus_mask).sum() / bonus_mask.sum().clamp(min=1.0)
    return aggregate(per_token) - case["entropy_coef"] * bonus, aggregate(kl).item()


def clip_ratios(case):
    """Returns mean and minimum below the clip range, mean and maximum above it, as TRL's metrics; None without a clip."""
    if case["surrogate"] not in ("clip", "cispo"):
        return None
    mask = MASK.clone()
    if case["mask_truncated"]:
        mask = mask * (~torch.tensor(TRUNCATED)).to(F64).unsqueeze(1)
    a = torch.tensor(ADVANTAGES, dtype=F64).unsqueeze(1)
    d = LOGP - (OLD if case["off_policy"] else LOGP)
    if case["ratio"] == "sequence":
        d = ((d * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    c, s = torch.exp(d), case["settings"]
    if case["surrogate"] == "clip":
        low, high = (c < 1 - s["low"]) & (a < 0), (c > 1 + s["high"]) & (a > 0)
    else:
        low, high = torch.zeros_like(c, dtype=torch.bool), (c > s["cap"]) & (a > 0)

    def mean(x):
        return x.to(F64).mean() if x.shape[1] == 1 else (x * mask).sum() / mask.sum().clamp(min=1.0)

    def each(x):
        own = x.squeeze(1).to(F64) if x.shape[1] == 1 else (x * mask).sum(-1) / mask.sum(-1)
        return own[~own.isnan()]

    return [v.item() for v in (mean(low), each(low).min(), mean(high), each(high).max())]


def gate(entropies, top):
    """Returns the tokens that TRL's `get_high_entropy_mask` keeps."""
    entropies = torch.tensor(entropies)
    return (entropies >= torch.quantile(entropies, 1 - top)).tolist()


def flat(x):
    return [v for row, length in enumerate(LENGTHS) for v in x[row, :length].tolist()]


CLIP = {"low": 0.2, "high": 0.28, "delta": None}
ALGORITHMS = [
    ("grpo", "clip", CLIP, "token", "sequence_mean"),
    ("grpo_delta", "clip", {"low": 0.2, "high": 0.2, "delta": 1.5}, "token", "sequence_mean"),
    ("bnpo", "clip", CLIP, "token", "token_mean_local"),
    ("dr_grpo", "clip", CLIP, "token", "constant_length"),
    ("dapo", "clip", CLIP, "token", "token_mean_global"),
    ("cispo", "cispo", {"cap": 1.4}, "token", "token_mean_global"),
    ("gspo", "clip", {"low": 0.15, "high": 0.1, "delta": None}, "sequence", "sequence_mean"),
    ("sapo", "sapo", {"pos": 1.0, "neg": 1.05}, "token", "sequence_mean"),
    ("sapo_sequence", "sapo", {"pos": 1.0, "neg": 1.05}, "sequence", "token_mean_global"),
    ("ratio", "ratio", {}, "token", "sequence_mean"),
    ("log_prob", "log_prob", {}, "token", "token_sum"),
]
cases = []
for name, surrogate, settings, ratio, aggregation in ALGORITHMS:
    for kl, beta in [("off", 0.0), ("k3", 0.04), ("k3_corrected", 0.3), ("k1", 0.1)]:
        for off_policy in (False, True):
            for mask_truncated, top_entropy, entropy_coef in [(False, 1.0, 0.0), (True, 0.5, 0.01)][: 1 + off_policy]:
                cases.append(dict(name=name, surrogate=surrogate, settings=settings, ratio=ratio, aggregation=aggregation,
                                  kl=kl, beta=beta, off_policy=off_policy, mask_truncated=mask_truncated,
                                  top_entropy=top_entropy, entropy_coef=entropy_coef, correction="off",
                                  correction_max=3.0, correction_min=None))
for name, surrogate, settings, ratio, aggregation in [ALGORITHMS[i] for i in (0, 4, 5, 6, 10)]:
    for correction in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        for low, high in [(None, 1.25), (0.8, 1.3)]:
            for off_policy in (False, True):
                cases.append(dict(name=name, surrogate=surrogate, settings=settings, ratio=ratio, aggregation=aggregation,
                                  kl="k3", beta=0.04, off_policy=off_policy, mask_truncated=off_policy, top_entropy=1.0,
                                  entropy_coef=0.0, correction=correction, correction_max=high, correction_min=low))
for case in cases:
    lp = LOGP.clone().requires_grad_()
    entropy = ENTROPY.clone().requires_grad_()
    value, kl = loss(case, lp, entropy)
    value.backward()
    case["loss"], case["kl_value"] = value.item(), kl
    case["dlogp"] = flat(lp.grad)
    case["dentropy"] = flat(entropy.grad) if case["entropy_coef"] else []
    case["clip_ratios"] = clip_ratios(case)

# Entropies with few values, so that the quantile falls into ties.
gates = []
for tokens, values in [(1, 1), (2, 1), (5, 2), (16, 3), (17, 3), (40, 4), (41, 30)]:
    entropies = (torch.randint(values, (tokens,)) * 0.3125).tolist()
    for top in (0.05, 0.2, 0.25, 0.5, 0.75, 0.9):
        gates.append(dict(entropies=entropies, top=top, kept=gate(entropies, top)))

out = dict(lengths=LENGTHS, truncated=TRUNCATED, advantages=ADVANTAGES, max_completion_length=MAX_LENGTH,
           logp=flat(LOGP), old=flat(OLD), reference=flat(REF), entropy=flat(ENTROPY), sampler=flat(SAMPLER),
           gates=gates, cases=cases)
path = pathlib.Path(__file__).with_name("loss_golden.json")
head = {k: v for k, v in out.items() if k != "cases"}
body = ",\n".join(json.dumps(c) for c in cases)
path.write_text(json.dumps(head)[:-1] + ',\n"cases": [\n' + body + "\n]}\n")
print(len(cases), "cases,", path.stat().st_size, "bytes")
