"""Writes peers_golden.json: losses, gradients and advantages that TRL 1.16, verl 0.9.1 and the program of the MaxRL paper compute by their
own functions.

The inputs of a case come from a generator that the test repeats, so the file has results only. TRL's trainers need a model and a
process group; here a plain object stands for them, and their method runs on given log-probabilities in float64.

Run: python peers_golden.py VERL_DIR MAXRL_DIR  (torch 2.11, trl 1.16; VERL_DIR is an unpacked wheel of verl 0.9.1, MAXRL_DIR a checkout
of github.com/tajwarfahim/maxrl)
"""
import collections
import importlib.util
import json
import pathlib
import sys
import types

import numpy as np
import torch
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer

CASES, GROUP, PROMPTS = 200, 3, 2
B, T = GROUP * PROMPTS, 5
F64 = torch.float64


def uniforms(seed):
    """SplitMix64 as numbers in [0, 1)."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield ((z ^ (z >> 31)) >> 11) / 2**53


class Inputs:
    def __init__(self, seed):
        u = uniforms(seed)
        # The first completion of every fourth case is empty.
        self.lengths = [0 if row == 0 and seed % 4 == 0 else 1 + int(next(u) * T) for row in range(B)]
        self.rewards = [round(next(u) * 4) / 4 for _ in range(B)]
        self.advantages = [(next(u) - 0.5) * 3 for _ in range(B)]
        self.mask, self.logp, self.old, self.sampler = (torch.zeros(B, T, dtype=F64) for _ in range(4))
        for row, length in enumerate(self.lengths):
            for t in range(length):
                self.mask[row, t] = 1
                self.logp[row, t] = -3 * next(u)
                self.old[row, t] = self.logp[row, t] + (next(u) - 0.5) * 1.6
                self.sampler[row, t] = self.old[row, t] + (next(u) - 0.5) * 0.8
        self.teacher = torch.zeros(B, T, dtype=F64)
        for row, length in enumerate(self.lengths):
            for t in range(length):
                self.teacher[row, t] = self.old[row, t] + (next(u) - 0.5) * 2


class Accelerator:
    num_processes, sync_gradients = 1, True

    def gather(self, x):
        return x

    gather_for_metrics = gather

    def reduce(self, x, reduction):
        return x


def trainer(kind, args, **fields):
    """An object with the attributes that `_compute_loss` of a trainer reads."""
    defaults = dict(
        loss_type="grpo", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.28, beta=0.0, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False, vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=2, max_completion_length=8, _entropy_bonus_enabled=False, accelerator=Accelerator(),
        model=types.SimpleNamespace(training=True), _metrics={"train": collections.defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask, get_gamma_weights=GRPOTrainer.get_gamma_weights,
        args=types.SimpleNamespace(
            delta=None, steps_per_generation=2, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
            use_bias_correction_kl=False, **args,
        ),
    )
    return types.SimpleNamespace(**{**defaults, **fields}, kind=kind)


def trl(of, case, **more):
    """Returns the loss of a trainer, and its gradient by the log-probabilities."""
    lp = case.logp.clone().requires_grad_()
    of._get_per_token_logps_and_entropies = lambda *_, **__: (lp, torch.zeros_like(lp), None)
    inputs = dict(
        prompt_ids=torch.zeros(B, 1), prompt_mask=torch.ones(B, 1), completion_ids=torch.zeros(B, T), completion_mask=case.mask,
        advantages=torch.tensor(case.advantages, dtype=F64), old_per_token_logps=case.old, old_logps=(case.old * case.mask).sum(1),
        num_items_in_batch=2 * case.mask.sum(),
    )
    loss = of.kind._compute_loss(of, None, {**inputs, **more})
    loss.backward()
    return result(loss, lp.grad, case)


def result(loss, grad, case):
    return [loss.item()] + [grad[row, t].item() for row, length in enumerate(case.lengths) for t in range(length)]


def rounded(values):
    return [value if value is None else float(f"{value:.10g}") for value in values]


def ratios(case):
    """TRL's `token_truncate` with a cap of 1.2."""
    return torch.clamp(torch.exp((case.old - case.sampler) * case.mask), max=1.2)


def verl(folder, names):
    """Functions of the module `core_algos`, without the rest of verl."""
    torch_functional = types.ModuleType("verl.utils.torch_functional")
    source = (pathlib.Path(folder) / "verl/utils/torch_functional.py").read_text()
    for name in ("masked_sum", "masked_mean", "masked_var", "masked_whiten"):
        start = source.index(f"def {name}(")
        exec(source[start : source.index("\ndef ", start + 1)], {"torch": torch, **vars(torch_functional)}, vars(torch_functional))
    for name in ("masked_mean", "masked_var", "masked_whiten"):
        getattr(torch_functional, name).__globals__.update(vars(torch_functional))
    source = (pathlib.Path(folder) / "verl/trainer/ppo/core_algos.py").read_text()
    out = {}
    scope = dict(
        torch=torch, np=np, defaultdict=collections.defaultdict, verl_F=torch_functional, Optional=None, Any=None, AlgoConfig=type(None),
        ActorConfig=None,
    )
    for name in names + ["agg_loss"] * ("def agg_loss(" in source):
        start = source.index(f"def {name}(")
        end = min(at for at in (source.find(mark, start + 1) for mark in ("\ndef ", "\n@")) if at > 0)
        exec("from __future__ import annotations\n" + source[start:end], scope)
        out[name] = scope[name]
    return out


class Config(dict):
    __getattr__ = dict.__getitem__


def advantages(functions, name, case, **more):
    scores = torch.zeros(B, T, dtype=F64)
    for row, length in enumerate(case.lengths):
        scores[row, max(length - 1, 0)] = case.rewards[row]
    # An empty completion has no token that could carry its reward in verl, so its tokens are not looked at.
    out, _ = functions[f"compute_{name}_outcome_advantage"](
        token_level_rewards=scores, response_mask=case.mask, index=np.repeat(np.arange(PROMPTS), GROUP), **more
    )
    return [out[row, 0].item() if length else None for row, length in enumerate(case.lengths)]


def policy_loss(function, case, old=None, **settings):
    """Returns the loss of a function of verl for one half of a step, its gradient, and a 1 for each token without a term."""
    lp = case.logp.clone().requires_grad_()
    config = Config(
        {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28, **settings},
        global_batch_info=dict(batch_num_tokens=2 * case.mask.sum()),
    )
    wide = torch.tensor(case.advantages, dtype=F64).unsqueeze(1).expand(B, T)
    # The derivative by its weight is 0 for a token that is left out, and for no other.
    weights = torch.ones(B, T, dtype=F64, requires_grad=True)
    loss, _ = function(case.old if old is None else old, lp, wide, case.mask, config=config, rollout_is_weights=weights)
    loss.backward()
    left_out = [float(weights.grad[row, t] == 0) for row, length in enumerate(case.lengths) for t in range(length)]
    return result(loss, lp.grad, case), left_out


def main():
    estimators = ("rloo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    losses = ("geo_mean", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
    functions = verl(
        sys.argv[1],
        [f"compute_{name}_outcome_advantage" for name in estimators] + [f"compute_policy_loss_{name}" for name in losses],
    )
    maxrl = verl(sys.argv[2], ["compute_maxrl_outcome_advantage"])
    # The MaxRL program puts rewards into tensors of the default type.
    torch.set_default_dtype(F64)
    out = collections.defaultdict(list)
    for seed in range(CASES):
        case = Inputs(seed)
        sequence = dict(importance_sampling_level="sequence")
        out["luspo"].append(trl(trainer(GRPOTrainer, {}, loss_type="luspo", **sequence), case))
        out["vespo"].append(trl(trainer(GRPOTrainer, {}, loss_type="vespo"), case))
        out["vespo_corrected"].append(trl(trainer(GRPOTrainer, {}, loss_type="vespo"), case, importance_sampling_ratio=ratios(case)))
        out["off_policy_mask"].append(
            trl(trainer(GRPOTrainer, {}, off_policy_mask_threshold=0.1), case, sampling_per_token_logps=case.sampler)
        )
        # TRL takes an advantage for each token.
        taught = torch.tensor(case.advantages, dtype=F64).unsqueeze(1) + 0.7 * (case.teacher - case.old)
        out["distillation"].append(trl(trainer(GRPOTrainer, {}), case, advantages=taught))
        out["rloo"].append(trl(trainer(RLOOTrainer, {}), case))
        out["gmpo"].append(trl(trainer(GMPOTrainer, {}, epsilon_low=0.4, epsilon_high=0.3), case))
        lp = case.logp.clone().requires_grad_()
        config = types.SimpleNamespace(clip_ratio=0.4, clip_ratio_low=0.4, clip_ratio_high=0.3)
        wide = torch.tensor(case.advantages, dtype=F64).unsqueeze(1).expand(B, T)
        corrected, _ = functions["compute_policy_loss_geo_mean"](case.old, lp, wide, case.mask, config=config, rollout_is_weights=ratios(case))
        corrected.backward()
        out["gmpo_corrected"].append(result(corrected, lp.grad, case))
        for name, bound in (("dppo_tv", 0.1), ("dppo_kl", 0.02)):
            function = functions[f"compute_policy_loss_{name}"]
            # The divergence is defined for probabilities of at most 1.
            old = case.old.clamp(max=-1e-3)
            out[name].append(policy_loss(function, case, old, clip_ratio=bound, clip_ratio_high=2 * bound, clip_ratio_c=1.4)[0])
        torch.manual_seed(seed)
        choice = Config(clip_cov_ratio=0.3, clip_cov_lb=0.05, clip_cov_ub=1.0, kl_cov_ratio=0.3, ppo_kl_coef=0.7)
        out["kl_cov"].append(policy_loss(functions["compute_policy_loss_kl_cov"], case, policy_loss=choice)[0])
        # The choice is random, so the test reads it.
        out["clip_cov"].append(sum(policy_loss(functions["compute_policy_loss_clip_cov"], case, policy_loss=choice), []))
        for name in estimators:
            out[f"advantages/{name}"].append(advantages(functions, name, case, config=Config(gamma=1.0)))
        out["advantages/maxrl"].append(advantages(maxrl, "maxrl", case))
    lines = ",\n".join(f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(rounded(case)) for case in cases) + "\n]" for name, cases in out.items())
    (pathlib.Path(__file__).parent / "peers_golden.json").write_text("{" + lines + "}\n")


if __name__ == "__main__":
    main()
