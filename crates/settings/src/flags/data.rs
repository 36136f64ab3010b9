//! Sources of rows.

use super::*;
use crate::names::{AllowUrls, words};
use crate::{Settings, is_on_hub};
use Kind::{Bool, Choice, Fraction, Path, Paths, Text, Words};
use omnigrpo_data::Curriculum;
use omnigrpo_models::MissingAudio;

fn one_pass(s: &Settings) -> Option<&'static str> {
    (s.run.max_steps.is_none() && s.run.num_epochs <= 1.0).then_some("there is one pass over the data")
}

fn no_splits(s: &Settings) -> Option<&'static str> {
    let mut files = s.data.train_file.iter().chain(&s.data.eval_file);
    (!files.any(|file| is_on_hub(file) || file.is_dir()))
        .then_some("neither `train_file` nor `eval_file` names a dataset of the hub or a folder")
}

/// Flags of this section.
pub const FLAGS: &[Flag] = &[
    row("train_file", Paths(&[',']), at!(data.train_file), TRAIN_ROWS)
        .help(
            "JSON, JSONL, CSV, TSV or parquet files of training rows, a folder of tables or of media, or the name of a dataset \
             on the hub with tables (`ORG/NAME`), which is fetched if the local cache lacks it.",
        )
        .free(LOOP)
        .per_rank(),
    row("dataset_config", Text, at!(data.config), EVAL_ROWS)
        .help("Configuration (subset) of a dataset on the hub or in a folder.")
        .unset("`default`, or the only one")
        .idle(|s, _| no_splits(s)),
    row("dataset_train_split", Text, at!(data.train_split), TRAIN_ROWS)
        .help("Split of the hub dataset or folder in `--train_file`.")
        .idle(|s, _| no_splits(s)),
    row("dataset_test_split", Text, at!(data.test_split), EVAL_ROWS)
        .help("Split of the hub dataset or folder in `--eval_file`.")
        .idle(|s, _| no_splits(s)),
    row("dataset_use", Words, at!(data.dataset_use), TRAIN_ROWS)
        .help(
            "Dataset names from the registry, with optional shares: `a%50,b`. A name that contains \"no_think\" \
             turns thinking off for its rows.",
        )
        .idle(|s, _| {
            (!s.data.train_file.is_empty() || !s.data.data_file_paths.is_empty())
                .then_some("the training data are given as files")
        }),
    row("dataset_registry", Path, at!(data.registry), EVAL_ROWS)
        .help("YAML or JSON file that maps dataset names to annotation files and media roots.")
        .unset("dataset_registry.yaml, if it is in the working directory")
        .free(LOOP)
        .idle(|s, _| {
            (s.data.dataset_use.is_empty() && s.data.eval_dataset_use.is_empty())
                .then_some("neither `dataset_use` nor `eval_dataset_use` names a dataset")
        })
        .per_rank(),
    row("data_file_paths", Paths(&[',', ':']), at!(data.data_file_paths), TRAIN_ROWS)
        .help("Training files with one image folder each, joined by colons, as VLM-R1 writes them.")
        .alias(&["data_paths"])
        .free(LOOP)
        .idle(|s, _| (!s.data.train_file.is_empty()).then_some("`train_file` gives the training data"))
        .per_rank(),
    row("filter_low", float(-BIG, BIG), at!(run.rows.lessons.low), GRPO)
        .help("Skip rows whose completions earned less than this on average in the previous pass.")
        .unset("off")
        .idle(|s, _| one_pass(s)),
    row("filter_high", float(-BIG, BIG), at!(run.rows.lessons.high), GRPO)
        .help("Skip rows whose completions earned more than this on average in the previous pass.")
        .unset("off")
        .idle(|s, _| one_pass(s)),
    row("curriculum", Choice(words::<Curriculum>), at!(run.rows.lessons.curriculum), GRPO)
        .help("Order of the rows in a pass, by the rewards that they earned in the previous pass.")
        .idle(|s, _| one_pass(s)),
    row("eval_file", Paths(&[',']), at!(data.eval_file), EVAL_ROWS)
        .help("Files or a folder of evaluation rows, or the name of a dataset on the hub, as `train_file` takes them.")
        .free(LOOP)
        .per_rank(),
    row("eval_dataset_use", Words, at!(data.eval_dataset_use), EVAL_ROWS)
        .help("Registry names of evaluation data, as in `--dataset_use`.")
        .free(LOOP)
        .idle(|s, _| (!s.data.eval_file.is_empty()).then_some("`eval_file` gives the evaluation data")),
    row("val_split_ratio", Fraction, at!(data.val_split_ratio), PERIODIC)
        .help("Share of the training rows held out for evaluation, chosen by the data seed.")
        .idle(|s, _| {
            (!s.data.eval_file.is_empty() || !s.data.eval_dataset_use.is_empty())
                .then_some("the evaluation data are given")
        }),
    row("prompt_column", Text, at!(read.columns.prompt), READS_ROWS)
        .help(
            "Column with the prompt: a text or a list of messages. Dots lead into objects, here and in the \
             other column settings.",
        )
        .alias(&["prompt_key"])
        .unset("by the row's format"),
    row("solution_column", Text, at!(read.columns.solution), READS_ROWS)
        .help(
            "Column with the ground truth; no other column is used in its place. verl's \
             `reward_model.ground_truth` is found without it.",
        )
        .alias(&["answer_key"])
        .unset("`solution`, `answer`, …, the final turn"),
    row("question", Text, at!(read.question), READS_ROWS)
        .help("Question of the rows that have none, such as those of a table of pictures and labels.")
        .unset("a row without a question is an error"),
    row("image_column", Text, at!(read.columns.image), READS_ROWS)
        .of_media()
        .help("Column with the images.")
        .alias(&["image_key"])
        .unset("`image` or `images`"),
    row("video_column", Text, at!(read.columns.video), READS_ROWS)
        .of_media()
        .help("Column with the videos.")
        .alias(&["video_key"])
        .unset("`video` or `videos`"),
    row("audio_column", Text, at!(read.columns.audio), READS_ROWS)
        .of_media()
        .help("Column with the sounds.")
        .alias(&["audio_key"])
        .unset("`audio` or `audios`"),
    row("image_folders", Paths(&[',', ':']), at!(data.roots.images), READS_ROWS)
        .of_media()
        .help("Directories that relative image paths start from, joined by colons. A path that leaves its \
             directory is refused.")
        .per_rank(),
    row("video_folders", Paths(&[',', ':']), at!(data.roots.videos), READS_ROWS).of_media()
        .help("Directories that relative video paths start from.")
        .per_rank(),
    row("audio_folders", Paths(&[',', ':']), at!(data.roots.audios), READS_ROWS).of_media()
        .help("Directories that relative audio paths start from.")
        .per_rank(),
    row("continue_text_prompts", Bool, at!(read.continue_text_prompts), READS_ROWS)
        .help(
            "Let the model continue a `prompt` that is a text as it stands, as TRL does, without the chat template. Rewards then get \
             texts instead of messages. Rows with media or tools keep the template.",
        )
        .idle(|s, _| {
            let system = s.prompts.render.system.is_some().then_some("`system_prompt` makes a conversation of every prompt");
            system.or_else(|| s.turns.environment.is_some().then_some("`environment` makes a conversation of every prompt"))
        }),
    row("use_audio_in_video", Bool, at!(read.use_audio_in_video), ROWS).of_media()
        .help(
        "Also read the audio track of each video, in rows that do not name a sound. Rows that mention `<audio>` \
         without listing a sound always do this.",
    ),
    row("missing_audio", Choice(words::<MissingAudio>), at!(prompts.media.missing_audio), ROWS).of_media()
        .help(
        "What to do when a file has no audio track: a bad row (error), or silence.",
    ),
    row("allow_urls", Choice(words::<AllowUrls>), at!(data.allow_urls), FETCHES)
        .of_media()
        .help(
            "Hosts from which media with an http(s) address may be fetched. Each is fetched once into the \
             cache; `data:` addresses are always allowed.",
        )
        .free(LOOP),
    row("media_timeout_secs", float(0.01, 86_400.0), at!(prompts.media.limits.timeout), ROWS)
        .of_media()
        .help("Time limit for reading one medium, seconds; a row that exceeds it is bad.")
        .free(Verb::ALL),
    row("mm_processor_cache_gb", float(0.0, BIG), at!(data.mm_processor_cache_gb), CACHES)
        .of_media()
        .help(
            "GiB of memory for decoded media, so that later passes over the data do not decode them again; at \
             most the memory that the run leaves free. 0 decodes them in each pass.",
        )
        .unset("a quarter of what the run leaves free, at most 4")
        .free(Verb::ALL)
        .per_rank(),
    row("allow_text_only", Bool, at!(run.rows.text_only), &[Train, Sft, DataCheck])
        .help(
            "Accept training rows that are all text, although the model sees or hears, and columns that look like \
             media and are not read.",
        )
        .free(Verb::ALL),
    row("strict_media", Bool, at!(run.rows.skip.strict), BAD_ROWS)
        .help("Stop at the first bad row instead of skipping it.")
        .free(Verb::ALL),
    row("max_skipped", Fraction, at!(run.rows.skip.max_share), BAD_ROWS)
        .help(
            "Share of bad rows above which the run stops. A broken dataset should not look like a small one.",
        )
        .free(Verb::ALL)
        .idle(|s, _| s.run.rows.skip.strict.then_some("`strict_media` stops at the first bad row")),
    row("skip_data_check", Bool, at!(data.skip_check), &[Train, Sft])
        .help("Start without first reading every row and every medium header.")
        .free(LOOP),
];
