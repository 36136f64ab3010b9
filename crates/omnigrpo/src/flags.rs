//! The table of flags: one row per setting.
//!
//! The parser, `--help`, the keys of `--config` files and presets, `--print_config`, `docs/flags.md` and "did you
//! mean" all read this table. Names are those of `transformers` and TRL with underscores; the names of the source
//! systems are aliases. A row is read exactly once, in `settings.rs`, and a test fails if it is not.

use omnigrpo_data::QuestionTemplate;
use omnigrpo_grpo::{AdvantageKind, Aggregation, Kl, RatioLevel, Recipe};
use omnigrpo_rewards::{AccuracyMode, AnswerPolicy, Compat, FormatMode};

use crate::settings::{
    AllowUrls, EvalStrategy, FrameSampling, Layout, LrScheduler, MissingAudio, MultiObjective, PromptForm,
    SaveStrategy, ScaleRewards, ThinkMode, TorchDtype, Tracker, words,
};

/// A command of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// GRPO training.
    Train,
    /// Supervised fine-tuning.
    Sft,
    /// Completions for rows or for one prompt.
    Generate,
    /// Log-probabilities of given completions.
    Score,
    /// Evaluation on a dataset.
    Eval,
    /// Reads every row and medium header and reports problems.
    DataCheck,
    /// Prints what the model will see of a row.
    DataShow,
    /// Rewrites a published dataset as rows.
    DataConvert,
    /// Lists the reward functions.
    RewardsList,
    /// Scores rows that carry completions.
    RewardsRun,
    /// Writes a checkpoint in another form.
    Export,
    /// Checks the machine.
    Doctor,
    /// Trains the embedded model on the generated task.
    Demo,
    /// Measures a step of a random model.
    Bench,
    /// Serves runs as a page.
    Watch,
    /// Writes a run as one file.
    Report,
    /// Writes a shell's completion script.
    Completions,
    /// Writes the manual pages.
    Man,
}

use Verb::{
    Bench, Completions, DataCheck, DataConvert, DataShow, Demo, Doctor, Eval, Export, Generate, Man, Report,
    RewardsList, RewardsRun, Score, Sft, Train, Watch,
};

impl Verb {
    /// Every verb, in the order of the help; those without settings worth a file are the last four.
    pub const ALL: &'static [Self] = &[
        Train,
        Sft,
        Generate,
        Score,
        Eval,
        DataCheck,
        DataShow,
        DataConvert,
        RewardsList,
        RewardsRun,
        Export,
        Doctor,
        Demo,
        Bench,
        Watch,
        Report,
        Completions,
        Man,
    ];

    /// The words that name the verb on the command line.
    pub const fn words(self) -> &'static [&'static str] {
        match self {
            Train => &["train"],
            Sft => &["sft"],
            Generate => &["generate"],
            Score => &["score"],
            Eval => &["eval"],
            DataCheck => &["data", "check"],
            DataShow => &["data", "show"],
            DataConvert => &["data", "convert"],
            RewardsList => &["rewards", "list"],
            RewardsRun => &["rewards", "run"],
            Export => &["export"],
            Doctor => &["doctor"],
            Demo => &["demo"],
            Bench => &["bench"],
            Watch => &["watch"],
            Report => &["report"],
            Completions => &["completions"],
            Man => &["man"],
        }
    }

    /// The verb as typed, e.g. `data check`.
    pub fn name(self) -> String {
        self.words().join(" ")
    }

    /// One line for the help.
    pub const fn about(self) -> &'static str {
        match self {
            Train => {
                "Train a checkpoint with GRPO: sample a group of answers per question, score them, improve"
            }
            Sft => "Fine-tune a checkpoint on the answers a dataset gives",
            Generate => "Write completions for rows of a file, or for one prompt on the terminal",
            Score => "Write the log-probability of every token of given completions",
            Eval => "Evaluate a checkpoint on a dataset: rewards, accuracy, tables per category",
            DataCheck => "Read every row and medium header; report all problems and the longest prompts",
            DataShow => "Print the rendered prompt, frame times, sizes and token counts of a row",
            DataConvert => "Convert a published dataset to rows this program reads",
            RewardsList => "List the reward functions with their ranges and sources",
            RewardsRun => "Score rows that carry completions with reward functions",
            Export => "Write a checkpoint in another form: an adapter merged into it, another layout",
            Doctor => "Check this machine and, if given, a checkpoint directory",
            Demo => "Train the embedded small model on a generated visual task and show before and after",
            Bench => "Measure a training step of a random model beside what this machine can do",
            Watch => {
                "Show runs as a page on this machine: curves, completions, evaluations, live while they train"
            }
            Report => "Write a run as one HTML file to hand around, and its curves as SVG",
            Completions => "Print the completion script of a shell",
            Man => "Write the manual pages into a directory",
        }
    }
}

/// Names and their help.
pub type Names = fn() -> Vec<(&'static str, &'static str)>;

/// What a setting holds, and how text becomes it.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `--flag`, or true, false, yes, no, 1, 0.
    Bool,
    /// A whole number within bounds, both included.
    Int { min: i64, max: i64 },
    /// A finite number within bounds, both included.
    Float { min: f64, max: f64 },
    /// A share of 1, written `0.05` or `5%`.
    Fraction,
    /// Any text.
    Text,
    /// A file or directory.
    Path,
    /// One of the names.
    Choice(Names),
    /// Several of the names; spaces or commas between them.
    Choices(Names),
    /// Words; spaces or commas between them.
    Words,
    /// Numbers; spaces or commas between them.
    Floats,
    /// Paths; spaces (several arguments), commas or colons between them.
    Paths,
    /// Names of rewards as `Words`, but a program (`cmd:…`) or an address (`http://…`) is kept whole.
    Specs,
    /// Texts taken whole, one per argument.
    Texts,
    /// A JSON object, or a mapping in YAML.
    Object,
}

impl Kind {
    /// True if several values may be given.
    pub const fn is_list(&self) -> bool {
        matches!(
            self,
            Self::Choices(_) | Self::Words | Self::Floats | Self::Paths | Self::Specs | Self::Texts
        )
    }
}

/// The value of a setting nobody gave.
#[derive(Clone, Copy, Debug)]
pub enum Fallback {
    /// This text, read as the flag's value would be.
    Is(&'static str),
    /// No value; the words say what happens then.
    Unset(&'static str),
}

/// A heading of the help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// What the verb reads and writes.
    Io,
    /// The checkpoint and its precision.
    Model,
    /// Where rows come from.
    Data,
    /// How images and videos are sized and sampled.
    Media,
    /// How rows become prompts.
    Prompt,
    /// How completions are scored.
    Rewards,
    /// How completions are sampled.
    Rollout,
    /// The GRPO objective.
    Loss,
    /// What is trained and how fast.
    Optimizer,
    /// Length, checkpoints, resuming.
    Run,
    /// Evaluation.
    Evaluation,
    /// Metrics and console.
    Logging,
    /// The program itself.
    Program,
}

impl Section {
    /// Every section, in the order of the help.
    pub const ALL: &'static [Self] = &[
        Self::Io,
        Self::Model,
        Self::Data,
        Self::Media,
        Self::Prompt,
        Self::Rewards,
        Self::Rollout,
        Self::Loss,
        Self::Optimizer,
        Self::Run,
        Self::Evaluation,
        Self::Logging,
        Self::Program,
    ];

    /// The heading.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Io => "Input and output",
            Self::Model => "Model",
            Self::Data => "Data",
            Self::Media => "Images and videos",
            Self::Prompt => "Prompt",
            Self::Rewards => "Rewards",
            Self::Rollout => "Rollout",
            Self::Loss => "Loss",
            Self::Optimizer => "Optimizer",
            Self::Run => "Run and checkpoints",
            Self::Evaluation => "Evaluation",
            Self::Logging => "Logging",
            Self::Program => "Program",
        }
    }
}

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// Canonical name, with underscores and without dashes in front.
    pub name: &'static str,
    /// Other accepted names.
    pub aliases: &'static [&'static str],
    /// What it holds.
    pub kind: Kind,
    /// Its value when nobody gives one.
    pub default: Fallback,
    /// Other defaults for some verbs.
    pub verb_defaults: &'static [(Verb, &'static str)],
    /// What it does, in which unit, and why.
    pub help: &'static str,
    /// Where the help shows it.
    pub section: Section,
    /// The verbs that take it.
    pub verbs: &'static [Verb],
    /// The verbs that cannot run without it.
    pub required: &'static [Verb],
    /// A word in its place instead of `--name`.
    pub positional: bool,
    /// Meaningful on the command line only, not as a key of a file.
    pub command_line_only: bool,
}

impl Flag {
    /// The default for a verb.
    pub fn default_for(&self, verb: Verb) -> Fallback {
        self.verb_defaults
            .iter()
            .find(|(of, _)| *of == verb)
            .map_or(self.default, |(_, text)| Fallback::Is(text))
    }

    const fn alias(mut self, aliases: &'static [&'static str]) -> Self {
        self.aliases = aliases;
        self
    }

    const fn per_verb(mut self, defaults: &'static [(Verb, &'static str)]) -> Self {
        self.verb_defaults = defaults;
        self
    }

    const fn required(mut self, verbs: &'static [Verb]) -> Self {
        self.required = verbs;
        self
    }

    const fn positional(mut self) -> Self {
        self.positional = true;
        self
    }

    const fn command_line_only(mut self) -> Self {
        self.command_line_only = true;
        self
    }
}

/// The flag of a name or alias; dashes count as underscores.
pub fn find(name: &str) -> Option<&'static Flag> {
    let name = name.replace('-', "_");
    FLAGS.iter().find(|flag| flag.name == name || flag.aliases.contains(&name.as_str()))
}

/// The datasets `data convert` reads.
fn conversions() -> Vec<(&'static str, &'static str)> {
    vec![
        ("vivqa-x", "the JSON files of ViVQA-X"),
        ("parquet", "a Hugging Face table, with its media as files"),
    ]
}

/// The shells `completions` writes for.
fn shells() -> Vec<(&'static str, &'static str)> {
    vec![
        ("bash", "eval \"$(omnigrpo completions bash)\" in ~/.bashrc"),
        ("zsh", "as a file _omnigrpo in a directory of fpath"),
        ("fish", "as ~/.config/fish/completions/omnigrpo.fish"),
        ("elvish", "eval (omnigrpo completions elvish | slurp) in rc.elv"),
        ("powershell", "omnigrpo completions powershell | Out-String | Invoke-Expression in $PROFILE"),
    ]
}

const fn row(
    name: &'static str,
    kind: Kind,
    default: Fallback,
    section: Section,
    verbs: &'static [Verb],
    help: &'static str,
) -> Flag {
    Flag {
        name,
        aliases: &[],
        kind,
        default,
        verb_defaults: &[],
        help,
        section,
        verbs,
        required: &[],
        positional: false,
        command_line_only: false,
    }
}

use Fallback::{Is, Unset};
use Kind::{
    Bool, Choice, Choices, Float, Floats, Fraction, Int, Object, Path, Paths, Specs, Text, Texts, Words,
};

const fn int(min: i64, max: i64) -> Kind {
    Int { min, max }
}

const fn float(min: f64, max: f64) -> Kind {
    Float { min, max }
}

/// The bound of sizes and counts that have no natural one: far above use, below overflow.
const MANY: i64 = 1 << 40;
/// The bound of counts held in 32 bits.
const COUNT: i64 = 1 << 30;
/// The bound of rates and weights that have no natural one.
const BIG: f64 = 1e9;

/// Verbs with settings worth a file: all but the last ones, which show runs or write files for shells.
const SET: &[Verb] = Verb::ALL.split_at(Verb::ALL.len() - 4).0;
/// Verbs that load a model, or its processor if it is given.
const MODEL: &[Verb] = &[Train, Sft, Generate, Score, Eval, DataCheck, DataShow, Export, Doctor, Bench];
/// Verbs that run a model.
const RUNS_MODEL: &[Verb] = &[Train, Sft, Generate, Score, Eval, Export, Demo, Bench];
/// Verbs that take a model with an adapter.
const ADAPTED: &[Verb] = &[Train, Sft, Generate, Score, Eval, Export];
/// Verbs that hold a model for use.
const QUANTISED: &[Verb] = &[Train, Sft, Generate, Score, Eval];
/// Verbs that train a model of the user's.
const TUNES: &[Verb] = &[Train, Sft];
/// Verbs that read training rows.
const TRAIN_ROWS: &[Verb] = &[Train, Sft, DataCheck, DataShow];
/// Verbs that read evaluation rows.
const EVAL_ROWS: &[Verb] = &[Train, Sft, Eval, DataCheck, DataShow];
/// Verbs that read rows with media.
const ROWS: &[Verb] = &[Train, Sft, Generate, Score, Eval, DataCheck, DataShow];
/// Verbs that read rows of any format.
const READS_ROWS: &[Verb] = &[Train, Sft, Generate, Score, Eval, DataCheck, DataShow, RewardsRun];
/// Verbs that decide per row what to do with a bad one.
const BAD_ROWS: &[Verb] = &[Train, Sft, Eval];
/// Verbs with the GRPO objective.
const GRPO: &[Verb] = &[Train, Demo];
/// The workload of `bench`.
const BENCH: &[Verb] = &[Bench];
/// Verbs that score completions with rewards.
const REWARDED: &[Verb] = &[Train, Sft, Eval, Demo, RewardsRun];
/// Those, and the one that asks the rewards about rows without completions.
const ASKS_REWARDS: &[Verb] = &[Train, Sft, Eval, DataCheck, Demo, RewardsRun];
/// Verbs that sample.
const SAMPLES: &[Verb] = &[Train, Generate, Eval, Demo];
/// Verbs that read or write completions of bounded length.
const BOUNDED: &[Verb] = &[Train, Sft, Generate, Eval, DataCheck, DataShow, RewardsRun, Demo];
/// Verbs that take optimizer steps.
const STEPS: &[Verb] = &[Train, Sft, Demo];
/// Verbs with anything random.
const RANDOM: &[Verb] = &[Train, Sft, Generate, Eval, RewardsRun, Demo, Bench];
/// Verbs that run the whole loop with checkpoints.
const LOOP: &[Verb] = &[Train, Sft, Demo];
/// Verbs that sum up scored completions.
const SUMS_UP: &[Verb] = &[Train, Sft, Eval, RewardsRun];
/// Verbs that evaluate now and then.
const PERIODIC: &[Verb] = &[Train, Sft];

/// Every setting, by section.
pub const FLAGS: &[Flag] = &[
    // Input and output
    row("format", Choice(conversions), Unset(""), Section::Io, &[DataConvert], "Dataset to convert from.")
        .positional()
        .required(&[DataConvert]),
    row("shell", Choice(shells), Unset(""), Section::Io, &[Completions], "Shell to write for.")
        .positional()
        .required(&[Completions]),
    row("directory", Path, Unset(""), Section::Io, &[Man], "Directory to write into; it is made if it is not there. `man -l DIR/omnigrpo-train.1` shows a page.")
        .positional()
        .required(&[Man]),
    row("run_dirs", Texts, Unset(""), Section::Io, &[Watch, Report], "Run directories. `watch` also takes directories of run directories, and shows several runs on top of each other.")
        .positional()
        .required(&[Watch, Report]),
    row("input", Path, Unset(""), Section::Io, &[Generate, Score, DataConvert, RewardsRun], "Rows to read, in any format `data check` reads, `-` for standard input; `score` and `rewards run` want `completions` in each.")
        .required(&[Score, DataConvert, RewardsRun]),
    row("output", Path, Unset("nothing is written"), Section::Io, &[Generate, Score, Eval, DataConvert, RewardsRun], "File to write, one JSON object per row; written whole or not at all.")
        .required(&[Score, DataConvert, RewardsRun]),
    row("keep", Text, Unset("every row with its scores"), Section::Io, &[RewardsRun], "Write rows for `sft` instead: the best completion of each row (`best`), every one that counts as right (`passed`, see `accuracy_threshold`), or every one whose reward is at least a number."),
    row("prompt", Text, Unset(""), Section::Io, &[Generate], "Question to answer on the terminal instead of rows from `--input`."),
    row("image", Texts, Is(""), Section::Io, &[Generate], "Image of `--prompt`, a file or an address; repeat or list for several, in order."),
    row("video", Texts, Is(""), Section::Io, &[Generate], "Video of `--prompt`: a file, GIF or directory of frames; repeat or list for several."),
    row("audio", Texts, Is(""), Section::Io, &[Generate], "Sound of `--prompt`: a sound file, or a video file for its audio track; repeat or list for several."),
    row("row", int(0, MANY), Is("0"), Section::Io, &[DataShow], "Row to show, counted from 0 over all files."),
    row("num_rows", int(1, COUNT), Is("1"), Section::Io, &[DataShow], "Rows to show from `--row` on."),
    row("num_images", int(0, COUNT), Is("1"), Section::Io, BENCH, "Images of each prompt."),
    row("image_px", int(28, 16_384), Is("448"), Section::Io, BENCH, "Width and height of each image, pixels."),
    row("prompt_tokens", int(1, COUNT), Is("44"), Section::Io, BENCH, "Tokens of each prompt besides those of its images; what the chat template adds is the least."),
    row("completion_tokens", int(2, COUNT), Is("64"), Section::Io, BENCH, "Tokens of each completion."),
    row("num_prompts", int(1, COUNT), Is("1"), Section::Io, BENCH, "Prompts of a step."),
    row("num_steps", int(1, COUNT), Is("3"), Section::Io, BENCH, "Steps to measure, after one that is not; the median counts."),
    row("json", Path, Unset("nothing is written"), Section::Io, BENCH, "File for the same numbers as JSON."),
    // Model
    row("model_name_or_path", Text, Unset(""), Section::Model, MODEL, "Checkpoint directory in the published Hugging Face layout, or the name of a model of the hub; one that is not in the local cache is fetched.")
        .alias(&["model", "model_path"])
        .required(&[Train, Sft, Generate, Score, Eval, Export]),
    row("torch_dtype", Choice(words::<TorchDtype>), Is("auto"), Section::Model, RUNS_MODEL, "Precision of the weights; `auto` takes that of the checkpoint. With bfloat16 the optimizer keeps float32 masters, and products on AMX tiles round activations too.")
        .alias(&["dtype"]),
    row("adapter_name_or_path", Path, Unset("none"), Section::Model, ADAPTED, "LoRA adapter in PEFT's format, made for the checkpoint: training goes on from it, with its rank and scale; other commands use it.")
        .alias(&["adapter_path"]),
    row("merge", Bool, Is("false"), Section::Model, &[Export], "Add the adapter to the weights and write a whole checkpoint."),
    row("layout", Choice(words::<Layout>), Unset("as it is"), Section::Model, &[Export], "Layout to write, for families that are published in two (InternVL)."),
    row("load_in_8bit", Bool, Is("false"), Section::Model, QUANTISED, "Hold frozen linear weights in 8 bits (8.5 with scales), quantised tensor by tensor as they are read. Training then needs adapters."),
    row("load_in_4bit", Bool, Is("false"), Section::Model, QUANTISED, "The same in 4 bits (4.5 with scales): a quarter of bfloat16, with 16 times the rounding error of 8 bits."),
    row("init_weights", int(0, i64::MAX), Unset("the checkpoint's weights"), Section::Model, &[Train, Sft], "Start from random weights with this seed instead; the directory then needs no weight files."),
    row("vision_tower", Text, Unset("config.json's mm_vision_tower"), Section::Model, MODEL, "Directory of a HumanOmni checkpoint's SigLIP tower, or a name in the local Hugging Face cache. Weights in the checkpoint itself win."),
    row("audio_tower", Text, Unset("config.json's mm_audio_tower"), Section::Model, MODEL, "The same for its Whisper encoder."),
    row("bert", Text, Unset("config.json's mm_text_tower, else bert-base-uncased"), Section::Model, MODEL, "The same for the BERT that reads the question; its tokenizer is always taken from here."),
    row("mm_dynamic_compressor", Bool, Unset("config.json's, else false"), Section::Model, MODEL, "Thin out HumanOmni's visual tokens: all frames at half the side, every fourth as it is."),
    row("pure_bf16", Bool, Is("false"), Section::Model, STEPS, "Update bfloat16 weights without float32 masters. Saves memory, but at small learning rates most updates round to nothing."),
    row("max_stream_tokens", int(16, COUNT), Unset("a whole group"), Section::Model, &[Train, Sft, Score, Demo], "Most tokens in one forward pass; a larger group is split over passes that share its prompt, with the same result."),
    row("gradient_checkpointing", Bool, Is("false"), Section::Model, &[Train, Sft, Demo, Bench], "Recompute blocks in the backward pass: less memory, about a third more time."),
    // Data
    row("train_file", Paths, Is(""), Section::Data, TRAIN_ROWS, "JSON, JSONL or parquet files of training rows."),
    row("dataset_use", Words, Is(""), Section::Data, TRAIN_ROWS, "Names from the registry with optional shares: `a%50,b`. A name with \"no_think\" turns thinking off for its rows."),
    row("dataset_registry", Path, Unset("dataset_registry.yaml, if it is in the working directory"), Section::Data, EVAL_ROWS, "YAML or JSON file that maps dataset names to annotation files and media roots."),
    row("data_file_paths", Paths, Is(""), Section::Data, TRAIN_ROWS, "Training files with one image folder each, joined by colons (the form of VLM-R1).")
        .alias(&["data_paths"]),
    row("eval_file", Paths, Is(""), Section::Data, EVAL_ROWS, "JSON, JSONL or parquet files of evaluation rows."),
    row("eval_dataset_use", Words, Is(""), Section::Data, EVAL_ROWS, "Registry names of evaluation data, as in `--dataset_use`."),
    row("val_split_ratio", Fraction, Is("0"), Section::Data, PERIODIC, "Share of the training rows held out for evaluation, chosen by the data seed."),
    row("prompt_column", Text, Unset("by the row's format"), Section::Data, READS_ROWS, "Column with the prompt: a text or a list of messages. A name with dots leads into objects, here and in the next three.")
        .alias(&["prompt_key"]),
    row("solution_column", Text, Unset("`solution`, `answer`, …, the final turn"), Section::Data, READS_ROWS, "Column with the ground truth; no other is then taken for it. `reward_model.ground_truth` is verl's, which is found by itself.")
        .alias(&["answer_key"]),
    row("image_column", Text, Unset("`image` or `images`"), Section::Data, READS_ROWS, "Column with the images.")
        .alias(&["image_key"]),
    row("video_column", Text, Unset("`video` or `videos`"), Section::Data, READS_ROWS, "Column with the videos.")
        .alias(&["video_key"]),
    row("image_folders", Paths, Is(""), Section::Data, READS_ROWS, "Roots of relative image paths, joined by colons; a path that leaves its root is refused."),
    row("video_folders", Paths, Is(""), Section::Data, READS_ROWS, "Roots of relative video paths."),
    row("audio_folders", Paths, Is(""), Section::Data, READS_ROWS, "Roots of relative audio paths."),
    row("use_audio_in_video", Bool, Is("false"), Section::Data, ROWS, "Hear video files too: the audio track of each becomes a medium behind it, in rows that name no sound. Rows that mention `<audio>` and list none mean it anyway."),
    row("missing_audio", Choice(words::<MissingAudio>), Is("error"), Section::Data, ROWS, "What a file without an audio track gives where its sound is asked for: a bad row (error), or silence."),
    row("allow_urls", Choice(words::<AllowUrls>), Is("off"), Section::Data, READS_ROWS, "Whether media may be named by http(s) address, and of which hosts; they are fetched once into the cache. `data:` addresses always may."),
    row("media_timeout_secs", float(0.01, 86_400.0), Is("120"), Section::Data, ROWS, "Seconds that reading one medium may take; the row is bad when they have passed."),
    row("strict_media", Bool, Is("false"), Section::Data, BAD_ROWS, "Stop at the first bad row instead of skipping it."),
    row("max_skipped", Fraction, Is("0.05"), Section::Data, BAD_ROWS, "Share of bad rows above which the run stops: a broken dataset should not look like a small one."),
    row("skip_data_check", Bool, Is("false"), Section::Data, &[Train, Sft], "Start without reading every row and medium header first."),
    // Images and videos
    row("min_pixels", int(1, MANY), Unset("the checkpoint's; 3136 for Qwen"), Section::Media, ROWS, "Fewest pixels of an image after resizing; sets the fewest vision tokens."),
    row("max_pixels", int(1, MANY), Unset("the checkpoint's; 12845056 for Qwen"), Section::Media, ROWS, "Most pixels of an image after resizing; sets the most vision tokens and with them memory and time."),
    row("max_anyres_num", int(1, 1024), Unset("the checkpoint's; 12 for InternVL"), Section::Media, ROWS, "Most tiles of an image, for models that cut images into tiles (InternVL): each costs vision tokens. The whole image comes as one more."),
    row("frame_sampling", Choice(words::<FrameSampling>), Is("qwen_vl_utils"), Section::Media, ROWS, "Rule that picks video frames: by rate (qwen_vl_utils), by interval (base_interval, as qwen-vl-finetune), or per segment from the row's `meta`."),
    row("fps", float(1e-3, 1e3), Is("2.0"), Section::Media, ROWS, "Frames per second to sample from videos."),
    row("nframes", int(1, COUNT), Unset("from `fps`"), Section::Media, ROWS, "Frames per video, instead of a rate."),
    row("video_min_frames", int(1, COUNT), Is("4"), Section::Media, ROWS, "Fewest frames of a video.")
        .alias(&["min_frames"]),
    row("video_max_frames", int(1, COUNT), Is("8"), Section::Media, ROWS, "Most frames of a video; each pair of frames costs vision tokens.")
        .alias(&["max_frames"]),
    row("base_interval", float(1e-3, 1e6), Is("2"), Section::Media, ROWS, "Seconds between frames under `--frame_sampling base_interval`."),
    row("video_min_frame_pixels", int(1, MANY), Unset("the rule's: 100352; base_interval 3136"), Section::Media, ROWS, "Fewest pixels of a video frame after resizing."),
    row("video_max_frame_pixels", int(1, MANY), Unset("the rule's: 602112; base_interval 25088"), Section::Media, ROWS, "Most pixels of a video frame after resizing."),
    row("total_pixels", int(1, MANY), Unset("90316800"), Section::Media, ROWS, "Most pixels of all frames of a video together; lowers the bound per frame of long videos."),
    // Prompt
    row("question_template", Choice(words::<&'static QuestionTemplate>), Is("none"), Section::Prompt, ROWS, "Sentence added to each question that asks for thinking and answer tags."),
    row("prompt_form", Choice(words::<PromptForm>), Unset("config.json's, else sft"), Section::Prompt, ROWS, "How HumanOmni prompts are written: as in its supervised training and inference, or as the original GRPO trainer did."),
    row("system_prompt", Text, Unset("the row's or the template's"), Section::Prompt, ROWS, "System turn for rows that have none."),
    row("chat_template_kwargs", Object, Unset("none"), Section::Prompt, ROWS, "Variables for the chat template, as a JSON object."),
    row("max_prompt_length", int(1, COUNT), Unset("the model's limit"), Section::Prompt, RUNS_ROWS, "Most tokens of a prompt, vision tokens included. A longer one is a bad row; it is never cut, since a cut prompt trains on the wrong question.")
        .alias(&["model_max_length"]),
    // Rewards
    row("reward_funcs", Specs, Is("accuracy,format"), Section::Rewards, ASKS_REWARDS, "Rewards to add up, by name (`rewards list`), as a function of a Python file (`my_rewards.py:mine`), as a program (`cmd:python my_reward.py`) or as an address (`http://…`).")
        .alias(&["rewards"]),
    row("reward_weights", Floats, Is(""), Section::Rewards, REWARDED, "One weight per reward, in the order of `--reward_funcs`; none given means 1 each. A preset's weights go with its rewards by name."),
    row("format_reward_weight", float(-BIG, BIG), Unset("its number in `reward_weights`"), Section::Rewards, REWARDED, "Weight of the reward `format`, wherever it stands in `--reward_funcs`."),
    row("accuracy_reward_weight", float(-BIG, BIG), Unset("its number in `reward_weights`"), Section::Rewards, REWARDED, "Weight of the reward `accuracy`, wherever it stands in `--reward_funcs`."),
    row("format_mode", Choice(words::<FormatMode>), Is("strict"), Section::Rewards, REWARDED, "What the `format` reward wants: exactly one pair of each tag (strict), a graded 0.3 + 0.3 + 0.4, three tags (tags3), or the R1-V pattern (r1v)."),
    row("accuracy_mode", Choices(words::<AccuracyMode>), Is("auto"), Section::Rewards, ASKS_REWARDS, "How `accuracy` (and with it `length` and `cosine`) compares an answer; `auto` looks at the row. Several, also joined by colons, are those of the training files in order. A row's `accu_reward_method` wins.")
        .alias(&["reward_method", "accu_reward_method"]),
    row("answer_policy", Choice(words::<AnswerPolicy>), Is("last"), Section::Rewards, ASKS_REWARDS, "Which answer tag counts if there are several."),
    row("think", Choice(words::<ThinkMode>), Is("auto"), Section::Rewards, REWARDED, "Whether a completion must think first; `auto` decides per dataset by its name."),
    row("multi_objective_aggregation", Choice(words::<MultiObjective>), Is("sum_then_normalize"), Section::Rewards, GRPO, "Normalise the weighted sum, or each reward before the sum."),
    row("temporal_order_bonus", Bool, Is("false"), Section::Rewards, &[Train], "Sample half as many completions again on shuffled frames of videos; right answers that do better with the frames in order earn 0.3 more (T-GRPO)."),
    row("compat", Choices(words::<Compat>), Is(""), Section::Rewards, ASKS_REWARDS, "Known defects of the source systems to reproduce, for comparisons only."),
    row("reward_timeout_secs", float(0.01, 86_400.0), Is("60"), Section::Rewards, REWARDED, "Seconds an external reward may take for a batch before it is restarted."),
    row("reward_workers", int(1, 256), Is("1"), Section::Rewards, REWARDED, "Processes of each external reward program, or requests in flight to an address."),
    row("judge_model", Text, Unset("the server's"), Section::Rewards, REWARDED, "Model that a `judge:http://…` reward asks."),
    row("judge_prompt", Path, Unset("one that asks for a number from 0 to 1"), Section::Rewards, REWARDED, "File with what a `judge:` reward is asked, with `{prompt}`, `{answer}` or `{completion}`, and `{solution}` in their places; where `{images}` stands the row's pictures are sent."),
    row("reward_python", Text, Is("python3"), Section::Rewards, REWARDED, "Python that runs rewards given as `FILE.py:FUNCTION`, and the package of `report_to wandb`."),
    row("clip_model", Text, Unset("none"), Section::Rewards, REWARDED, "CLIP of the `explanation` reward: a checkpoint directory, or a model in the local cache. A preset's `cider` becomes `explanation` with it."),
    row("clip_text_model", Text, Unset("the CLIP's own text tower"), Section::Rewards, REWARDED, "Text tower for `--clip_model`, as sentence-transformers saves one, for texts that are not English."),
    row("explanation_clip_weight", float(0.0, 1.0), Is("0.5"), Section::Rewards, REWARDED, "Share of the CLIP score in `explanation`; CIDEr has the rest. 0 needs no CLIP."),
    row("bertscore_model", Text, Unset("none"), Section::Rewards, REWARDED, "Model of the `bertscore` reward (RoBERTa, XLM-RoBERTa, BERT, DistilBERT): a checkpoint directory, or a model in the local cache."),
    row("bertscore_layer", int(0, 1024), Unset("the last"), Section::Rewards, REWARDED, "Blocks after which `bertscore` compares embeddings."),
    row("bertscore_idf", Bool, Is("false"), Section::Rewards, REWARDED, "Weigh tokens in `bertscore` by how few of the rows' references have them."),
    row("bertscore_baseline", Path, Unset("not rescaled"), Section::Rewards, REWARDED, "File of `LAYER,P,R,F` lines, as the bert_score package has, to rescale `bertscore` by."),
    // Rollout
    row("num_generations", int(1, 4096), Is("8"), Section::Rollout, &[Train, Generate, Eval, Demo, Bench], "Completions sampled per prompt (G). Training compares them with each other; one alone has no advantage.")
        .alias(&["grpo_sample_size", "num_samples", "g"])
        .per_verb(&[(Generate, "1"), (Eval, "1")]),
    row("temperature", float(0.0, 100.0), Is("1.0"), Section::Rollout, SAMPLES, "Sampling temperature; 0 takes the most likely token.")
        .alias(&["generation_temperature"])
        .per_verb(&[(Eval, "0")]),
    row("top_p", float(1e-6, 1.0), Is("1.0"), Section::Rollout, SAMPLES, "Sample among the likeliest tokens that together have this probability; 1 is off.")
        .alias(&["generation_top_p"]),
    row("top_k", int(0, COUNT), Is("0"), Section::Rollout, SAMPLES, "Sample among this many likeliest tokens; 0 is off. Never read from the checkpoint's generation_config.json."),
    row("min_p", float(0.0, 1.0), Is("0"), Section::Rollout, SAMPLES, "Drop tokens below this share of the likeliest token's probability; 0 is off."),
    row("repetition_penalty", float(0.01, 100.0), Is("1.0"), Section::Rollout, SAMPLES, "Divide the score of tokens already seen; 1 is off."),
    row("logprob_temperature", float(0.01, 100.0), Unset("`temperature`, or 1 when that is 0"), Section::Rollout, &[Train, Generate, Score, Eval, Demo], "Temperature of log-probabilities, entropy and KL; 1 is the form of the source systems. The gap to the sampling distribution is logged as `sampling/distribution_logp_difference`, in nats."),
    row("max_completion_length", int(1, COUNT), Is("256"), Section::Rollout, BOUNDED, "Most tokens of a completion; rewards of length measure by it, and a prompt has to leave room for it.")
        .alias(&["generation_max_length"]),
    row("min_completion_length", int(0, COUNT), Is("0"), Section::Rollout, SAMPLES, "No stop token before this many tokens; benchmarks set it to the maximum."),
    row("stop_strings", Texts, Is(""), Section::Rollout, SAMPLES, "Texts that end a completion, besides the model's stop tokens.")
        .alias(&["stop"]),
    row("batch_size", int(1, 65_536), Is("8"), Section::Rollout, &[Generate, Score, Eval], "Prompts worked on at a time; changes memory and speed, never the result."),
    row("replay", Path, Unset("off"), Section::Rollout, &[Train], "Take completions and rewards from these rows instead of sampling, to compare with another trainer step by step."),
    // Loss
    row("loss_type", Choice(words::<&'static Recipe>), Is("grpo"), Section::Loss, GRPO, "Recipe: names an advantage, a surrogate, an aggregation and a KL estimator at once."),
    row("beta", float(0.0, BIG), Unset("the recipe's; 0.04 for grpo"), Section::Loss, &[Train, Demo, Bench], "Weight of the KL to the starting model; at 0 no reference is kept.")
        .alias(&["grpo_beta"]),
    row("grpo_alpha", float(0.0, BIG), Unset("the recipe's; 1 for grpo"), Section::Loss, GRPO, "Factor of the advantage in the policy term."),
    row("scale_rewards", Choice(words::<ScaleRewards>), Unset("the recipe's; group for grpo"), Section::Loss, GRPO, "Divide centred rewards by the deviation of the group, of the batch, or not at all."),
    row("advantage", Choice(words::<AdvantageKind>), Unset("the recipe's; group_std for grpo"), Section::Loss, GRPO, "How rewards become advantages; says more than `scale_rewards`."),
    row("kl", Choice(words::<Kl>), Unset("the recipe's; k3 for grpo"), Section::Loss, GRPO, "KL estimator: per token and never negative (k3), or the signed difference of whole completions (k1_seq)."),
    row("use_bias_correction_kl", Bool, Is("false"), Section::Loss, GRPO, "Multiply the k3 estimate by the ratio, which makes its gradient unbiased."),
    row("loss_agg", Choice(words::<Aggregation>), Unset("the recipe's; seq_mean for grpo"), Section::Loss, GRPO, "How token losses become one number."),
    row("importance_sampling_level", Choice(words::<RatioLevel>), Unset("the recipe's; token for grpo"), Section::Loss, GRPO, "Ratio per token, or one per completion (GSPO)."),
    row("epsilon", float(0.0, BIG), Unset("the recipe's; 0.2 for grpo"), Section::Loss, GRPO, "Lower clip distance of the ratio from 1."),
    row("epsilon_high", float(0.0, BIG), Unset("`epsilon`, or the recipe's"), Section::Loss, GRPO, "Upper clip distance of the ratio from 1; for cispo the cap itself."),
    row("delta", float(1.0, BIG), Unset("off"), Section::Loss, GRPO, "Upper bound of the unclipped ratio, for negative advantages."),
    row("num_iterations", int(1, 1024), Is("1"), Section::Loss, GRPO, "Optimizer passes over each batch of completions."),
    row("mask_truncated_completions", Bool, Is("false"), Section::Loss, GRPO, "Leave completions that hit the length limit out of the loss."),
    row("entropy_coef", float(-BIG, BIG), Is("0"), Section::Loss, GRPO, "Weight of an entropy bonus."),
    // Optimizer
    row("learning_rate", float(0.0, 100.0), Is("1e-6"), Section::Optimizer, STEPS, "Peak learning rate of AdamW.")
        .alias(&["lr"])
        .per_verb(&[(Sft, "2e-5")]),
    row("lr_scheduler_type", Choice(words::<LrScheduler>), Is("linear"), Section::Optimizer, STEPS, "Course of the learning rate after warm-up.")
        .alias(&["lr_scheduler"]),
    row("warmup_ratio", Fraction, Is("0"), Section::Optimizer, STEPS, "Share of all steps over which the learning rate rises from 0."),
    row("warmup_steps", int(0, COUNT), Is("0"), Section::Optimizer, STEPS, "Steps over which the learning rate rises from 0; wins over the ratio."),
    row("weight_decay", float(0.0, BIG), Is("0"), Section::Optimizer, STEPS, "Decoupled decay, not applied to norms and biases."),
    row("adam_beta1", float(0.0, 1.0), Is("0.9"), Section::Optimizer, STEPS, "Decay of AdamW's mean."),
    row("adam_beta2", float(0.0, 1.0), Is("0.999"), Section::Optimizer, STEPS, "Decay of AdamW's squared mean."),
    row("adam_epsilon", float(0.0, 1.0), Is("1e-8"), Section::Optimizer, STEPS, "Added to AdamW's denominator."),
    row("max_grad_norm", float(0.0, BIG), Is("1.0"), Section::Optimizer, STEPS, "Norm the gradient is clipped to; 0 is off."),
    row("mm_projector_lr", float(0.0, 100.0), Unset("`learning_rate`"), Section::Optimizer, STEPS, "Learning rate of the projector between tower and language model."),
    row("vision_tower_lr", float(0.0, 100.0), Unset("`learning_rate`"), Section::Optimizer, STEPS, "Learning rate of the towers: vision, audio, and the encoder of the question (HumanOmni)."),
    row("tune_mm_llm", Bool, Unset("true; false with adapters"), Section::Optimizer, STEPS, "Train the language model."),
    row("tune_mm_mlp", Bool, Unset("true; false with adapters"), Section::Optimizer, STEPS, "Train the projector; with adapters it is trained whole beside them."),
    row("tune_gate", Bool, Unset("`tune_mm_mlp`"), Section::Optimizer, STEPS, "Train the gate between the branches of HumanOmni's projector; it can be trained without the projector, or stay as it is."),
    row("tune_mm_vision", Bool, Unset("true with `freeze_vision_modules` false and no adapters, else false"), Section::Optimizer, STEPS, "Train the vision tower, and the audio tower where there is one. A frozen tower runs once per step and medium."),
    row("tune_bert", Bool, Is("false"), Section::Optimizer, STEPS, "Train the text encoder that steers HumanOmni's projector."),
    row("freeze_vision_modules", Bool, Unset("the `tune_mm_` settings decide"), Section::Optimizer, STEPS, "Freeze what VLM-R1 calls the vision modules: the towers, and of all families but InternVL the projector too. With false the towers are trained, as there, unless adapters are."),
    row("trainable_patterns", Texts, Is(""), Section::Optimizer, TUNES, "Of the parts that are trained whole, only weights whose published name matches one of these regular expressions. One that matches nothing is an error."),
    row("use_peft", Bool, Is("false"), Section::Optimizer, TUNES, "Train LoRA adapters on frozen weights. Outputs, checkpoints included, then hold the adapters and whatever is trained whole; the reference is the same weights with adapters off.")
        .alias(&["use_lora", "lora_enable"]),
    row("lora_r", int(1, 16_384), Is("64"), Section::Optimizer, TUNES, "Rank of the adapters."),
    row("lora_alpha", float(0.0, BIG), Is("128"), Section::Optimizer, TUNES, "Adapters are scaled by alpha over rank."),
    row("lora_dropout", float(0.0, 0.999), Is("0.05"), Section::Optimizer, TUNES, "Share of an adapter's inputs dropped in policy passes; sampling, scoring and the reference drop nothing."),
    row("lora_target_modules", Words, Is("all-linear"), Section::Optimizer, TUNES, "Layers that get an adapter: `all-linear` for those of the language model, or ends of module names (looked up there first, then in tower and projector), or regular expressions over whole names. Never the head.")
        .alias(&["lora_targets"]),
    row("use_rslora", Bool, Is("false"), Section::Optimizer, TUNES, "Scale adapters by alpha over the root of the rank, which keeps high ranks learning."),
    row("per_device_train_batch_size", int(1, 65_536), Is("1"), Section::Optimizer, STEPS, "Prompts (not completions) worked on at a time."),
    row("gradient_accumulation_steps", int(1, 65_536), Is("8"), Section::Optimizer, STEPS, "Batches of prompts per optimizer step."),
    // Run and checkpoints
    row("output_dir", Path, Unset(""), Section::Run, &[Train, Sft, Export, Demo], "Run directory: metrics, rollouts, checkpoints, and at the end the model. For `export` the directory to write, new or empty.")
        .per_verb(&[(Demo, "runs/demo")]),
    row("exp_name", Text, Unset(""), Section::Run, &[Train, Sft], "Name instead of a directory: the run directory is `checkpoints/rl/NAME`, the log `runs/NAME/log/log.txt`."),
    row("deepspeed", Path, Unset(""), Section::Run, &[Train, Sft], "A settings file of DeepSpeed, such as zero2.json: each field is compared with this run's settings and explained; nothing is sharded in one process."),
    row("num_train_epochs", float(0.0, 1e6), Is("1"), Section::Run, &[Train, Sft, Demo], "Passes over the training rows. A step takes rows across the end of a pass; the last step takes what is left of the last one."),
    row("max_steps", int(-1, COUNT), Is("-1"), Section::Run, STEPS, "Optimizer steps, instead of epochs, which it overrides; -1 is off."),
    row("seed", int(0, i64::MAX), Is("42"), Section::Run, RANDOM, "Seed of everything random; the same seed gives the same run."),
    row("data_seed", int(0, i64::MAX), Unset("`seed`"), Section::Run, &[Train, Sft, Demo], "Seed of the order of rows and of the held-out share."),
    row("save_strategy", Choice(words::<SaveStrategy>), Is("steps"), Section::Run, LOOP, "When to write a checkpoint."),
    row("save_steps", int(1, COUNT), Is("100"), Section::Run, LOOP, "Optimizer steps between checkpoints."),
    row("save_minutes", float(0.01, 1e6), Unset("off"), Section::Run, LOOP, "Also write a checkpoint when this many minutes have gone by since the last one; for runs whose steps take long."),
    row("save_total_limit", int(1, COUNT), Unset("keep all"), Section::Run, LOOP, "Checkpoints to keep; the oldest goes first, the best stays."),
    row("save_only_model", Bool, Is("false"), Section::Run, LOOP, "Write checkpoints without optimizer state: smaller, but they can only start a run. The one of an interruption has it."),
    row("resume_from_checkpoint", Text, Is("auto"), Section::Run, LOOP, "`auto` resumes the newest checkpoint that can be loaded if its settings and inputs are those of this run, else starts anew; `must` is an error instead of starting anew; `never` starts anew; a path resumes exactly that one. What an earlier run left is moved to `superseded-N`, never removed."),
    row("allow_changed_settings", Bool, Is("false"), Section::Run, LOOP, "Go on from a checkpoint although settings or inputs differ from those it was written with, for instance with a lower learning rate. The console names them."),
    // Evaluation
    row("eval_strategy", Choice(words::<EvalStrategy>), Unset("steps with `eval_steps`, else epoch with evaluation data, else no"), Section::Evaluation, PERIODIC, "When to evaluate during training.")
        .alias(&["evaluation_strategy"]),
    row("eval_steps", int(1, COUNT), Unset("from `eval_strategy`"), Section::Evaluation, PERIODIC, "Optimizer steps between evaluations."),
    row("eval_on_start", Bool, Is("false"), Section::Evaluation, PERIODIC, "Evaluate before the first step too, for a comparison of before and after."),
    row("num_generations_eval", int(1, 4096), Unset("1, greedy"), Section::Evaluation, PERIODIC, "Completions per prompt in evaluation during training; more than 1 are sampled."),
    row("metric_for_best_model", Text, Is("eval_reward"), Section::Evaluation, PERIODIC, "Metric of the evaluation that names the best checkpoint; higher is better."),
    row("category_column", Text, Unset("no table"), Section::Evaluation, SUMS_UP, "Column of the rows by which accuracy is listed apart."),
    row("accuracy_threshold", float(0.0, 1.0), Is("1"), Section::Evaluation, SUMS_UP, "Share of the accuracy reward's largest value from which an answer counts as right, in accuracy and pass@k; 0.5 for overlaps of boxes."),
    row("label_set", Words, Is(""), Section::Evaluation, SUMS_UP, "Labels of a classification, for WAR, UAR and the confusion matrix; `auto` takes the ground truths."),
    // Logging
    row("logging_steps", int(1, COUNT), Is("1"), Section::Logging, LOOP, "Steps averaged in one line of the console; metrics.jsonl has every step."),
    row("grpo_logging_steps", int(1, COUNT), Unset("`logging_steps`"), Section::Logging, &[Train, Demo], "Steps averaged for the `grpo/…` metrics."),
    row("report_to", Choices(words::<Tracker>), Is("jsonl"), Section::Logging, LOOP, "Where metrics go, with means over `logging_steps`. `metrics.jsonl` in the run directory is always written. One that fails or does not keep up is dropped with a warning."),
    row("prometheus_port", int(0, 65_535), Is("9464"), Section::Logging, LOOP, "Port on 127.0.0.1 where Prometheus finds `/metrics`; 0 takes a free one."),
    row("dashboard", Bool, Is("false"), Section::Logging, LOOP, "Serve the run as a page on this machine while it trains, as `watch` does afterwards. Its address is printed."),
    row("dashboard_port", int(0, 65_535), Is("0"), Section::Logging, &[Train, Sft, Demo, Watch], "Port of the page on 127.0.0.1; 0 takes a free one."),
    row("tui", Bool, Is("false"), Section::Logging, &[Watch], "Show the runs as a table in the terminal instead of a page; in a pipe, a line per step."),
    row("profile", Bool, Is("false"), Section::Logging, &[Train, Sft, Demo], "Print at the end where the time went, by phase and kind of work, with operations and bytes per second."),
    row("run_name", Text, Unset("name of the run directory"), Section::Logging, LOOP, "Name of the run in logs, trackers and the model card."),
    row("log_completions", Bool, Is("false"), Section::Logging, &[Train, Demo], "Print a few completions with their rewards at each line of the console."),
    row("log_token_stats", Bool, Is("false"), Section::Logging, &[Train, Demo], "Write the numbers of each token (log-probabilities, entropy) into `tokens/` of the run directory, for the colours of `watch`: some 40 bytes a token, and no pass through the model."),
    // Program
    row("config", Path, Unset(""), Section::Program, SET, "YAML file of settings under the same names; flags win. Settings of other verbs in it are left alone, so one file can serve `data check` and `train`.")
        .command_line_only(),
    row("preset", Choice(crate::presets::words), Unset("none"), Section::Program, SET, "Settings of a source system; `--config` and flags win over it."),
    row("print_config", Bool, Is("false"), Section::Program, SET, "Print every setting of this run, where it comes from, and stop. The output is a `--config` file.")
        .command_line_only(),
    row("threads", int(1, 4096), Unset("all cores"), Section::Program, &[Train, Sft, Generate, Score, Eval, DataCheck, RewardsRun, Export, Doctor, Demo, Bench], "Threads for computing."),
];

/// Verbs that hold a rendered prompt against a limit.
const RUNS_ROWS: &[Verb] = &[Train, Sft, Generate, Score, Eval, DataCheck, DataShow];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config;
    use crate::settings::{Environment, Settings};
    use crate::values::{Origin, Values};

    #[test]
    fn names_are_unique_lower_case_and_sorted_into_the_sections_in_order() {
        let mut seen = BTreeSet::new();
        for flag in FLAGS {
            for name in std::iter::once(&flag.name).chain(flag.aliases) {
                assert!(seen.insert(*name), "`{name}` names two settings");
                assert!(
                    name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'),
                    "{name}"
                );
            }
        }
        let order: Vec<usize> =
            FLAGS.iter().map(|f| Section::ALL.iter().position(|s| *s == f.section).unwrap()).collect();
        assert!(order.is_sorted());
    }

    #[test]
    fn every_default_fits_its_kind_and_every_required_verb_takes_the_flag() {
        for verb in Verb::ALL {
            Values::defaults(*verb).unwrap();
        }
        for flag in FLAGS {
            assert!(flag.required.iter().all(|v| flag.verbs.contains(v)), "{}", flag.name);
            assert!(flag.verb_defaults.iter().all(|(v, _)| flag.verbs.contains(v)), "{}", flag.name);
            assert!(!flag.verbs.is_empty() && flag.help.ends_with('.'), "{}", flag.name);
        }
    }

    #[test]
    fn settings_read_every_row_of_the_table() {
        for verb in Verb::ALL {
            let values = Values::defaults(*verb).unwrap();
            Settings::from_values(&values, Environment::default()).unwrap();
            // These act before there are settings.
            assert_eq!(values.unread(), ["config", "preset", "print_config"], "{}", verb.name());
        }
    }

    #[test]
    fn every_rule_names_a_setting() {
        for rule in crate::rules::IDLE {
            assert!(FLAGS.iter().any(|flag| flag.name == rule.flag), "{}", rule.flag);
        }
    }

    #[test]
    fn presets_use_canonical_names_and_say_where_each_value_comes_from() {
        for (name, _) in crate::presets::words() {
            for text in crate::presets::texts(name) {
                let layer = config::parse(text, name, |_| Origin::Preset(name.to_string()));
                assert!(layer.problems.is_empty() && layer.dropped.is_empty(), "{name}: {layer:?}");
                for line in text.lines().filter(|line| !line.starts_with('#')) {
                    let (key, rest) = line.split_once(':').unwrap();
                    assert_eq!(find(key).unwrap().name, key, "{name}");
                    assert!(rest.contains(" # "), "{name}: `{key}` has no source");
                }
            }
        }
    }

    #[test]
    fn the_reference_page_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/flags.md");
        let page = crate::explain::reference();
        if std::env::var_os("WRITE_DOCS").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert!(found == page, "docs/flags.md is out of date: run the tests once with WRITE_DOCS=1");
    }
}
