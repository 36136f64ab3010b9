"""Writes torch.json: small inputs and PyTorch's results, in float64 (torch 2.11). Run: python make_goldens.py"""
import json
import pathlib

import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
goldens = {}


def rand(*shape, scale=1.0):
    # Inputs are exact in float32, so that both sides start from the same numbers.
    return (torch.randn(*shape) * scale).float().double().requires_grad_()


def add(name, inputs, out, **extra):
    dout = rand(*out.shape)
    grads = torch.autograd.grad(out, list(inputs.values()), dout, retain_graph=True)
    case = {k: v.detach().flatten().tolist() for k, v in inputs.items()}
    case |= {"d" + k: g.flatten().tolist() for k, g in zip(inputs, grads)}
    goldens[name] = case | {"out": out.detach().flatten().tolist(), "dout": dout.detach().flatten().tolist()} | extra


x, w, b = rand(3, 10), rand(10), rand(10)
add("layer_norm", {"x": x, "w": w, "b": b}, F.layer_norm(x, (10,), w, b, 1e-5))
add("rms_norm", {"x": x, "w": w}, F.rms_norm(x, (10,), w, 1e-6))
z = rand(40, scale=3.0)
add("GeluErf", {"x": z}, F.gelu(z))
add("GeluTanh", {"x": z}, F.gelu(z, approximate="tanh"))
add("Silu", {"x": z}, F.silu(z))
add("QuickGelu", {"x": z}, z * torch.sigmoid(1.702 * z))

# Grouped-query causal attention: 5 rows, 4 query heads, 2 key heads, width 6.
q, k, v = rand(5, 4, 6), rand(5, 2, 6), rand(5, 2, 6)
heads = [t.transpose(0, 1) for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
o = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.4).transpose(0, 1)
add("attention", {"q": q, "k": k, "v": v}, o)

# Log-probability and entropy at temperature 0.7 of one target per row.
h, head, ids = rand(3, 8), rand(11, 8), torch.tensor([4, 0, 10])
logp = torch.log_softmax(h @ head.T / 0.7, -1)
out = torch.cat([logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])
add("logprob", {"hidden": h, "head": head}, out)

# Three AdamW steps.
p = torch.nn.Parameter(rand(7).detach().clone())
adamw = torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
start, steps = p.detach().tolist(), [rand(7).detach() for _ in range(3)]
for g in steps:
    p.grad = g
    adamw.step()
goldens["adamw"] = {"w": start, "grads": torch.cat(steps).tolist(), "out": p.detach().tolist()}

pathlib.Path(__file__).with_name("torch.json").write_text(json.dumps(goldens))
