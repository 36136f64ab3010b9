"""Runs TRL and omnigrpo alternately on one workload, each in a fresh process; writes a table, and a JSON file in results/.

    python compare.py --workload image1 --steps 4 --repeats 2 --trl_python /path/to/venv/bin/python

Runs alternate (A B A B) on the same CPUs. Medians are over all steps except the first of each process, which includes
warm-up on both sides. Peak memory is the largest VmHWM of a side's processes. Needs only the standard library.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from run_omnigrpo import BINARY
from workloads import BETA, HERE, LEARNING_RATE, NUM_GENERATIONS, TEMPERATURE, WORKLOADS, directory

SYSTEMS = ("trl", "omnigrpo")
# Row of the table -> phases of TRL, phases of omnigrpo. Phases without a row count as `other`.
PHASES = {
    "data": (("data",), ("data",)),
    "rollout (prefill, decode)": (("generate",), ("encode", "rollout")),
    "reward": (("reward",), ("reward",)),
    "reference log-probs": (("reference",), ("reference",)),
    "policy forward": (("forward", "old"), ("forward",)),
    "policy backward": (("backward",), ("backward",)),
    "optimizer": (("optimizer",), ("optimizer",)),
}


def machine(cpus):
    def first(path, key):
        lines = Path(path).read_text().splitlines() if Path(path).is_file() else []
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)

    flags = (first("/proc/cpuinfo", "flags") or "").split()
    return dict(
        cpu=first("/proc/cpuinfo", "model name") or platform.processor(), cores=os.cpu_count(), cpus_used=cpus,
        simd=[flag for flag in flags if flag in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")],
        memory=first("/proc/meminfo", "MemTotal"), system=f"{platform.system()} {platform.release()}",
    )


def commit():
    def git(*words):
        return subprocess.run(["git", "-C", HERE, *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../..")
    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")


def run(system, args, cpus, output):
    script = [str(HERE / f"run_{system}.py"), "--workload", args.workload, "--steps", str(args.steps)]
    script += ["--threads", str(args.threads), "--torch_dtype", args.torch_dtype, "--output", str(output)]
    script += ["--use_peft"] if args.use_peft else []
    python = args.trl_python if system == "trl" else sys.executable
    extra = ["--binary", str(args.binary)] if system == "omnigrpo" else []
    done = subprocess.run(
        [python, *script, *extra], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )
    if done.returncode != 0:
        raise SystemExit(f"{system} failed:\n{done.stdout[-4000:]}")
    result = json.loads(output.read_text())
    times = " ".join(f"{step['step_time']:.2f}" for step in result["steps"])
    print(f"{system:>8}: steps {times} s, peak {result['peak_mb']:.0f} MB", file=sys.stderr, flush=True)
    return result


def summary(runs, side, workload):
    """Returns medians over the warm steps of all runs of one side."""
    steps = [step for result in runs for step in result["steps"][1:]]
    step_time = median(step["step_time"] for step in steps)
    phases, named = {}, set()
    for row, pair in PHASES.items():
        phases[row] = median(sum(step["phases"].get(name, 0.0) for name in pair[side]) for step in steps)
        named.update(pair[side])
    phases["other"] = median(
        sum(secs for name, secs in step["phases"].items() if name not in named) for step in steps
    )
    tokens = workload.completion_tokens_per_step
    return dict(
        step_time=step_time, step_time_min=min(s["step_time"] for s in steps),
        step_time_max=max(s["step_time"] for s in steps), warm_steps=len(steps),
        tokens_per_second=tokens / step_time, rollout_tokens_per_second=tokens / phases["rollout (prefill, decode)"],
        peak_mb=max(result["peak_mb"] for result in runs), phases=phases,
    )


def table(trl, ours):
    """Returns rows of the printed table: name, TRL, omnigrpo, and the factor by which omnigrpo is better."""
    rows = [
        ("step time, s", trl["step_time"], ours["step_time"], trl["step_time"] / ours["step_time"]),
        *(
            (title, trl[key], ours[key], ours[key] / trl[key])
            for title, key in (
                ("completion tokens/s, step", "tokens_per_second"),
                ("completion tokens/s, rollout", "rollout_tokens_per_second"),
            )
        ),
        ("peak memory, MB", trl["peak_mb"], ours["peak_mb"], trl["peak_mb"] / ours["peak_mb"]),
    ]
    for name, secs in trl["phases"].items():
        own = ours["phases"][name]
        rows.append((f"  {name}, s", secs, own, secs / own if own > 0 else None))
    return rows


def show(args, rows):
    workload = WORKLOADS[args.workload]
    print(
        f"{args.workload}: {workload.prompt_tokens} prompt tokens with {workload.num_images} images, "
        f"G = {NUM_GENERATIONS}, {workload.completion_tokens} new tokens, {args.threads} threads, {args.torch_dtype}, "
        f"{'LoRA' if args.use_peft else 'all weights'}"
    )
    print(f"{'':34}{'TRL':>12}{'omnigrpo':>12}{'ratio':>9}")
    for title, theirs, ours, ratio in rows:
        print(f"{title:34}{theirs:12.3f}{ours:12.3f}" + (f"{ratio:8.2f}x" if ratio is not None else f"{'-':>9}"))
    for title, aim in zip(("step time, s", "peak memory, MB"), workload.aims.get(args.torch_dtype, ())):
        ratio = next(row[3] for row in rows if row[0] == title)
        print(f"aim for {title.split(',')[0]}: {aim:g}x, {'met' if ratio >= aim else 'not met'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, default=4, help="steps per process; the first does not count")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--torch_dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--use_peft", action="store_true", help="train adapters of all linear layers")
    parser.add_argument("--binary", type=Path, default=BINARY)
    parser.add_argument("--trl_python", default=sys.executable, help="Python with requirements.txt installed")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step of a process does not count")
    directory(args.workload)
    available = sorted(os.sched_getaffinity(0))
    if len(available) < args.threads:
        parser.error(f"--threads {args.threads}, expected at most {len(available)}, the available CPUs")
    cpus = available[: args.threads]

    runs = {system: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(args.repeats):
            for system in SYSTEMS:
                runs[system].append(run(system, args, cpus, Path(scratch) / "run.json"))
    workload = WORKLOADS[args.workload]
    sides = {system: summary(runs[system], side, workload) for side, system in enumerate(SYSTEMS)}
    rows = table(sides["trl"], sides["omnigrpo"])
    show(args, rows)
    print(f"TRL's imports alone: {runs['trl'][0]['imported_mb']:.0f} MB")

    suffix = ("_bf16" if args.torch_dtype == "bfloat16" else "") + ("_lora" if args.use_peft else "")
    output = HERE / "results" / (args.workload + suffix + ".json")
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(dict(
        workload=dict(
            name=args.workload, num_images=workload.num_images, prompt_tokens=workload.prompt_tokens,
            completion_tokens=workload.completion_tokens, num_generations=NUM_GENERATIONS, beta=BETA,
            temperature=TEMPERATURE, learning_rate=LEARNING_RATE, dtype=args.torch_dtype, threads=args.threads,
            use_peft=args.use_peft, recomputes=workload.recomputes,
        ),
        machine=machine(cpus), commit=commit(), summary=sides,
        ratios={title.strip(): ratio for title, _, _, ratio in rows}, runs=runs,
    ), indent=1) + "\n")
    print(f"written to {output.relative_to(Path.cwd()) if output.is_relative_to(Path.cwd()) else output}")


if __name__ == "__main__":
    main()
