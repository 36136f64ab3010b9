from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from types import SimpleNamespace
from typing import Any, NamedTuple

from typing_extensions import Self, Unpack

from ._omnigrpo import OmnigrpoError as OmnigrpoError
from ._omnigrpo import __version__ as __version__
from ._omnigrpo import write_demo as write_demo
from ._settings import Settings

_Path = str | PathLike[str]
_Row = Mapping[str, Any] | str
_Rows = _Path | Iterable[_Row]
_Reward = str | Callable[..., Any]
_Factory = Callable[[], Any]

class GRPOConfig:
    output_dir: PathLike[str]
    disable_tqdm: bool
    settings: dict[str, Any]
    def __init__(self, output_dir: _Path = ..., *, disable_tqdm: bool = ..., **settings: Unpack[Settings]) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...
    @staticmethod
    def describe(name: str) -> str: ...
    @classmethod
    def of(cls, args: Any) -> Self: ...

class SFTConfig(GRPOConfig): ...

class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, Any]

class GRPOTrainer:
    args: GRPOConfig
    state: SimpleNamespace
    control: Any
    @property
    def callbacks(self) -> list[Any]: ...
    @property
    def evaluates(self) -> bool: ...
    def __init__(
        self,
        model: _Path,
        reward_funcs: _Reward | Sequence[_Reward] | None = ...,
        args: Any = ...,
        train_dataset: _Rows | None = ...,
        eval_dataset: _Rows | None = ...,
        callbacks: Sequence[Any] | None = ...,
        peft_config: Any = ...,
        processing_class: Any = ...,
        tools: Sequence[Callable[..., Any]] | None = ...,
        environment_factory: _Factory | Mapping[str, _Factory] | None = ...,
    ) -> None: ...
    def train(self, resume_from_checkpoint: bool | str | None = ...) -> TrainOutput: ...
    @property
    def model(self) -> Model: ...

class SFTTrainer(GRPOTrainer):
    def __init__(
        self,
        model: _Path,
        args: Any = ...,
        train_dataset: _Rows | None = ...,
        eval_dataset: _Rows | None = ...,
        callbacks: Sequence[Any] | None = ...,
        peft_config: Any = ...,
        processing_class: Any = ...,
    ) -> None: ...

class Model:
    def __init__(self, path: _Path, **settings: Unpack[Settings]) -> None: ...
    @classmethod
    def load(cls, path: _Path, **settings: Unpack[Settings]) -> Self: ...
    def generate(self, rows: Iterable[_Row], **settings: Unpack[Settings]) -> list[list[dict[str, Any]]]: ...
    def score(self, row: _Row, completions: Iterable[str], **settings: Unpack[Settings]) -> list[list[float]]: ...
    def save(self, directory: _Path) -> None: ...

def evaluate(
    model: _Path,
    dataset: _Rows,
    reward_funcs: _Reward | Sequence[_Reward] | None = ...,
    tools: Sequence[Callable[..., Any]] | None = ...,
    environment_factory: _Factory | Mapping[str, _Factory] | None = ...,
    **settings: Unpack[Settings],
) -> dict[str, Any]: ...
def plan(trainer: GRPOTrainer) -> dict[str, Any]: ...
