//! The commands of the program.

/// A command of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// GRPO training.
    Train,
    /// Prediction of the memory of a training run, before it starts.
    Plan,
    /// Choice of the settings of a training run.
    Init,
    /// Supervised fine-tuning.
    Sft,
    /// Sampling of completions for rows or for one prompt.
    Generate,
    /// Log-probabilities of given completions.
    Score,
    /// Evaluation on a dataset.
    Eval,
    /// Check of every row and medium header.
    DataCheck,
    /// Display of a row as the model sees it.
    DataShow,
    /// Conversion of a published dataset to rows.
    DataConvert,
    /// List of the reward functions.
    RewardsList,
    /// Scoring of rows that contain completions.
    RewardsRun,
    /// Conversion of a model file of another program to a checkpoint.
    Convert,
    /// Conversion of a checkpoint to another form.
    Export,
    /// Upload of a model to the hub.
    Push,
    /// Check of the machine.
    Doctor,
    /// Training of the embedded model on the generated task.
    Demo,
    /// Measurement of a step with a random model.
    Bench,
    /// JSON Schema of a file of settings.
    Schema,
    /// Endpoint for OpenAI's clients.
    Serve,
    /// Page that shows runs.
    Watch,
    /// Report of a run as one file.
    Report,
    /// Translation of another trainer's script to settings.
    Translate,
    /// Completion script for a shell.
    Completions,
    /// Manual pages.
    Man,
}

use Verb::{
    Bench, Completions, Convert, DataCheck, DataConvert, DataShow, Demo, Doctor, Eval, Export, Generate,
    Init, Man, Plan, Push, Report, RewardsList, RewardsRun, Schema, Score, Serve, Sft, Train, Translate,
    Watch,
};

impl Verb {
    /// Every verb, in the order of the help.
    pub const ALL: &'static [Self] = &[
        Init,
        Translate,
        Train,
        Plan,
        Sft,
        Generate,
        Score,
        Eval,
        Serve,
        DataCheck,
        DataShow,
        DataConvert,
        RewardsList,
        RewardsRun,
        Convert,
        Export,
        Push,
        Doctor,
        Demo,
        Bench,
        Watch,
        Report,
        Schema,
        Completions,
        Man,
    ];

    /// Returns the words that name the verb on the command line.
    pub const fn words(self) -> &'static [&'static str] {
        match self {
            Train => &["train"],
            Plan => &["plan"],
            Init => &["init"],
            Translate => &["translate"],
            Sft => &["sft"],
            Generate => &["generate"],
            Score => &["score"],
            Eval => &["eval"],
            DataCheck => &["data", "check"],
            DataShow => &["data", "show"],
            DataConvert => &["data", "convert"],
            RewardsList => &["rewards", "list"],
            RewardsRun => &["rewards", "run"],
            Convert => &["convert"],
            Export => &["export"],
            Push => &["push"],
            Doctor => &["doctor"],
            Demo => &["demo"],
            Bench => &["bench"],
            Serve => &["serve"],
            Watch => &["watch"],
            Report => &["report"],
            Schema => &["schema"],
            Completions => &["completions"],
            Man => &["man"],
        }
    }

    /// Returns the verb whose settings apply: `plan` predicts a run of `train`, and `init` prepares one.
    pub const fn runs(self) -> Self {
        match self {
            Plan | Init => Train,
            verb => verb,
        }
    }

    /// Returns the verb as the user types it, e.g. `data check`.
    pub fn name(self) -> String {
        self.words().join(" ")
    }

    /// Returns the one-line description for the help.
    pub const fn about(self) -> &'static str {
        match self {
            Train => {
                "Train a checkpoint with GRPO: sample a group of answers per question, score them, improve"
            }
            Init => "Look at a checkpoint, rows and this machine, and write a file of settings for `train`",
            Translate => {
                "Turn a launch script of TRL, VLM-R1, R1-V, ms-swift, Unsloth, EasyR1 or verl into a file of settings"
            }
            Plan => "Print the memory that `train` with these settings takes, and which settings make it fit",
            Sft => "Fine-tune a checkpoint on the answers of a dataset",
            Generate => "Write completions for rows of a file, or for one prompt on the terminal",
            Score => "Write the log-probability of every token of given completions",
            Eval => "Evaluate a checkpoint on a dataset: rewards, accuracy, tables per category",
            DataCheck => "Read every row and medium header; report all problems and the longest prompts",
            DataShow => "Print the rendered prompt, frame times, sizes and token counts of a row",
            DataConvert => "Convert a published dataset to rows that this program reads",
            RewardsList => "List the reward functions with their ranges and sources",
            RewardsRun => "Score rows that carry completions with reward functions",
            Convert => "Turn a GGUF file of llama.cpp into a checkpoint that trains",
            Export => {
                "Write a checkpoint in another form: an adapter merged into it, another layout, a GGUF file"
            }
            Push => "Push a run directory, checkpoint or adapter to a repository of the Hugging Face hub",
            Doctor => "Check this machine and, if given, a checkpoint directory",
            Demo => "Train the embedded small model on a generated visual task and show before and after",
            Bench => {
                "Measure a training step of a random model and compare it with the limits of this machine"
            }
            Serve => "Serve a checkpoint to OpenAI's clients: chat with pictures, clips, sounds and tools",
            Watch => {
                "Show runs as a page on this machine: curves, completions, evaluations, live while they train"
            }
            Report => "Write a run as one HTML file that can be shared, and its curves as SVG",
            Schema => "Print the JSON Schema of a `--config` file, for editors that complete and check it",
            Completions => "Print the completion script of a shell",
            Man => "Write the manual pages into a directory",
        }
    }

    /// Returns the settings of a first run, in the order of `-h`; empty if `-h` shows all settings.
    // One `match` as a table: each list is read by itself.
    pub const fn first_settings(self) -> &'static [&'static str] {
        match self {
            Train => &[
                "model_name_or_path",
                "train_file",
                "image_folders",
                "output_dir",
                "preset",
                "reward_funcs",
                "question_template",
                "max_pixels",
                "num_generations",
                "max_completion_length",
                "per_device_train_batch_size",
                "learning_rate",
                "max_steps",
                "use_peft",
                "dashboard",
            ],
            Init => &[
                "model_name_or_path",
                "train_file",
                "image_folders",
                "video_folders",
                "output",
                "output_dir",
                "solution_column",
                "reward_funcs",
                "use_peft",
                "device",
            ],
            Plan => &[
                "model_name_or_path",
                "train_file",
                "image_folders",
                "preset",
                "question_template",
                "max_pixels",
                "num_generations",
                "max_completion_length",
                "per_device_train_batch_size",
                "gradient_checkpointing",
                "torch_dtype",
                "use_peft",
                "load_in_4bit",
                "device",
                "json",
            ],
            Sft => &[
                "model_name_or_path",
                "train_file",
                "image_folders",
                "output_dir",
                "eval_file",
                "max_pixels",
                "max_completion_length",
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
                "learning_rate",
                "num_train_epochs",
                "gradient_checkpointing",
                "use_peft",
                "lora_r",
                "dashboard",
            ],
            Generate => &[
                "model_name_or_path",
                "prompt",
                "image",
                "video",
                "audio",
                "input",
                "output",
                "adapter_name_or_path",
                "system_prompt",
                "question_template",
                "max_pixels",
                "num_generations",
                "temperature",
                "max_completion_length",
                "seed",
            ],
            Score => &[
                "model_name_or_path",
                "input",
                "output",
                "image_folders",
                "adapter_name_or_path",
                "question_template",
                "max_pixels",
                "torch_dtype",
                "batch_size",
                "device",
            ],
            Eval => &[
                "model_name_or_path",
                "eval_file",
                "image_folders",
                "output",
                "adapter_name_or_path",
                "reward_funcs",
                "accuracy_mode",
                "question_template",
                "category_column",
                "label_set",
                "max_pixels",
                "num_generations",
                "temperature",
                "max_completion_length",
                "batch_size",
            ],
            Serve => &[
                "checkpoint",
                "port",
                "served_model_name",
                "adapter_name_or_path",
                "system_prompt",
                "max_pixels",
                "allow_urls",
                "temperature",
                "max_completion_length",
                "load_in_4bit",
                "device",
            ],
            DataCheck => &[
                "train_file",
                "eval_file",
                "model_name_or_path",
                "image_folders",
                "video_folders",
                "prompt_column",
                "solution_column",
                "question_template",
                "reward_funcs",
                "max_pixels",
                "max_prompt_length",
                "allow_urls",
            ],
            DataShow => &[
                "train_file",
                "row",
                "num_rows",
                "model_name_or_path",
                "image_folders",
                "video_folders",
                "prompt_column",
                "solution_column",
                "question_template",
                "max_pixels",
            ],
            RewardsRun => &[
                "input",
                "output",
                "reward_funcs",
                "reward_weights",
                "accuracy_mode",
                "format_mode",
                "keep",
                "solution_column",
                "category_column",
            ],
            Demo => &[
                "output_dir",
                "max_steps",
                "num_generations",
                "learning_rate",
                "loss_type",
                "seed",
                "dashboard",
                "device",
                "threads",
            ],
            _ => &[],
        }
    }

    /// Returns example command lines.
    pub const fn example(self) -> &'static str {
        match self {
            Train => {
                "omnigrpo train --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --train_file rows.jsonl \\
    --reward_funcs accuracy format --question_template default \\
    --max_pixels 401408 --use_peft --output_dir runs/first"
            }
            Init => "omnigrpo init --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --train_file rows.jsonl",
            Translate => {
                "omnigrpo translate run_grpo.sh --output run_grpo.yaml
  omnigrpo train --config run_grpo.yaml"
            }
            Plan => {
                "omnigrpo plan --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --train_file rows.jsonl \\
    --max_pixels 401408 --use_peft"
            }
            Sft => {
                "omnigrpo sft --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --train_file rows.jsonl \\
    --max_pixels 401408 --use_peft --output_dir runs/sft"
            }
            Generate => {
                "omnigrpo generate --model_name_or_path runs/first --prompt 'What is this?' --image photo.jpg
  omnigrpo generate --model_name_or_path runs/first --input rows.jsonl --output completions.jsonl"
            }
            Score => {
                "omnigrpo score --model_name_or_path runs/first --input completions.jsonl --output scores.jsonl"
            }
            Eval => {
                "omnigrpo eval --model_name_or_path runs/first --eval_file test.jsonl \\
    --question_template default --output answers.jsonl"
            }
            DataCheck => {
                "omnigrpo data check --train_file rows.jsonl --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct"
            }
            DataShow => {
                "omnigrpo data show --train_file rows.jsonl --row 3 --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct"
            }
            DataConvert => "omnigrpo data convert parquet --input table.parquet --output rows.jsonl",
            RewardsList => "omnigrpo rewards list",
            RewardsRun => {
                "omnigrpo rewards run --input runs/first/rollouts --reward_funcs accuracy --output scored.jsonl
  omnigrpo rewards run --input completions.jsonl --keep best --output sft_rows.jsonl"
            }
            Convert => "omnigrpo convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2",
            Export => "omnigrpo export --model_name_or_path BASE --adapter_name_or_path runs/first --merge --output_dir merged",
            Push => "omnigrpo push runs/first --hub_model_id ORG/NAME",
            Doctor => "omnigrpo doctor
  omnigrpo doctor --gpu",
            Demo => "omnigrpo demo",
            Bench => "omnigrpo bench",
            Serve => "omnigrpo serve runs/first --port 8000",
            Watch => "omnigrpo watch runs/first",
            Report => "omnigrpo report runs/first",
            Schema => "omnigrpo schema > omnigrpo.schema.json",
            Completions => "eval \"$(omnigrpo completions bash)\"",
            Man => "omnigrpo man man1",
        }
    }
}
