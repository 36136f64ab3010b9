"""Workloads and step settings of both trainers, and how memory is read. No heavy imports."""

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = HERE / "scratch"

IMAGE_PX = 448
# Tokens of an image by checkpoint: (448 / 14)² or (448 / 16)² patches, merged 2 × 2.
IMAGE_TOKENS = {"model": 256, "qwen3_5": 196}

NUM_GENERATIONS = 8
TEMPERATURE = 1.0
BETA = 0.04
LEARNING_RATE = 1e-6
MAX_GRAD_NORM = 1.0
SEED = 42
NUM_ROWS = 16


@dataclass(frozen=True)
class Workload:
    """One group per step; every row has the same lengths."""

    num_images: int
    prompt_tokens: int
    # Forced length: no stop token is drawn before it.
    completion_tokens: int
    # Goals of the project by dtype: TRL's step time (AVX-512 or AMX) and peak memory, divided by ours.
    aims: dict[str, tuple[float, float]]
    # Folder of the checkpoint below `scratch`.
    model: str = "model"
    # Whether omnigrpo computes activations again; TRL keeps them.
    recomputes: bool = False

    @property
    def sees(self) -> bool:
        """Whether the model has a tower."""
        return self.model in IMAGE_TOKENS

    @property
    def completion_tokens_per_step(self) -> int:
        return NUM_GENERATIONS * self.completion_tokens


# Text models of published sizes.
SHORT = {"float32": (10.0, 4.0), "bfloat16": (12.0, 6.0)}
LONG = {"float32": (5.0, 4.0), "bfloat16": (8.0, 6.0)}
WORKLOADS = {
    "image1": Workload(1, 300, 64, {"float32": (14.0, 6.0)}),
    "image6": Workload(6, 1588, 64, {"float32": (16.0, 14.0)}),
    "qwen3.5_image1": Workload(1, 240, 64, {"float32": (6.0, 6.0)}, "qwen3_5", recomputes=True),
    "text": Workload(0, 200, 256, {"float32": (2.7, 4.0)}),
    "smollm2_16": Workload(0, 128, 16, SHORT, "smollm2_135M"),
    "smollm2_128": Workload(0, 128, 128, LONG, "smollm2_135M"),
    "qwen2.5_16": Workload(0, 128, 16, SHORT, "qwen2_5_0.5B"),
    "qwen2.5_128": Workload(0, 128, 128, LONG, "qwen2_5_0.5B"),
}
LORA_RANK = 16


def model_of(workload: str) -> Path:
    """Returns the folder of a workload's checkpoint."""
    return WORK / WORKLOADS[workload].model


def directory(workload: str) -> Path:
    """Returns the folder of rows and images of a workload; fails before make_workload.py has run."""
    path, model = WORK / workload, model_of(workload)
    if not (path / "train.jsonl").is_file() or not (model / "config.json").is_file():
        raise SystemExit(f"{path} or {model} does not exist; run make_workload.py --workload {workload} first")
    return path


def read_jsonl(path: Path) -> list[dict]:
    """Reads complete lines only, so that a file can be read while it is written."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def peak_mb(pid: int | str = "self") -> float | None:
    """Returns the largest resident memory of a living process (`VmHWM`), in 10⁶ bytes."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    # A process that has ended but has not been waited for has no memory.
    return None
