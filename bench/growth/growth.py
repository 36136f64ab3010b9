"""How step time and peak memory grow with the group, the lengths and the prompts: a table and a plot.

    cargo build --release -p omnigrpo
    python bench/growth/growth.py [--trl_python /path/to/venv/bin/python]

Every point is a separate process: `omnigrpo bench` with the embedded model of 28 million parameters, and for the first
axis TRL from G = 2 on (see bench/peer). Writes growth.json, growth.md and growth.svg next to this file. Needs only the
standard library; nothing else should run on the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEER = HERE.parent / "peer"
# One 448 x 448 image is 256 tokens.
BASE = dict(num_generations=8, prompt_tokens=44, completion_tokens=64, num_prompts=1)
AXES = {
    "num_generations": [1, 2, 4, 8, 16, 32],
    "prompt_tokens": [44, 244, 744, 1744],
    "completion_tokens": [32, 64, 128, 256],
    "num_prompts": [1, 2, 4],
}
TITLES = dict(
    num_generations="completions per prompt (G)", prompt_tokens="prompt tokens", completion_tokens="completion tokens",
    num_prompts="prompts",
)
TRL_GROUPS = [2, 4, 8, 16, 32]


def ours(binary, threads, steps, recompute, **point):
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "bench.json"
        words = [str(binary), "bench", "--json", str(file), "--threads", str(threads), "--num_steps", str(steps)]
        words += [word for key, value in point.items() for word in (f"--{key}", str(value))]
        subprocess.run(words + (["--gradient_checkpointing"] if recompute else []), check=True, capture_output=True)
        return json.loads(file.read_text())


def trl(python, threads, group):
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trl.json"
        words = [python, "run_trl.py", "--workload", "image1", "--steps", "2", "--threads", str(threads)]
        subprocess.run(
            words + ["--num_generations", str(group), "--output", str(file)], check=True, capture_output=True, cwd=PEER
        )
        result = json.loads(file.read_text())
    return dict(value=group, step_secs=result["steps"][-1]["step_time"], peak_mb=result["peak_mb"])


def measure(args):
    axes = {}
    for axis, values in AXES.items():
        axes[axis] = []
        for value in values:
            point = {**BASE, axis: value}
            plain = ours(args.binary, args.threads, args.steps, False, **point)
            less = ours(args.binary, args.threads, args.steps, True, **point)
            prompt, completion = plain["prompt_tokens"], point["completion_tokens"] - 1
            groups, prompts = point["num_generations"], point["num_prompts"]
            row = dict(
                value=prompt if axis == "prompt_tokens" else value, rows=prompts * (prompt + groups * completion),
                separate_rows=prompts * groups * (prompt + completion), step_secs=plain["step_secs"],
                peak_mb=plain["peak_bytes"] / 1e6, recompute_secs=less["step_secs"],
                recompute_peak_mb=less["peak_bytes"] / 1e6,
            )
            axes[axis].append(row)
            print(axis, row, file=sys.stderr, flush=True)
    peers = [trl(args.trl_python, args.threads, g) for g in TRL_GROUPS] if args.trl_python else []
    return dict(
        machine=machine(), threads=args.threads, base=BASE, axes=axes, trl=peers,
        gemm_flops_per_sec=plain["gemm_flops_per_sec"], memory_bytes_per_sec=plain["memory_bytes_per_sec"],
    )


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    simd = "AMX" if "amx_bf16" in flags else "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    return f"{name}, {os.cpu_count()} cores, {simd}"


def table(data):
    out = [
        "# Growth of a step", "",
        f"{data['machine']}; {data['threads']} threads; the embedded Qwen2.5-VL of 28 million parameters, float32, every "
        "weight trained, one 448 × 448 image per prompt. Unless an axis varies it: "
        f"G = {data['base']['num_generations']}, {data['base']['prompt_tokens'] + 256} prompt tokens, "
        f"{data['base']['completion_tokens']} completion tokens, one prompt. Written by `growth.py`.", "",
        "Rows are the decoder's rows: P + G·(R − 1) for a group, compared with G·(P + R − 1) for separate sequences.",
        "", "![growth](growth.svg)", "",
    ]
    for axis, rows in data["axes"].items():
        peers = {row["value"]: row for row in data["trl"]} if axis == "num_generations" else {}
        head = [TITLES[axis], "rows", "rows, separate", "s", "s per 1000 rows", "MB", "s, recompute", "MB, recompute"]
        head += ["TRL s", "TRL MB"] if peers else []
        out += ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
        for r in rows:
            cells = [
                str(r["value"]), str(r["rows"]), str(r["separate_rows"]), f"{r['step_secs']:.2f}",
                f"{1000 * r['step_secs'] / r['rows']:.2f}", f"{r['peak_mb']:.0f}", f"{r['recompute_secs']:.2f}",
                f"{r['recompute_peak_mb']:.0f}",
            ]
            if peers:
                peer = peers.get(r["value"])
                cells += [f"{peer['step_secs']:.2f}", f"{peer['peak_mb']:.0f}"] if peer else ["", ""]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


def panel(x0, y0, title, unit, curves):
    """Draws one plot: curves are (name, colour, dashes, [(x, y)]). Both axes are linear and start at 0."""
    width, height = 300, 190
    top_x = max(x for *_, points in curves for x, _ in points)
    top_y = 1.05 * max(y for *_, points in curves for _, y in points)
    at = lambda x, y: (x0 + width * x / top_x, y0 + height * (1 - y / top_y))  # noqa: E731
    out = [
        f'<text x="{x0}" y="{y0 - 10}" class="title">{title}</text>',
        f'<path d="M{x0},{y0} V{y0 + height} H{x0 + width}" class="axis"/>',
    ]
    for i in range(1, 5):
        y = top_y * i / 4
        label = f"{y:.0f}" if top_y >= 20 else f"{y:.1f}"
        out.append(f'<text x="{x0 - 6}" y="{at(0, y)[1] + 4:.1f}" class="tick" text-anchor="end">{label}</text>')
    for x in sorted({x for x, _ in curves[0][3]}):
        out.append(f'<text x="{at(x, 0)[0]:.1f}" y="{y0 + height + 14}" class="tick" text-anchor="middle">{x}</text>')
    out.append(f'<text x="{x0 - 6}" y="{y0 - 10}" class="tick" text-anchor="end">{unit}</text>')
    for i, (name, colour, dashes, points) in enumerate(curves):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in points))
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        out.append(f'<text x="{x0 + 10}" y="{y0 + 14 + 14 * i}" class="tick" fill="{colour}">{name}</text>')
    return out


def plot(data):
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1480 520" font-family="sans-serif">',
        "<style>.title{font-size:13px;font-weight:bold}.tick{font-size:11px}.axis{fill:none;stroke:#888}</style>",
        '<rect width="1480" height="520" fill="white"/>',
    ]
    for i, (axis, rows) in enumerate(data["axes"].items()):
        x0 = 60 + 360 * i
        each = lambda key: [(r["value"], r[key]) for r in rows]  # noqa: E731
        # Time in proportion to the rows of separate sequences, from the first point on.
        first = rows[0]
        apart = [(r["value"], first["step_secs"] * r["separate_rows"] / first["separate_rows"]) for r in rows]
        times = [("time", "#1f5fbf", "", each("step_secs")), ("with recompute", "#d9822b", "4 3", each("recompute_secs"))]
        if axis == "num_generations":
            times.append(("in proportion to G (P + R)", "#999", "2 3", apart))
        memory = [("peak memory", "#1f5fbf", "", each("peak_mb")), ("with recompute", "#d9822b", "4 3", each("recompute_peak_mb"))]
        if axis == "num_generations" and data["trl"]:
            times.append(("TRL", "#c23b3b", "", [(r["value"], r["step_secs"]) for r in data["trl"]]))
            memory.append(("TRL", "#c23b3b", "", [(r["value"], r["peak_mb"]) for r in data["trl"]]))
        out += panel(x0, 40, TITLES[axis], "s", times)
        out += panel(x0, 300, TITLES[axis], "MB", memory)
    return "\n".join(out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", type=Path, default=HERE.parents[1] / "target/release/omnigrpo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--trl_python", help="Python with bench/peer/requirements.txt; without it TRL is omitted")
    parser.add_argument("--draw", action="store_true", help="write table and plot again from growth.json")
    args = parser.parse_args()
    file = HERE / "growth.json"
    if not args.draw:
        file.write_text(json.dumps(measure(args), indent=1) + "\n")
    data = json.loads(file.read_text())
    (HERE / "growth.md").write_text(table(data))
    (HERE / "growth.svg").write_text(plot(data))


if __name__ == "__main__":
    main()
