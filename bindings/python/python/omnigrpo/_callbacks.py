"""Callbacks of `transformers`: their events, and the flags of `control` that they set."""

import warnings

from ._identity import is_own

# Events that this trainer has no place for.
_NEVER = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_prediction_step", "on_predict", "on_push_begin")
_FLAGS = ("should_training_stop", "should_log", "should_save", "should_evaluate")


class Control:
    """The flags by which callbacks ask for something. Each one is obeyed after the present step; `should_log` always is."""

    def __init__(self):
        self.__dict__.update(dict.fromkeys(_FLAGS, False))

    def __setattr__(self, name, value):
        if name not in _FLAGS and value:
            raise AttributeError(f"a callback has set control.{name}, which is unsupported; expected one of {', '.join(_FLAGS)}")
        self.__dict__[name] = value

    def __getattr__(self, name):
        if name.startswith("should_"):
            return False
        raise AttributeError(name)

    def take(self):
        """Return what is asked for, and forget it."""
        asked = {"stop": self.should_training_stop, "save": self.should_save, "evaluate": self.should_evaluate}
        self.should_save = self.should_evaluate = self.should_log = False
        return {name: bool(value) for name, value in asked.items()}


class Callbacks:
    """The callbacks of a trainer."""

    def __init__(self, callbacks):
        self.own = [callback() if isinstance(callback, type) else callback for callback in callbacks or []]
        never = [(type(one), name) for one in self.own for name in _NEVER if _defines(type(one), name)]
        lost = [f"{kind.__name__}.{name}" for kind, name in never if is_own(kind)]
        if lost:
            raise TypeError(f"these events of callbacks never come: {', '.join(lost)}; expected on_step_begin or on_step_end in their place")
        if never:
            # Callbacks of packages serve several trainers.
            names = ", ".join(f"{kind.__name__}.{name}" for kind, name in never)
            warnings.warn(f"these events of callbacks never come: {names}", stacklevel=4)

    def call(self, trainer, event, **kwargs):
        for callback in self.own:
            method = getattr(callback, event, None)
            returned = method(trainer.args, trainer.state, trainer.control, model=None, **kwargs) if method is not None else None
            if returned is not None and returned is not trainer.control:
                for name, value in getattr(returned, "__dict__", {}).items():
                    if name.startswith("should_") and value:
                        setattr(trainer.control, name, value)


def _defines(kind, name):
    """Return whether a class of the user defines a method."""
    return any(name in vars(base) and base.__module__.partition(".")[0] != "transformers" for base in kind.__mro__)
