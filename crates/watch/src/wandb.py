# Sends the lines of JSON that arrive on stdin to Weights & Biases.
import json
import os
import sys
import traceback

try:
    import wandb
except ImportError:
    sys.exit("the Python package `wandb` is not installed for this Python: `pip install wandb`")


# This process gets a low priority, so that it does not slow the run.
if hasattr(os, "nice"):
    os.nice(10)


def follow():
    run = None
    for line in sys.stdin:
        told = json.loads(line)
        if "init" in told:
            init = told["init"]
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "omnigrpo",
                name=init["name"] or os.environ.get("WANDB_NAME") or init["directory_name"],
                dir=init["dir"],
                config=init["config"],
                tags=["grpo", "multimodal"],
                settings=wandb.Settings(console="off"),
            )
            # Each row contains its step, because an evaluation and a window may have the same step.
            run.define_metric("*", step_metric="train/global_step")
        elif "metrics" in told:
            run.log({**told["metrics"], "train/global_step": told["step"]})
        elif "completions" in told:
            rows = told["completions"]
            names = sorted({name for row in rows for name in row["rewards"]})
            # A column of a table has a single type.
            kinds = ["image", "video", "audio"]
            table = wandb.Table(columns=["step", "id", *kinds, "prompt", "completion", "reward", "advantage", *names])
            for row in rows:
                shown = dict.fromkeys(kinds)
                for medium in row["media"]:
                    kind = medium["type"].split("/")[0]
                    form = medium["path"].rsplit(".", 1)[-1].lower()
                    if medium["type"] == "image/gif" or (kind == "video" and form in ("mp4", "gif", "webm", "ogg")):
                        shown["video"] = wandb.Video(medium["path"], format="gif" if medium["type"] == "image/gif" else form)
                    elif kind == "image":
                        shown["image"] = wandb.Image(medium["path"])
                    elif kind == "audio":
                        shown["audio"] = wandb.Audio(medium["path"])
                rewards = [row["rewards"].get(name) for name in names]
                table.add_data(told["step"], row["id"], *shown.values(), row["prompt"], row["completion"], row["reward"], row["advantage"], *rewards)
            run.log({"completions": table, "train/global_step": told["step"]})
    if run is not None:
        run.finish()


try:
    follow()
except Exception as error:
    traceback.print_exc()
    # The run shows the last line as the reason for the failure.
    sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
