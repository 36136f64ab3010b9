//! Input and output of commands, and the workload of `bench`.

use super::*;
use crate::names::words;
use crate::run::Workload;
use crate::{Keep, Settings};
use Kind::{Bool, Choice, Path, Text, Texts};
use verb::Verb::{Completions, Convert, DataConvert, Diagnose, Init, Man, Push, Report, Translate, Watch};

/// Returns the datasets that `data convert` reads.
fn conversions() -> Vec<(&'static str, &'static str)> {
    vec![
        ("vivqa-x", "the JSON files of ViVQA-X"),
        ("parquet", "a Hugging Face table, with its media as files"),
    ]
}

/// Returns the shells that `completions` supports.
fn shells() -> Vec<(&'static str, &'static str)> {
    vec![
        ("bash", "eval \"$(omnigrpo completions bash)\" in ~/.bashrc"),
        ("zsh", "as a file _omnigrpo in a directory of fpath"),
        ("fish", "as ~/.config/fish/completions/omnigrpo.fish"),
        ("elvish", "eval (omnigrpo completions elvish | slurp) in rc.elv"),
        ("powershell", "omnigrpo completions powershell | Out-String | Invoke-Expression in $PROFILE"),
    ]
}

fn no_prompt(s: &Settings, _: Verb) -> Option<&'static str> {
    s.io.prompt.is_none().then_some("there is no `prompt`")
}

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("dataset_format", Choice(conversions), at!(io.dataset_format), &[DataConvert])
        .help("Dataset to convert from.")
        .unset("")
        .required(&[DataConvert])
        .positional(),
    row("shell", Choice(shells), at!(io.shell), &[Completions])
        .help("Shell that runs the script.")
        .unset("")
        .required(&[Completions])
        .positional(),
    row("gguf_file", Path, at!(io.gguf_file), &[Convert])
        .help(
            "GGUF file of a text model (`qwen2`, `qwen3` or `llama`), with values of F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q5_0, Q4_K, Q4_1 \
             or Q4_0.",
        )
        .unset("")
        .required(&[Convert])
        .positional(),
    row("directory", Path, at!(io.directory), &[Push, Man, Convert])
        .help(
            "For `push`, the run directory, checkpoint or adapter to push. For `man`, the directory to write \
             to, created if it is missing; `man -l DIR/omnigrpo-train.1` shows a page. For `convert`, the checkpoint \
             directory to write, new or empty.",
        )
        .unset("")
        .required(&[Push, Man, Convert])
        .positional(),
    row("checkpoint", Text, at!(model.name), &[Serve])
        .help("Checkpoint or run directory to serve, or the name of a model on the hub.")
        .unset("")
        .required(&[Serve])
        .positional(),
    row("port", int(0, 65_535), at!(serve.port), &[Serve]).help("Port on `host`; 0 takes a free one."),
    row("served_model_name", Text, at!(serve.name), &[Serve])
        .help("Name of the model in requests and responses.")
        .unset("`checkpoint` as it is given"),
    row("run_dirs", Texts, at!(io.run_dirs), &[Watch, Report, Diagnose])
        .help(
            "Run directories. `watch`, `report` and `diagnose` also take a directory of run directories. `watch` \
             draws several runs in the same charts.",
        )
        .unset("")
        .required(&[Watch, Report, Diagnose])
        .positional(),
    row("script", Path, at!(io.script), &[Translate])
        .help(
            "Launch script of a shell, training script in Python (`.py`), or file of settings (`.yaml`) of another \
             trainer. It is read and never run.",
        )
        .unset("")
        .required(&[Translate])
        .positional(),
    row("strict", Bool, at!(io.strict), &[Translate])
        .help("Exit with status 1 if a setting that changes training has no counterpart. The file is written in any case."),
    row("input", Path, at!(io.input), &[Generate, Score, DataConvert, RewardsRun, RewardsTry])
        .help(
            "Rows to read, in any format that `data check` reads; `-` is standard input, and a run directory \
             stands for its rollouts. `score`, `rewards run` and `rewards try` need `completions` in each row.",
        )
        .unset("")
        .required(&[Score, DataConvert, RewardsRun])
        .idle(|s, _| s.io.prompt.is_some().then_some("`prompt` asks a single question")),
    row("output", Path, at!(io.output), &[Generate, Score, Eval, DataConvert, RewardsRun, Init, Translate])
        .help(
            "File to write, one JSON object per row; for `init` and `translate`, a file of settings. It is written \
             completely or not at all.",
        )
        .unset("nothing is written; `init` writes omnigrpo.yaml, `translate` to standard output")
        .required(&[Score, DataConvert, RewardsRun])
        .free(Verb::ALL)
        .idle(|s, verb| {
            (verb == Generate && s.io.prompt.is_some())
                .then_some("the answer to `prompt` goes to the terminal")
        }),
    row(
        "keep",
        Text,
        Place {
            field: "io.keep",
            set: |s, v| {
                s.io.keep = Some(Keep::parse(&take::<String>(v)?)?);
                Ok(())
            },
            get: |_| None,
        },
        &[RewardsRun],
    )
    .help(
        "Write rows for `sft` instead of scores: the best completion of each row (`best`), every completion \
             that counts as right (`passed`, see `accuracy_threshold`), or every completion whose reward is at \
             least this number.",
    )
    .unset("every row with its scores"),
    row("prompt", Text, at!(io.prompt), &[Generate])
        .help("Question to answer on the terminal, instead of rows from `--input`.")
        .unset(""),
    row("image", Texts, at!(io.image), &[Generate])
        .help("Image of `--prompt`, a file or an address. Repeat the flag or list several, in order.")
        .idle(no_prompt),
    row("video", Texts, at!(io.video), &[Generate])
        .help("Video of `--prompt`: a file, a GIF or a directory of frames. Repeat the flag or list several.")
        .idle(no_prompt),
    row("audio", Texts, at!(io.audio), &[Generate])
        .help(
            "Sound of `--prompt`: a sound file, or a video file for its audio track. Repeat the flag or list \
             several.",
        )
        .idle(no_prompt),
    row("row", int(0, MANY), at!(io.row), &[DataShow, RewardsTry]).help("First row to show, counted from 0 over all files."),
    row("num_rows", int(1, COUNT), at!(io.num_rows), &[DataShow, RewardsTry])
        .help("Rows to show.")
        .per_verb(&[(RewardsTry, "3")]),
    row(
        "workload",
        Choice(words::<Workload>),
        at!(bench.workload),
        BENCH,
    )
    .help(
        "Step to measure. Another one than `own` has lengths of completions with the mean `completion_tokens`, and runs on any \
         `device`; the settings of its sizes change it.",
    ),
    row("num_images", int(0, COUNT), at!(bench.num_images), BENCH).of_media()
        .help("Number of images per prompt; a model that reads text only has none."),
    row("image_px", int(28, 16_384), at!(bench.image_px), BENCH)
        .of_media()
        .help("Width and height of each image, pixels."),
    row("prompt_tokens", int(1, COUNT), at!(bench.prompt_tokens), BENCH).help(
        "Number of tokens per prompt without those of its images; at least those of the chat template.",
    ),
    row("completion_tokens", int(2, COUNT), at!(bench.completion_tokens), BENCH)
        .help("Number of tokens per completion."),
    row("num_prompts", int(1, COUNT), at!(bench.num_prompts), BENCH).help("Number of prompts per step."),
    row("num_steps", int(1, COUNT), at!(bench.num_steps), BENCH)
        .help("Number of steps to measure, after a first step that is not measured; the result is the median."),
    row("json", Path, at!(io.json), &[Train, Sft, Bench, Diagnose])
        .help("File for the numbers of `bench` or `plan`, as JSON. `diagnose RUN --json` prints the verdict as JSON, and `--json=FILE` writes it to a file.")
        .alone(&[(Diagnose, "-")])
        .unset("nothing is written")
        .free(TUNES)
        .idle(|s, verb| (!matches!(verb, Bench | Diagnose) && !s.io.dry_run).then_some("only `plan` and `--dry_run` write it")),
];
