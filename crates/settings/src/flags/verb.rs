//! The commands of the program.

/// A verb in help and parser.
struct Row {
    words: &'static [&'static str],
    about: &'static str,
    /// Settings of a first run, in the order of `-h`; empty if `-h` shows all settings.
    first: &'static str,
    example: &'static str,
}

/// Declares the verbs in the order of the help.
macro_rules! verbs {
    ($($(#[$doc:meta])* $verb:ident $row:tt)+) => {
        /// A command of the program.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Verb {
            $($(#[$doc])* $verb),+
        }

        impl Verb {
            /// Every verb, in the order of the help.
            pub const ALL: &'static [Self] = &[$(Self::$verb),+];

            const fn row(self) -> Row {
                match self {
                    $(Self::$verb => Row $row),+
                }
            }
        }
    };
}

verbs! {
    /// Choice of the settings of a training run.
    Init {
        words: &["init"],
        about: "Look at a checkpoint, rows and this machine, and write a file of settings for `train`",
        first: "model_name_or_path train_file image_folders video_folders output output_dir solution_column \
            reward_funcs use_peft device",
        example: "omnigrpo init --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --train_file rows.jsonl",
    }
    /// Translation of another trainer's script to settings.
    Translate {
        words: &["translate"],
        about: "Turn a launch script of TRL, VLM-R1, R1-V, ms-swift, Unsloth, EasyR1 or verl into a file of settings",
        first: "",
        example: "omnigrpo translate run_grpo.sh --output run_grpo.yaml
  omnigrpo train --config run_grpo.yaml",
    }
    /// GRPO training.
    Train {
        words: &["train"],
        about: "Train a checkpoint with GRPO: sample a group of answers per question, score them, improve",
        first: "model_name_or_path train_file image_folders output_dir preset reward_funcs question_template \
            max_pixels num_generations max_completion_length per_device_train_batch_size learning_rate \
            max_steps use_peft dashboard",
        example: "omnigrpo train --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --train_file rows.jsonl \\
    --reward_funcs accuracy format --question_template default \\
    --max_pixels 401408 --use_peft --output_dir runs/first",
    }
    /// Prediction of the memory of a training run, before it starts.
    Plan {
        words: &["plan"],
        about: "Print the memory that `train` with these settings takes, and which settings make it fit",
        first: "model_name_or_path train_file image_folders preset question_template max_pixels num_generations \
            max_completion_length per_device_train_batch_size gradient_checkpointing torch_dtype use_peft \
            load_in_4bit device json",
        example: "omnigrpo plan --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --train_file rows.jsonl \\
    --max_pixels 401408 --use_peft",
    }
    /// Supervised fine-tuning.
    Sft {
        words: &["sft"],
        about: "Fine-tune a checkpoint on the answers of a dataset",
        first: "model_name_or_path train_file image_folders output_dir eval_file max_pixels max_completion_length \
            per_device_train_batch_size gradient_accumulation_steps learning_rate num_train_epochs \
            gradient_checkpointing use_peft lora_r dashboard",
        example: "omnigrpo sft --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --train_file rows.jsonl \\
    --max_pixels 401408 --use_peft --output_dir runs/sft",
    }
    /// Sampling of completions for rows or for one prompt.
    Generate {
        words: &["generate"],
        about: "Write completions for rows of a file, or for one prompt on the terminal",
        first: "model_name_or_path prompt image video audio input output adapter_name_or_path system_prompt \
            question_template max_pixels num_generations temperature max_completion_length seed",
        example: "omnigrpo generate --model_name_or_path runs/first --prompt 'What is this?' --image photo.jpg
  omnigrpo generate --model_name_or_path runs/first --input rows.jsonl --output completions.jsonl",
    }
    /// Log-probabilities of given completions.
    Score {
        words: &["score"],
        about: "Write the log-probability of every token of given completions",
        first: "model_name_or_path input output image_folders adapter_name_or_path question_template max_pixels \
            torch_dtype batch_size device",
        example: "omnigrpo score --model_name_or_path runs/first --input completions.jsonl --output scores.jsonl",
    }
    /// Evaluation on a dataset.
    Eval {
        words: &["eval"],
        about: "Evaluate a checkpoint on a dataset: rewards, accuracy, tables per category",
        first: "model_name_or_path eval_file image_folders output adapter_name_or_path reward_funcs accuracy_mode \
            question_template category_column label_set max_pixels num_generations temperature \
            max_completion_length batch_size",
        example: "omnigrpo eval --model_name_or_path runs/first --eval_file test.jsonl \\
    --question_template default --output answers.jsonl",
    }
    /// Endpoint for OpenAI's clients.
    Serve {
        words: &["serve"],
        about: "Serve a checkpoint to OpenAI's clients: chat with pictures, clips, sounds and tools",
        first: "checkpoint port served_model_name adapter_name_or_path system_prompt max_pixels allow_urls \
            temperature max_completion_length load_in_4bit device",
        example: "omnigrpo serve runs/first --port 8000",
    }
    /// Check of every row and medium header.
    DataCheck {
        words: &["data", "check"],
        about: "Read every row and medium header; report all problems and the longest prompts",
        first: "train_file eval_file model_name_or_path image_folders video_folders prompt_column solution_column \
            question_template reward_funcs max_pixels max_prompt_length allow_urls",
        example: "omnigrpo data check --train_file rows.jsonl --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct",
    }
    /// Display of a row as the model sees it.
    DataShow {
        words: &["data", "show"],
        about: "Print the rendered prompt, frame times, sizes and token counts of a row",
        first: "train_file row num_rows model_name_or_path image_folders video_folders prompt_column \
            solution_column question_template max_pixels",
        example: "omnigrpo data show --train_file rows.jsonl --row 3 --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct",
    }
    /// Conversion of a published dataset to rows.
    DataConvert {
        words: &["data", "convert"],
        about: "Convert a published dataset to rows that this program reads",
        first: "",
        example: "omnigrpo data convert parquet --input table.parquet --output rows.jsonl",
    }
    /// List of the reward functions.
    RewardsList {
        words: &["rewards", "list"],
        about: "List the reward functions with their ranges and sources",
        first: "",
        example: "omnigrpo rewards list",
    }
    /// Scoring of rows that contain completions.
    RewardsRun {
        words: &["rewards", "run"],
        about: "Score rows that carry completions with reward functions",
        first: "input output reward_funcs reward_weights accuracy_mode format_mode keep solution_column \
            category_column",
        example: "omnigrpo rewards run --input runs/first/rollouts --reward_funcs accuracy --output scored.jsonl
  omnigrpo rewards run --input completions.jsonl --keep best --output sft_rows.jsonl",
    }
    /// Trial of reward functions on a few rows.
    RewardsTry {
        words: &["rewards", "try"],
        about: "Show what reward functions give a few completions, before any run",
        first: "reward train_file model_name_or_path input image_folders num_rows num_generations temperature \
            max_completion_length solution_column",
        example: "omnigrpo rewards try my_rewards.py:exact --train_file rows.jsonl
  omnigrpo rewards try my_rewards.py:exact --train_file rows.jsonl --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct
  omnigrpo rewards try my_rewards.py:exact --input runs/first",
    }
    /// Conversion of a model file of another program to a checkpoint.
    Convert {
        words: &["convert"],
        about: "Turn a GGUF file of llama.cpp into a checkpoint that trains",
        first: "",
        example: "omnigrpo convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2",
    }
    /// Conversion of a checkpoint to another form.
    Export {
        words: &["export"],
        about: "Write a checkpoint in another form: an adapter merged into it, another layout, a GGUF file",
        first: "",
        example: "omnigrpo export --model_name_or_path BASE --adapter_name_or_path runs/first --merge --output_dir merged",
    }
    /// Upload of a model to the hub.
    Push {
        words: &["push"],
        about: "Push a run directory, checkpoint or adapter to a repository of the Hugging Face hub",
        first: "",
        example: "omnigrpo push runs/first --hub_model_id ORG/NAME",
    }
    /// Check of the machine.
    Doctor {
        words: &["doctor"],
        about: "Check this machine and, if given, a checkpoint directory",
        first: "",
        example: "omnigrpo doctor
  omnigrpo doctor --gpu",
    }
    /// Training of the embedded model on the generated task.
    Demo {
        words: &["demo"],
        about: "Train the embedded small model on a generated visual task and show before and after",
        first: "output_dir max_steps num_generations learning_rate loss_type seed dashboard device threads",
        example: "omnigrpo demo",
    }
    /// Measurement of a step with a random model.
    Bench {
        words: &["bench"],
        about: "Measure a training step of a random model and compare it with the limits of this machine",
        first: "",
        example: "omnigrpo bench",
    }
    /// Page that shows runs.
    Watch {
        words: &["watch"],
        about: "Show runs as a page on this machine: curves, completions, evaluations, live while they train",
        first: "",
        example: "omnigrpo watch runs/first",
    }
    /// Verdict on a run.
    Diagnose {
        words: &["diagnose"],
        about: "Say whether a run has learned and, if not, why, and what to try next",
        first: "",
        example: "omnigrpo diagnose runs/first
  omnigrpo diagnose runs/first --json",
    }
    /// Report of a run as one file.
    Report {
        words: &["report"],
        about: "Write a run as one HTML file that can be shared, and its curves as SVG",
        first: "",
        example: "omnigrpo report runs/first",
    }
    /// JSON Schema of a file of settings.
    Schema {
        words: &["schema"],
        about: "Print the JSON Schema of a `--config` file, for editors that complete and check it",
        first: "",
        example: "omnigrpo schema > omnigrpo.schema.json",
    }
    /// Completion script for a shell.
    Completions {
        words: &["completions"],
        about: "Print the completion script of a shell",
        first: "",
        example: "eval \"$(omnigrpo completions bash)\"",
    }
    /// Manual pages.
    Man {
        words: &["man"],
        about: "Write the manual pages into a directory",
        first: "",
        example: "omnigrpo man man1",
    }
}

impl Verb {
    /// Returns the verb whose settings apply: `plan` predicts a run of `train`, and `init` prepares one.
    pub const fn runs(self) -> Self {
        match self {
            Self::Plan | Self::Init => Self::Train,
            verb => verb,
        }
    }

    /// Returns true if several processes divide the work of the verb.
    pub fn is_divided(self) -> bool {
        super::DIVIDES.contains(&self)
    }

    /// Returns the words that name the verb on the command line.
    pub const fn words(self) -> &'static [&'static str] {
        self.row().words
    }

    /// Returns the verb as the user types it, e.g. `data check`.
    pub fn name(self) -> String {
        self.words().join(" ")
    }

    /// Returns the one-line description for the help.
    pub const fn about(self) -> &'static str {
        self.row().about
    }

    /// Returns the settings of a first run, in the order of `-h`; empty if `-h` shows all settings.
    pub fn first_settings(self) -> Vec<&'static str> {
        self.row().first.split_whitespace().collect()
    }

    /// Returns example command lines.
    pub const fn example(self) -> &'static str {
        self.row().example
    }
}
