"""GRPO post-training of models that read, see and hear, in this process and with TRL's names.

    import omnigrpo

    def brief(completions, **kwargs):
        return [-float(len(completion[0]["content"])) for completion in completions]

    trainer = omnigrpo.GRPOTrainer(
        model="Qwen/Qwen2.5-VL-3B-Instruct",
        reward_funcs=["accuracy", brief],
        args=omnigrpo.GRPOConfig(output_dir="runs/first", num_generations=8, max_steps=100),
        train_dataset=rows,  # a datasets.Dataset, a list or another iterable of dicts, or the path of a file of rows
    )
    trainer.train()
    print(trainer.model.generate(["What is 1 + 1?"])[0][0]["text"])

Numbers are computed on threads of their own. Rewards and callbacks run on the thread that calls `train`.
"""

from ._model import Model, evaluate
from ._omnigrpo import OmnigrpoError, __version__, write_demo
from ._parser import TrlParser
from ._trainer import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, TrainOutput, plan

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "Model",
    "OmnigrpoError",
    "SFTConfig",
    "SFTTrainer",
    "TrainOutput",
    "TrlParser",
    "__version__",
    "evaluate",
    "plan",
    "write_demo",
]
