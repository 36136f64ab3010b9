# Sends the lines of JSON that arrive on stdin to the package that the first argument names: wandb or trackio.
import hashlib
import importlib
import json
import os
import socket
import sys
import traceback

name = sys.argv[1]
try:
    package = importlib.import_module(name)
except ImportError:
    sys.exit(f"the Python package `{name}` is not installed for {sys.executable}: `pip install {name}`")


# This process gets a low priority, so that it does not slow the run.
if hasattr(os, "nice"):
    os.nice(10)


def log(run, step, values):
    if name == "trackio":
        run.log(values, step=step)
    else:
        run.log({**values, "train/global_step": step})


def table(columns, data):
    if name == "trackio":
        # Older versions need pandas and ignore columns; newer ones do not install pandas.
        try:
            import pandas
        except ImportError:
            pass
        else:
            return package.Table(dataframe=pandas.DataFrame(data, columns=columns))
    return package.Table(columns=columns, data=data)


def follow():
    run = None
    for line in sys.stdin:
        told = json.loads(line)
        if "init" in told:
            init = told["init"]
            given = dict(
                project=os.environ.get(f"{name.upper()}_PROJECT") or "omnigrpo",
                name=init["name"] or os.environ.get(f"{name.upper()}_NAME") or init["directory_name"],
                config=init["config"],
            )
            if name == "trackio":
                # A run that resumes continues the latest run of its name, so each folder has a name of its own.
                if given["name"] == init["directory_name"]:
                    place = f"{socket.gethostname()}:{os.path.abspath(init['dir'])}"
                    given["name"] += "-" + hashlib.sha256(place.encode()).hexdigest()[:6]
                run = package.init(**given, resume="allow" if init["resumes"] else "never", embed=False)
            else:
                run = package.init(
                    **given, dir=init["dir"], tags=["grpo", "multimodal"], settings=package.Settings(console="off")
                )
                # Each row contains its step, because an evaluation and a window may have the same step.
                run.define_metric("*", step_metric="train/global_step")
        elif "metrics" in told:
            log(run, told["step"], told["metrics"])
        elif "completions" in told:
            rows = told["completions"]
            names = sorted({name for row in rows for name in row["rewards"]})
            # A column of a table has a single type.
            kinds = ["image", "video", "audio"]
            columns, data = ["step", "id", *kinds, "prompt", "completion", "reward", "advantage", *names], []
            for row in rows:
                shown = dict.fromkeys(kinds)
                for medium in row["media"]:
                    kind = medium["type"].split("/")[0]
                    form = medium["path"].rsplit(".", 1)[-1].lower()
                    if medium["type"] == "image/gif" or (kind == "video" and form in ("mp4", "gif", "webm", "ogg")):
                        shown["video"] = package.Video(medium["path"], format="gif" if medium["type"] == "image/gif" else form)
                    elif kind == "image":
                        shown["image"] = package.Image(medium["path"])
                    elif kind == "audio":
                        shown["audio"] = package.Audio(medium["path"])
                rewards = [row["rewards"].get(name) for name in names]
                data.append([told["step"], row["id"], *shown.values(), row["prompt"], row["completion"], row["reward"], row["advantage"], *rewards])
            log(run, told["step"], {"completions": table(columns, data)})
    if run is not None:
        run.finish()


try:
    follow()
except Exception as error:
    traceback.print_exc()
    # The run shows the last line as the reason for the failure.
    sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
