"""Times the kernels and PyTorch's CPU ops alternately at the same sizes, and writes the ratios to results.md.

    python bench/ops/compare.py [--rounds 3] [--only PART_OF_A_NAME] [--binary BUILT_BENCHMARK]

In every round each op runs for a fifth of a second on each side, one after the other, with the same number of threads;
the table shows the fastest call of all rounds. A ratio above 1 means that the kernel is faster. Builds the benchmark itself.
"""

import argparse
import os
import re
import subprocess
import time
from pathlib import Path

import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def rand(*shape, dtype=torch.float32, grad=False):
    return (torch.rand(*shape) * 2 - 1).to(dtype).requires_grad_(grad)


def backward(y, inputs, dy=None):
    """Times only the backward pass, over a retained graph."""
    dy = torch.rand_like(y) if dy is None else dy
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def linear(kind, m, k, n, dtype):
    x, w, dy = rand(m, k, dtype=dtype), rand(n, k, dtype=dtype), rand(m, n, dtype=dtype)
    if kind == "forward":
        y = torch.empty(m, n, dtype=dtype)
        return lambda: torch.mm(x, w.t(), out=y)
    if kind == "dx":
        dx = torch.empty(m, k, dtype=dtype)
        return lambda: torch.mm(dy, w, out=dx)
    dw = torch.zeros(n, k, dtype=dtype)
    return lambda: dw.addmm_(dy.t(), x)


def decode(rows, dtype):
    sizes = [(768, 512), (512, 512), (2816, 512), (512, 1408)]
    layers = [[rand(n, k, dtype=dtype) for n, k in sizes] for _ in range(8)]
    x = {k: rand(rows, k, dtype=dtype) for k in (512, 1408)}

    def run():
        for layer in layers:
            for w in layer:
                F.linear(x[w.shape[1]], w)

    return run


def norm(kind, op):
    x, w, b = rand(852, 512, grad=True), rand(512, grad=True), rand(512, grad=True)
    run = (lambda: F.rms_norm(x, (512,), w, 1e-6)) if op == "rms_norm" else (lambda: F.layer_norm(x, (512,), w, b, 1e-6))
    inputs = [x, w] if op == "rms_norm" else [x, w, b]
    return no_grad(run) if kind == "forward" else backward(run(), inputs)


def no_grad(run):
    def wrapped():
        with torch.no_grad():
            run()

    return wrapped


def rope():
    x, angles = rand(852, 10, 64), rand(852, 1, 32)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    return lambda: x * cos + torch.cat((-x[..., 32:], x[..., :32]), -1) * sin


def swiglu(kind):
    x = rand(852, 2816, grad=True)

    def run():
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return no_grad(run) if kind == "forward" else backward(run(), [x])


def gelu(kind):
    x = rand(852, 1408, grad=True)
    return no_grad(lambda: F.gelu(x)) if kind == "forward" else backward(F.gelu(x), [x])


def embedding(kind, dtype):
    ids = torch.arange(852) * 577 % 2048
    table = rand(2048, 512, dtype=dtype, grad=True)
    return no_grad(lambda: F.embedding(ids, table)) if kind == "forward" else backward(F.embedding(ids, table), [table])


def adamw():
    p = torch.nn.Parameter(rand(8 << 20))
    p.grad = rand(8 << 20)
    return torch.optim.AdamW([p], lr=1e-6, fused=True).step


def grad_norm():
    g = rand(8 << 20)
    return lambda: torch.linalg.vector_norm(g)


def attention(kind, name):
    """Times attention in PyTorch, which has no layouts: a shared prefix is a mask over all pairs, and key heads are repeated for their queries."""
    heads, t, mask, causal = 8, 852, None, False
    batch = 1
    if name == "causal 852":
        causal = True
    elif name.startswith("windows"):
        batch, heads, t = 16, 4, 64
    elif name.startswith("full"):
        heads, t = 4, 1024
    else:
        mask = torch.zeros(852, 852, dtype=torch.bool)
        mask[:340, :340] = torch.ones(340, 340).tril().bool()
        for start in range(340, 852, 64):
            mask[start : start + 64, :340] = True
            mask[start : start + 64, start : start + 64] = torch.ones(64, 64).tril().bool()
    q, k, v = (rand(batch, heads, t, 64, grad=True) for _ in range(3))

    def run():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)

    return no_grad(run) if kind == "forward" else backward(run(), [q, k, v])


def attention_decode():
    q, (k, v) = rand(8, 8, 1, 64), (rand(8, 2, 404, 64) for _ in range(2))
    return no_grad(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def token_logprob(kind, rows, h, v, dtype):
    hidden, head = rand(rows, h, dtype=dtype, grad=True), rand(v, h, dtype=dtype, grad=True)
    targets = (torch.arange(rows) * 31 % v)[:, None]

    def run():
        logp = F.linear(hidden, head).float().log_softmax(-1)
        # The kernel also computes the entropy.
        return logp.gather(1, targets).sum(1), -(logp.exp() * logp).sum(-1)

    if kind == "forward":
        return no_grad(run)
    return backward(run()[0], [hidden, head])


RULES = [
    (r"linear (forward|dx|dw) (\d+)x(\d+)x(\d+) (f32|bf16)",
     lambda kind, m, k, n, dtype: linear(kind, int(m), int(k), int(n), DTYPES[dtype])),
    (r"linear decode, 8 layers, (\d+) rows (f32|bf16)", lambda m, dtype: decode(int(m), DTYPES[dtype])),
    (r"(rms_norm|layer_norm) (forward|backward) 852x512", lambda op, kind: norm(kind, op)),
    (r"rope 852x10x64", rope),
    (r"swiglu (forward|backward) 852x1408", swiglu),
    (r"gelu (forward|backward) 852x1408", gelu),
    (r"embedding (forward) 852x512 (f32|bf16)", lambda kind, dtype: embedding(kind, DTYPES[dtype])),
    (r"embedding (backward) 852x512", lambda kind: embedding(kind, torch.float32)),
    (r"adamw 8Mi", adamw),
    (r"gradient norm 8Mi", grad_norm),
    (r"attention (forward|backward) (.*)", attention),
    (r"attention decode .*", attention_decode),
    (r"token_logprob (forward|backward) (\d+)x(\d+)x(\d+) (f32|bf16)",
     lambda kind, rows, h, v, dtype: token_logprob(kind, int(rows), int(h), int(v), DTYPES[dtype])),
]


def torch_op(name):
    for pattern, make in RULES:
        if match := re.fullmatch(pattern, name):
            return make(*match.groups())
    return None


def best(run):
    run()
    fastest, end = float("inf"), time.perf_counter() + 0.2
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def cpu():
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", info).group(1)
    flags = re.search(r"flags\s*: (.*)", info).group(1).split()
    best = next((name for flag, name in [("amx_bf16", "AMX"), ("avx512f", "AVX-512"), ("avx2", "AVX2")] if flag in flags), "no AVX2")
    return f"{model}, {os.cpu_count()} CPUs, {best}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--binary", help="path of a built benchmark; builds it by default")
    parser.add_argument("--output", type=Path, default=HERE / "results.md")
    args = parser.parse_args()
    threads = os.cpu_count()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    cargo = ["cargo", "bench", "-q", "-p", "omnigrpo-kernels", "--bench", "kernels", "--"]
    command = ([args.binary] if args.binary else cargo) + ["--serve"]
    ours = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE)

    def ask(line):
        ours.stdin.write(line + "\n")
        ours.stdin.flush()
        return ours.stdout.readline().strip()

    names, name = [], ask("?")
    while name:
        names.append(name)
        name = ours.stdout.readline().strip()
    names = [name for name in names if args.only in name and torch_op(name) is not None]
    times = {name: [float("inf"), float("inf")] for name in names}
    for _ in range(args.rounds):
        for name in names:
            times[name][0] = min(times[name][0], float(ask(name)))
            times[name][1] = min(times[name][1], best(torch_op(name)))
            print(f"{name:<55} {times[name][0] * 1e3:9.3f} ms {times[name][1] * 1e3:9.3f} ms", flush=True)
    ours.stdin.close()
    ours.wait()
    lines = [
        "# Kernels and PyTorch's CPU ops",
        "",
        f"Written by `python bench/ops/compare.py --rounds {args.rounds}` on {cpu()}; {threads} threads, "
        f"PyTorch {torch.__version__}.",
        "Fastest call of all rounds; a ratio above 1 means that the kernel is faster. PyTorch's decoding row is `F.linear` over the same weights;",
        "its shared prefix is a mask over all pairs. With bf16, PyTorch's activations and outputs are bf16 too; the kernels read and",
        "write f32 and round internally. The kernels' activations replace their input with its gradient; the time includes a copy of it.",
        "",
        "| op | kernel, ms | PyTorch, ms | ratio |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {a * 1e3:.3f} | {b * 1e3:.3f} | {b / a:.2f} |" for name, (a, b) in times.items()]
    args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
