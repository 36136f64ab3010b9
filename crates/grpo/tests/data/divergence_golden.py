"""Writes divergence_golden.json: divergences of a policy from a teacher, and their gradients by the policy's logits, from TRL 1.16.

The logits come from a generator that the test repeats, so the file has results only. Over the whole vocabulary, the number is that of
DistillationTrainer, and of GKDTrainer. Over the teacher's most probable tokens, it is that of the divergence and of the bucket for
all other tokens that ServerDistillationTrainer has. Everything is in float64.

Run: python divergence_golden.py  (torch 2.11, trl 1.16)
"""
import json
import pathlib

import torch
from trl.experimental.gkd import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from peers_golden import uniforms

CASES, TOKENS, VOCAB = 20, 4, 12
BETAS, TOPS = [0.0, 0.25, 0.5, 0.9, 1.0], [1, 3, 8, VOCAB]


def logits(seed):
    u = uniforms(seed)
    rows = lambda: torch.tensor([[6 * (next(u) - 0.5) for _ in range(VOCAB)] for _ in range(TOKENS)], dtype=torch.float64)
    return rows(), rows()


def whole(policy, teacher, beta):
    head = torch.eye(VOCAB, dtype=torch.float64)
    mask = torch.ones(1, TOKENS)
    # DistillationTrainer computes in float32.
    single, _, _ = _chunked_divergence_loss(policy[None], teacher[None], head, head, mask, beta)
    loss = GKDTrainer.generalized_jsd_loss(policy[None], teacher[None], beta=beta, reduction="sum") / TOKENS
    torch.testing.assert_close(single.double(), loss, rtol=1e-5, atol=1e-6)
    return loss


def of_top(policy, teacher, beta, k):
    ids = teacher.topk(k, dim=-1).indices
    both = [rows.log_softmax(-1).gather(-1, ids) for rows in (policy, teacher)]
    valid = torch.ones(TOKENS, k, dtype=torch.bool)
    (policy, support), (teacher, _) = (_add_tail_bucket(rows, valid) for rows in both)
    return _jsd_divergence(policy, teacher, beta, support).sum() / TOKENS


golden = []
for seed in range(CASES):
    for beta in BETAS:
        for k in TOPS:
            policy, teacher = logits(seed)
            policy.requires_grad_()
            loss = whole(policy, teacher, beta) if k == VOCAB else of_top(policy, teacher, beta, k)
            loss.backward()
            numbers = [loss.item()] + policy.grad.flatten().tolist()
            golden.append([float(f"{x:.10g}") for x in numbers])
text = ",\n".join(json.dumps(case) for case in golden)
(pathlib.Path(__file__).parent / "divergence_golden.json").write_text(f"[\n{text}\n]\n")
