"""Workloads and step settings of both trainers, and how memory is read. No heavy imports."""

import json
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORK = HERE / "scratch"
MODEL = WORK / "model"

IMAGE_PX = 448
# (448 / 14)² patches, merged 2 × 2.
TOKENS_PER_IMAGE = 256

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
    # Goals of the project: TRL's step time (f32, AVX-512 or AMX) and peak memory, divided by ours.
    step_time_aim: float
    memory_aim: float

    @property
    def completion_tokens_per_step(self) -> int:
        return NUM_GENERATIONS * self.completion_tokens


WORKLOADS = {
    "image1": Workload(1, 300, 64, 14.0, 6.0),
    "image6": Workload(6, 1588, 64, 16.0, 14.0),
    "text": Workload(0, 200, 256, 2.7, 4.0),
}


def directory(workload: str) -> Path:
    """Returns the folder of rows and images of a workload; fails before make_workload.py has run."""
    path = WORK / workload
    if not (path / "train.jsonl").is_file() or not (MODEL / "config.json").is_file():
        raise SystemExit(f"{path} or {MODEL} does not exist; run make_workload.py --workload {workload} first")
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
