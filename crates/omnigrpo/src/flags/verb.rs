//! The commands of the program.

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
    /// Sends a model to the hub.
    Push,
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
    Bench, Completions, DataCheck, DataConvert, DataShow, Demo, Doctor, Eval, Export, Generate, Man, Push,
    Report, RewardsList, RewardsRun, Score, Sft, Train, Watch,
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
        Push,
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
            Push => &["push"],
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
            Push => "Push a run directory, checkpoint or adapter to a repository of the Hugging Face hub",
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
