"""Processes that train together: `nproc_per_node`, `mpirun` and `torchrun`. Skipped where they are not installed."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not shutil.which("mpirun"), reason="NOT TESTED: several processes, since there is no mpirun")

# It shows what follows `train`, so that a test sees which processes went on.
SCRIPT = """
import sys
import omnigrpo

def brief(completions, **kwargs):
    return [-float(len(completion[0]["content"])) for completion in completions]

def main(demo, folder, batches, **settings):
    args = omnigrpo.GRPOConfig(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=batches, num_generations=4, max_completion_length=8,
        learning_rate=3e-4, dtype="float32", max_steps=2, gradient_leaves=2, threads=1, **settings,
    )
    trainer = omnigrpo.GRPOTrainer(f"{demo}/model", brief, args, f"{demo}/data/train.jsonl")
    done = trainer.train()
    first = trainer.state.is_world_process_zero
    print(f"trained {done.global_step} as {'first' if first else 'other'}, {len(trainer.state.log_history)} logs\\n", end="", flush=True)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), **dict(zip(["nproc_per_node"], map(int, sys.argv[4:]))))
"""
# Open MPI refuses root otherwise.
ENV = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def script(tmp_path_factory, demo):
    """Return a function that runs the script with a launcher, and the weights of a run in one process."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "script.py").write_text(SCRIPT)

    def run(name, launcher, *arguments):
        command = [*launcher, folder / "script.py", demo, folder / name, *arguments]
        return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300), folder / name / "model.safetensors"

    said, alone = run("alone", [sys.executable], "2")
    assert said.stdout == "trained 2 as first, 2 logs\n", said.stderr
    return run, alone.read_bytes()


def torchrun():
    pytest.importorskip("torch", reason="NOT TESTED: torchrun, since torch is not installed")
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


LAUNCHERS = {
    "nproc_per_node": lambda: [sys.executable],
    "mpirun": lambda: ["mpirun", "-n", "2", "--bind-to", "none", "--oversubscribe", sys.executable],
    "torchrun": torchrun,
}


@pytest.mark.parametrize("way", LAUNCHERS)
def test_a_script_trains_in_two_processes_to_the_same_bytes(script, way):
    run, alone = script
    said, weights = run(way, LAUNCHERS[way](), "1", *(["2"] if way == "nproc_per_node" else []))
    assert said.returncode == 0, said.stderr
    # Each rank passes `train` once; the processes that started them do not.
    assert sorted(said.stdout.splitlines()) == ["trained 2 as first, 2 logs", "trained 2 as other, 0 logs"], said.stderr
    assert weights.read_bytes() == alone


def test_a_failure_ends_all_processes_with_the_text(script, tmp_path, demo):
    run, _ = script
    said = subprocess.run(
        [*LAUNCHERS["mpirun"](), "-c", SCRIPT.split("if __name__")[0] + f"main('no/model', {str(tmp_path)!r}, 1)"],
        env=ENV, capture_output=True, text=True, timeout=300,
    )
    assert said.returncode != 0 and "the model was not found" in said.stderr


def test_the_program_of_the_package_starts_its_ranks(demo, tmp_path):
    line = "train --num_generations 4 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --max_completion_length 8"
    line += " --max_steps 1 --threads 1 --reward_funcs accuracy --nproc_per_node 2"
    files = ["--model", demo / "model", "--train_file", demo / "data/train.jsonl", "--output_dir", tmp_path / "run"]
    said = subprocess.run([sys.executable, "-m", "omnigrpo", *line.split(), *files], env=ENV, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "run/model.safetensors").exists()


def test_an_interactive_session_cannot_be_run_again(demo, tmp_path):
    code = SCRIPT.split("if __name__")[0] + f"main({str(demo)!r}, {str(tmp_path)!r}, 1, nproc_per_node=2)"
    said = subprocess.run([sys.executable, "-"], input=code, env=ENV, capture_output=True, text=True, timeout=300)
    assert "ValueError: this program cannot be started again as ranks" in said.stderr and "mpirun -n 2" in said.stderr

