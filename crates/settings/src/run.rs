//! The settings of one run: the plans of the libraries and the program's own settings.
//!
//! [`Settings::from_values`] applies every row of the flag table to a [`Settings`]. Code below it sees no flag, file of settings
//! or environment variable. A field without a comment has the meaning and unit given in the row of the same name.
//!
//! The structs do not derive `PartialEq`: the derived code would read every field, and the compiler could no longer report a
//! setting that no verb uses.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use omnigrpo_data::{ReadOptions, Roots};
use omnigrpo_fetch::is_repo_name;
use omnigrpo_grpo::{RECIPES, Recipe};
use omnigrpo_models::{GgufPrecision, LoraConfig, PromptSettings, WeightDtype};
use omnigrpo_ranks::PATIENCE;
use omnigrpo_rewards::{AccuracyMode, RewardOptions};
use omnigrpo_rollout::TurnLimits;
use omnigrpo_scorers::ScorerOptions;
use omnigrpo_train::{AdamWConfig, Algorithm, CardRates, EvalOptions, EvalWhen, RunPlan, Selection};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json};

use crate::environment::{DEBUG_LOG, Environment};
use crate::flags;
use crate::names::{
    AllowUrls, BatchUnit, Bf16Products, ExportFormat, HubStrategy, QuantizedActivations, Tracker,
};
use crate::problem::Problem;
use crate::values::{Values, take};

/// Selection of the scored completions that become rows for `sft`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keep {
    /// The best completion of each row; the first one if several are equal.
    Best,
    /// Completions that count as correct.
    Passed,
    /// Completions with at least this reward.
    From(f64),
}

impl Keep {
    /// Reads `--keep`.
    ///
    /// # Errors
    /// Returns an error if the text is neither a known word nor a number.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        match (text, text.parse::<f64>()) {
            ("best", _) => Ok(Self::Best),
            ("passed", _) => Ok(Self::Passed),
            (_, Ok(number)) if number.is_finite() => Ok(Self::From(number)),
            _ => Err(Problem::usage("wrong value for `keep`")
                .got(format!("`{text}`"))
                .expected("`best`, `passed`, or the smallest reward as a number")
                .at("--keep")),
        }
    }
}

/// Choice of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU, or the CPU if there is none.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU with this number in the driver's list.
    Cuda(u16),
    /// Kernels of a GPU, run on the CPU by an emulator. Only test builds have it.
    Emulated,
}

impl DeviceChoice {
    /// Reads `--device` and `--reference_device`.
    ///
    /// # Errors
    /// Returns an error if the text does not name a device.
    pub fn parse(text: &str, flag: &str) -> Result<Self, Problem> {
        let number = text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
        match (text, number) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("emulated", _) => Ok(Self::Emulated),
            ("cuda", _) => Ok(Self::Cuda(0)),
            (_, Some(number)) => Ok(Self::Cuda(number)),
            _ => Err(Problem::usage("no device has this name")
                .got(format!("`{text}`"))
                .expected("`auto`, `cpu`, `cuda`, or `cuda:N` with the number of a GPU")
                .at(format!("--{flag}"))),
        }
    }
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
            Self::Emulated => f.write_str("emulated"),
        }
    }
}

/// Input and output of a verb.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Io {
    pub dataset_format: Option<String>,
    pub gguf_file: Option<PathBuf>,
    pub shell: Option<String>,
    pub directory: Option<PathBuf>,
    pub run_dirs: Vec<String>,
    pub input: Option<PathBuf>,
    pub output: Option<PathBuf>,
    /// Completions that `rewards run` turns into rows.
    pub keep: Option<Keep>,
    pub prompt: Option<String>,
    pub image: Vec<String>,
    pub video: Vec<String>,
    pub audio: Vec<String>,
    pub row: u64,
    pub num_rows: u64,
    /// Run directory, derived from `exp_name` if only that is given. Present for every verb that trains.
    pub output_dir: Option<PathBuf>,
    pub exp_name: Option<String>,
    /// True if the run is only planned: it prints its memory and ends.
    pub dry_run: bool,
    /// File for the numbers of `bench` or `plan`.
    pub json: Option<PathBuf>,
    /// File for the lines of the console, with times. It is `log.txt` in the run directory, or `runs/NAME/log/log.txt` with
    /// `exp_name`.
    pub log_file: Option<PathBuf>,
    /// Script that `translate` reads.
    pub script: Option<PathBuf>,
    /// True if `translate` fails when a setting that changes training has no counterpart.
    pub strict: bool,
    pub deepspeed: Option<PathBuf>,
}

/// Step that `bench` measures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workload {
    /// One of equal prompts and completions, whose sizes are settings.
    #[default]
    Own,
    /// That of a published run of EasyR1: 512 questions about a picture of geometry (geo3k) with 5 completions each, Qwen2.5-VL-3B, all
    /// weights, KL with 0.01, in bfloat16. Here, one update takes all completions, and computes activations again.
    EasyR1,
}

/// Workload of `bench`.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Bench {
    pub workload: Workload,
    pub num_images: usize,
    pub image_px: usize,
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub num_prompts: usize,
    pub num_steps: usize,
}

/// Checkpoint, and the form in which it is loaded.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct ModelSource {
    /// `model_name_or_path`.
    pub name: Option<String>,
    pub dtype: WeightDtype,
    pub device: DeviceChoice,
    /// Device of the reference; `None` for the model's device.
    pub reference_device: Option<DeviceChoice>,
    /// Reference of the KL term, if it is another model.
    pub reference: Option<String>,
    /// Teacher.
    pub teacher: Option<String>,
    /// Whether the reference or teacher has 8 bits per weight.
    pub ref_load_in_8bit: bool,
    /// Whether the reference or teacher has 4 bits per weight.
    pub ref_load_in_4bit: bool,
    /// Memory of a card that `plan` assumes instead of opening one, bytes.
    pub gpu_memory: Option<u64>,
    /// Rates of a card whose times `plan` predicts, with the text that gives them.
    pub gpu_rates: Option<(String, CardRates)>,
    pub adapter: Option<PathBuf>,
    pub merge: bool,
    pub layout: Option<String>,
    /// Files that `export` writes.
    pub format: ExportFormat,
    /// Precision of a GGUF file.
    pub outtype: GgufPrecision,
    pub load_in_8bit: bool,
    pub load_in_4bit: bool,
    pub quantized_activations: QuantizedActivations,
    pub bf16_products: Bf16Products,
    pub init_weights: Option<u64>,
    /// True if adapters are trained, also if training starts from an adapter.
    pub use_peft: bool,
    pub freeze_vision_modules: bool,
}

/// Destination of the model on the hub.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Push {
    pub enabled: bool,
    pub model_id: Option<String>,
    pub private: bool,
    pub strategy: HubStrategy,
}

/// Batch of an optimizer step.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// Unit of `per_device`.
    pub unit: BatchUnit,
    /// Number of prompts or completions processed at a time.
    pub per_device: usize,
    /// Number of such batches per optimizer step.
    pub accumulation: usize,
    /// Number of optimizer steps that share one rollout; number of batches per rollout if `unit` is completions. `None` means one
    /// step.
    pub per_generation: Option<usize>,
}

impl Default for Batch {
    fn default() -> Self {
        let per_device = Algorithm::default().prompts_per_micro_batch;
        let accumulation = RunPlan::default().prompts_per_step / per_device.max(1);
        Self { unit: BatchUnit::Prompts, per_device, accumulation, per_generation: None }
    }
}

/// Default CLIP model of the reward `explanation`, the same as in vqa-nle's trainer.
pub const CLIP: &str = "openai/clip-vit-base-patch16";

/// Default path of the dataset registry.
pub const REGISTRY: &str = "dataset_registry.yaml";

/// Sources of rows.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Rows {
    pub train_file: Vec<PathBuf>,
    pub dataset_use: Vec<String>,
    pub registry: Option<PathBuf>,
    /// Files of rows, each with the image directory at the same position.
    pub data_file_paths: Vec<PathBuf>,
    pub eval_file: Vec<PathBuf>,
    pub eval_dataset_use: Vec<String>,
    pub val_split_ratio: f64,
    /// Configuration of the datasets on the hub. The splits follow.
    pub config: Option<String>,
    pub train_split: String,
    pub test_split: String,
    pub replay: Option<PathBuf>,
    pub roots: Roots,
    pub allow_urls: AllowUrls,
    pub skip_check: bool,
    pub mm_processor_cache_gb: Option<f64>,
}

/// Returns true for the name of a dataset on the hub, `ORG/NAME`: no such file exists, and the name does not end like a file of
/// rows.
pub fn is_on_hub(file: &Path) -> bool {
    let Some(name) = file.to_str() else { return false };
    let ends = ["json", "jsonl", "parquet", "yaml", "yml"];
    let is_file = file.extension().is_some_and(|end| ends.iter().any(|known| end == *known));
    name.contains('/') && is_repo_name(name) && !is_file && !file.exists()
}

impl Rows {
    /// Returns true if a flag names training rows.
    pub fn has_train_rows(&self) -> bool {
        !(self.train_file.is_empty() && self.dataset_use.is_empty() && self.data_file_paths.is_empty())
    }

    /// Returns true if a flag names evaluation rows.
    pub fn has_eval_rows(&self) -> bool {
        !(self.eval_file.is_empty() && self.eval_dataset_use.is_empty()) || self.val_split_ratio > 0.0
    }
}

/// Scoring of completions.
#[derive(Clone, Debug, Default)]
pub struct Rewards {
    /// Names or addresses of the rewards.
    pub funcs: Vec<String>,
    /// Options of the rewards, with as many weights as rewards.
    pub options: RewardOptions,
    /// Accuracy modes: one for all rows, or one per training file.
    pub accuracy_modes: Vec<AccuracyMode>,
    /// Options of rewards that need a model. A name may be used instead of a directory.
    pub scorers: ScorerOptions,
    /// File with the prompt for a judge.
    pub judge_prompt: Option<PathBuf>,
    /// True if correct answers that depend on the order of frames earn more.
    pub temporal_order_bonus: bool,
}

/// Returns the name in the spec `caller:NAME` of a reward or an environment that the program has which runs the command in its process.
pub fn of_caller(spec: &str) -> Option<&str> {
    spec.strip_prefix("caller:")
}

/// Destinations of metrics besides the run directory.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Log {
    pub report_to: Vec<Tracker>,
    /// True if the run is served as a page.
    pub dashboard: bool,
    /// Port of the page; 0 for a free one.
    pub dashboard_port: u16,
    pub prometheus_port: u16,
    /// Programs and webhooks that get a message when the run ends or goes wrong.
    pub notify: Vec<String>,
    /// True if the terminal replaces the page.
    pub tui: bool,
    /// True if time, operations and bytes are counted by phase and kernel.
    pub profile: bool,
    /// True if `doctor` runs kernels and products on every GPU.
    pub gpu: bool,
}

/// Address at which the servers of a command listen.
#[derive(Clone, Debug)]
pub struct Network {
    /// Address; loopback by default.
    pub host: IpAddr,
    /// Names by which clients may call the servers, beside addresses.
    pub allowed_hosts: Vec<String>,
}

impl Default for Network {
    fn default() -> Self {
        Self { host: IpAddr::V4(Ipv4Addr::LOCALHOST), allowed_hosts: Vec::new() }
    }
}

/// Endpoint of `serve`.
#[derive(Clone, Debug)]
pub struct Serving {
    /// Port; 0 for a free one.
    pub port: u16,
    /// Name of the model in requests.
    pub name: Option<String>,
}

/// Processes that train together.
#[derive(Clone, Debug, Default)]
pub struct Processes {
    /// Number of processes that the program starts on this machine; `None` starts none.
    pub nproc_per_node: Option<usize>,
    /// Number of machines of a planned run.
    pub nnodes: Option<usize>,
    /// Address of the first rank for the other machines.
    pub address: Option<String>,
    /// Time without a sign of life after which a rank counts as lost, in seconds.
    pub patience_secs: u64,
    /// Engine that moves gradients.
    pub backend: Backend,
}

/// Engine that moves gradients between processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// NCCL if every process has a GPU, else MPI.
    #[default]
    Auto,
    /// NCCL.
    Nccl,
    /// MPI.
    Mpi,
}

/// Environment that answers completions, with the limits of its answers.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct Turns {
    /// Name of the environment; `None` samples completions of one turn.
    pub environment: Option<String>,
    pub max_turns: usize,
    pub max_tool_tokens: Option<usize>,
    pub max_tool_images: usize,
}

impl Turns {
    /// Returns the limits of the environment's answers; `None` without an environment.
    pub fn limits(&self) -> Option<TurnLimits> {
        self.environment.as_ref().map(|_| TurnLimits {
            max_turns: self.max_turns,
            max_answer_tokens: self.max_tool_tokens,
            max_answer_media: self.max_tool_images,
        })
    }
}

/// Every setting of one run. Settings are equal if all values in the table are, and are serialised as these, by name.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Input and output of the verb.
    pub io: Io,
    /// The checkpoint.
    pub model: ModelSource,
    /// Options of the checkpoint's family, by name.
    pub family: Map<String, Json>,
    /// Sources of rows.
    pub data: Rows,
    /// Options for reading rows.
    pub read: ReadOptions,
    /// Options for building prompts.
    pub prompts: PromptSettings,
    /// Scoring of completions.
    pub rewards: Rewards,
    /// Recipe from which `algorithm` was created.
    pub recipe: &'static Recipe,
    /// Environment that answers completions; `algorithm.sampling` has it ready for use.
    pub turns: Turns,
    /// Loss and sampling.
    pub algorithm: Algorithm,
    /// Learning rates and moments of AdamW.
    pub optimizer: AdamWConfig,
    /// Trained parts; `model.freeze_vision_modules` removes some, depending on the family.
    pub selection: Selection,
    /// Adapters, used if `model.use_peft` is true.
    pub lora: LoraConfig,
    /// Length, logging and checkpoints of the run.
    pub run: RunPlan,
    /// Batch of a step as the user gave it; `algorithm` and `run` count it in prompts.
    pub batch: Batch,
    /// Evaluation during training, and tables of `eval`.
    pub eval: EvalOptions,
    /// Destination of the model on the hub.
    pub push: Push,
    /// Trackers.
    pub log: Log,
    /// Address of the servers.
    pub network: Network,
    /// Endpoint of `serve`.
    pub serve: Serving,
    /// Workload of `bench`.
    pub bench: Bench,
    /// Number of threads; `None` uses all cores.
    pub threads: Option<usize>,
    /// Processes of the run.
    pub ranks: Processes,
    /// Environment variables.
    pub env: Environment,
}

impl PartialEq for Settings {
    fn eq(&self, other: &Self) -> bool {
        Values::of(self) == Values::of(other)
    }
}

impl Serialize for Settings {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(Values::of(self).plain().map(|(flag, value)| (flag.name, value)))
    }
}

impl Default for Settings {
    /// Returns the defaults of the libraries.
    fn default() -> Self {
        Self {
            io: Io { num_rows: 1, ..Io::default() },
            model: ModelSource::default(),
            family: Map::new(),
            data: Rows { train_split: "train".to_owned(), test_split: "test".to_owned(), ..Rows::default() },
            read: ReadOptions::default(),
            prompts: PromptSettings::default(),
            rewards: Rewards {
                funcs: vec!["accuracy".to_owned(), "format".to_owned()],
                accuracy_modes: vec![AccuracyMode::default()],
                ..Rewards::default()
            },
            recipe: &RECIPES[0],
            turns: Turns { max_turns: 8, max_tool_images: 4, ..Turns::default() },
            algorithm: Algorithm::default(),
            optimizer: AdamWConfig::default(),
            selection: Selection::default(),
            lora: LoraConfig::default(),
            run: RunPlan::default(),
            batch: Batch::default(),
            eval: EvalOptions::default(),
            push: Push::default(),
            log: Log { report_to: vec![Tracker::Jsonl], prometheus_port: 9464, ..Log::default() },
            network: Network::default(),
            serve: Serving { port: 8000, name: None },
            bench: Bench {
                workload: Workload::Own,
                num_images: 1,
                image_px: 448,
                prompt_tokens: 44,
                completion_tokens: 64,
                num_prompts: 1,
                num_steps: 3,
            },
            threads: None,
            ranks: Processes { patience_secs: PATIENCE.as_secs(), ..Processes::default() },
            env: Environment::default(),
        }
    }
}

impl Settings {
    /// Stores every value in its field. Settings that a verb does not take keep their defaults.
    ///
    /// # Errors
    /// Returns an error if a row of the table refuses a value, or if settings contradict each other.
    pub fn from_values(values: &Values, env: Environment) -> Result<Self, Problem> {
        let mut settings = Self { env, ..Self::default() };
        for first in [true, false] {
            for flag in flags::all().filter(|flag| flag.first == first) {
                if let Some((value, _)) = values.lookup(flag.name) {
                    (flag.place.set)(&mut settings, value)?;
                }
            }
        }
        settings.rewards.options.weights = reward_weights(values, &settings.rewards)?;
        settings.count_in_prompts()?;
        if !settings.lacks_reward("explanation") && settings.rewards.scorers.explanation_clip_weight > 0.0 {
            settings.rewards.scorers.clip_model.get_or_insert_with(|| CLIP.into());
        }
        settings.rewards.scorers.orientation = settings.prompts.media.orientation;
        if values.lookup("eval_strategy").is_none()
            && settings.run.eval.when == EvalWhen::Never
            && settings.data.has_eval_rows()
        {
            settings.run.eval.when = EvalWhen::Epoch;
        }
        settings.algorithm.sampling.turns = settings.turns.limits();
        // An environment may ask the question.
        settings.read.empty_questions |= settings.turns.environment.is_some();
        settings.name_directories()?;
        Ok(settings)
    }

    /// Converts the batch of a step to prompts and stores it in the plans.
    fn count_in_prompts(&mut self) -> Result<(), Problem> {
        let Batch { unit, per_device, accumulation, per_generation } = self.batch;
        let Processes { nproc_per_node, nnodes, .. } = self.ranks;
        // Without a launcher, the program starts the processes itself; a planned run may have several machines.
        if self.env.processes <= 1 {
            let machines = if self.io.dry_run { nnodes.unwrap_or(1) } else { 1 };
            self.env.processes = nproc_per_node.unwrap_or(1) * machines;
        }
        // All processes share a step.
        let processes = self.env.processes.max(1);
        let each = self.algorithm.num_generations;
        let (at_a_time, prompts) = match unit {
            BatchUnit::Prompts => (per_device, per_device * accumulation * processes),
            BatchUnit::Completions
                if each == 0 || !(per_device * accumulation * processes).is_multiple_of(each) =>
            {
                let over = if processes > 1 { format!(" × {processes} processes") } else { String::new() };
                let all = per_device * accumulation * processes;
                let whole = "`--batch_unit prompts` counts prompts, which always form complete groups";
                let problem = Problem::usage("the batch is not a multiple of `num_generations`")
                    .got(format!(
                        "`per_device_train_batch_size` {per_device} × `gradient_accumulation_steps` {accumulation}{over}: \
                         {all} completions, `num_generations` {each}"
                    ))
                    .expected("a multiple of `num_generations`");
                // The fewest processes whose batches form groups. A launcher starts 8 on a machine with 8 GPUs.
                let fewest = (2..=each).find(|more| (all * more).is_multiple_of(each));
                return Err(match fewest.filter(|_| processes == 1) {
                    Some(fewest) => {
                        let usual = if 8 % fewest == 0 { 8 } else { fewest };
                        problem.help(format!(
                            "is the line from a script for a launcher, such as `torchrun --nproc_per_node {usual}`? Each process has this \
                             batch there, and only {fewest}, or a multiple, form complete groups: give `--nproc_per_node {usual}`. {whole}"
                        ))
                    }
                    None => problem.help(whole),
                });
            }
            BatchUnit::Completions => {
                let prompts = per_device * accumulation * processes / each;
                // Number of complete groups in the given size. It must divide the step.
                let at_a_time = (per_device / each).max(1);
                (if prompts.is_multiple_of(at_a_time) { at_a_time } else { 1 }, prompts)
            }
        };
        (self.algorithm.prompts_per_micro_batch, self.run.prompts_per_step) = (at_a_time, prompts);
        self.run.steps_per_generation = match (unit, per_generation) {
            (_, None) => 1,
            (BatchUnit::Prompts, Some(steps)) => steps,
            // A rollout of part of a step uses the weights from the start of that step.
            (BatchUnit::Completions, Some(batches)) if accumulation.is_multiple_of(batches) => 1,
            (BatchUnit::Completions, Some(batches)) if batches.is_multiple_of(accumulation) => {
                batches / accumulation
            }
            (BatchUnit::Completions, Some(batches)) => {
                return Err(Problem::usage("the batches of a rollout do not form complete steps")
                    .got(format!(
                        "`steps_per_generation` {batches}, `gradient_accumulation_steps` {accumulation}"
                    ))
                    .expected("a multiple of `gradient_accumulation_steps` with `--batch_unit completions`, as in TRL")
                    .help("`--batch_unit prompts` counts optimizer steps"));
            }
        };
        Ok(())
    }

    /// Derives the run directory and the log from the name of the experiment.
    fn name_directories(&mut self) -> Result<(), Problem> {
        let io = &mut self.io;
        if let Some(name) = &io.exp_name {
            plain_name(name)?;
        }
        match (&io.output_dir, &io.exp_name) {
            (Some(dir), Some(name)) => {
                return Err(Problem::usage("two settings give the run directory")
                    .got(format!("`output_dir` {} and `exp_name` {name}", dir.display()))
                    .expected("one of them; `--run_name` names a run in a directory of your choice"));
            }
            (Some(dir), None) => io.log_file = Some(dir.join("log.txt")),
            (None, Some(name)) => {
                let logs = PathBuf::from("runs").join(name).join("log");
                if let Some(log) =
                    self.env.debug_log.as_mut().filter(|log| log.as_path() == Path::new(DEBUG_LOG))
                {
                    *log = logs.join(DEBUG_LOG);
                }
                io.log_file = Some(logs.join("log.txt"));
                io.output_dir = Some(Path::new("checkpoints/rl").join(name));
            }
            (None, None) => {}
        }
        Ok(())
    }

    /// Enables training of adapters, besides the selected parts of the model.
    pub fn train_adapters(&mut self) {
        self.model.use_peft = true;
        (self.selection.llm, self.selection.projector, self.selection.towers) = (false, false, false);
    }

    /// Limits the length of completions in sampling, in prompts (which must leave room for completions) and in rewards of length.
    pub fn limit_completions(&mut self, max_tokens: usize) {
        self.algorithm.sampling.max_completion_length = max_tokens;
        self.prompts.max_completion_length = max_tokens;
        self.rewards.options.max_completion_tokens = max_tokens;
        // The ramp keeps its share of the limit.
        self.rewards.options.overlong_cache_tokens = max_tokens / 5;
    }

    /// Sets the seed of all random numbers.
    pub fn seed(&mut self, seed: u64) {
        (self.algorithm.seed, self.algorithm.sampling.seed, self.lora.seed) = (seed, seed, seed);
        self.data_seed(seed);
    }

    /// Sets the seed of the random numbers for rows and media.
    pub fn data_seed(&mut self, seed: u64) {
        (self.run.rows.seed, self.read.seed, self.prompts.media.seed) = (seed, seed, seed);
    }

    /// Returns the number of optimizer steps between evaluations; 0 if it is not given.
    pub fn eval_steps(&self) -> u64 {
        if let EvalWhen::Steps(steps) = self.run.eval.when { steps } else { 0 }
    }

    /// Returns true if no reward has that name.
    pub fn lacks_reward(&self, name: &str) -> bool {
        !self.rewards.funcs.iter().any(|func| func == name)
    }

    /// Returns true if the model continues prompts that are texts as they stand. A system turn and tools need a template.
    pub fn continues_text_prompts(&self) -> bool {
        self.read.continue_text_prompts
            && self.prompts.render.system.is_none()
            && self.turns.environment.is_none()
    }

    /// Returns true if a tracker gets the metrics.
    pub fn reports_to(&self, tracker: Tracker) -> bool {
        self.log.report_to.contains(&tracker) || self.log.report_to.contains(&Tracker::All)
    }

    /// Returns the reason why nothing is sampled, or `None` if the run samples.
    pub fn not_sampled(&self) -> Option<&'static str> {
        self.run.rows.replay.then_some("with `replay` nothing is sampled")
    }

    /// Returns the reason why nothing is evaluated, or `None` if the run evaluates.
    pub fn no_eval_rows(&self) -> Option<&'static str> {
        (!self.data.has_eval_rows()).then_some(
            "there is no evaluation data: give `eval_file`, `eval_dataset_use` or `val_split_ratio`",
        )
    }
}

/// Returns `reward_weights`, or 1 for each reward if none are given. Weights that name their reward replace those of the list.
fn reward_weights(values: &Values, rewards: &Rewards) -> Result<Vec<f64>, Problem> {
    let mut weights = rewards.options.weights.clone();
    let all = values.rank("reward_weights");
    if weights.is_empty() {
        weights = vec![1.0; rewards.funcs.len()];
    }
    for (reward, setting) in [("format", "format_reward_weight"), ("accuracy", "accuracy_reward_weight")] {
        let Some((value, _)) = values.lookup(setting) else { continue };
        if values.rank(setting) == all {
            return Err(Problem::usage(format!("the weight of `{reward}` is given twice"))
                .got(format!("`reward_weights` and `{setting}`"))
                .expected("one of them"));
        }
        // A list from a stronger source replaces a weight that names its reward.
        let at = rewards.funcs.iter().position(|name| name == reward).filter(|_| values.rank(setting) > all);
        if let Some(slot) = at.and_then(|at| weights.get_mut(at)) {
            *slot = take(value)?;
        }
    }
    Ok(weights)
}

/// Checks that a name is one path component, so that logs and checkpoints of a run stay in their directory.
fn plain_name(name: &str) -> Result<(), Problem> {
    if !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\']) && !name.contains("..") {
        return Ok(());
    }
    let clean: String = name
        .trim_start_matches('.')
        .replace("..", "_")
        .chars()
        .map(|c| if c == '/' || c == '\\' { '-' } else { c })
        .collect();
    let problem = Problem::usage("`exp_name` is not a plain name")
        .got(format!("`{name}`"))
        .expected("a name without `/`, `\\`, `..` or a leading dot");
    Err(if clean.is_empty() {
        problem
    } else {
        problem.help(format!("try `{clean}`, or give a directory with `--output_dir`"))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config;
    use crate::flags::Verb;
    use crate::resolve;
    use crate::values::{Origin, Resolved};
    use omnigrpo_grpo::{AdvantageKind, Aggregation, Kl, RatioLevel, Surrogate};
    use omnigrpo_rewards::{Compat, FormatMode};
    use omnigrpo_train::{ResumeFrom, ScheduleKind};

    fn resolved(verb: Verb, yaml: &str) -> Result<Resolved, Problem> {
        let given = config::parse(yaml, "test", |_| Origin::Flag);
        resolve(verb, given, Environment::default())
    }

    fn train(yaml: &str) -> Settings {
        resolved(Verb::Train, yaml).unwrap().settings
    }

    #[test]
    fn the_loss_is_the_recipe_with_the_given_choices_in_its_place() {
        let clip = |s: &Settings| match s.algorithm.loss.surrogate {
            Surrogate::Clip { low, high, delta } => (low, high, delta),
            other => panic!("{other:?}"),
        };
        let grpo = train("");
        assert_eq!(clip(&grpo), (0.2, 0.2, None));
        assert_eq!(
            (grpo.algorithm.loss.beta, grpo.algorithm.alpha, grpo.algorithm.loss.kl),
            (0.04, 1.0, Kl::K3)
        );
        assert_eq!(grpo.algorithm.advantage, AdvantageKind::GroupStd);
        assert_eq!(grpo.algorithm.loss.aggregation, Aggregation::SequenceMean);
        // One bound sets both clip distances.
        assert_eq!(clip(&train("epsilon: 0.1")), (0.1, 0.1, None));
        assert_eq!(clip(&train("epsilon_high: 0.28\ndelta: 4")), (0.2, 0.28, Some(4.0)));
        let gspo = train("loss_type: gspo");
        assert_eq!(clip(&gspo), (3e-4, 4e-4, None));
        assert_eq!((gspo.algorithm.loss.ratio, gspo.algorithm.loss.beta), (RatioLevel::Sequence, 0.0));
        assert_eq!(train("loss_type: gspo\nbeta: 0.1").algorithm.loss.beta, 0.1);
        assert_eq!(
            train("loss_type: cispo\nepsilon_high: 4").algorithm.loss.surrogate,
            Surrogate::Cispo { cap: 4.0 }
        );
        assert_eq!(train("use_bias_correction_kl: yes").algorithm.loss.kl, Kl::K3Corrected);
        assert_eq!(train("loss_agg: token_sum\nkl: k1_seq").algorithm.loss.kl, Kl::K1);
        assert_eq!(train("scale_rewards: none").algorithm.advantage, AdvantageKind::GroupCenter);
        assert_eq!(train("scale_rewards: batch").algorithm.advantage, AdvantageKind::Batch);
        assert_eq!(train("advantage: group_std_clamped").algorithm.advantage, AdvantageKind::GroupStdClamped);
    }

    #[test]
    fn a_loss_out_of_range_names_its_setting() {
        let error = resolved(Verb::Train, "epsilon: 1.5").unwrap_err().to_string();
        assert!(error.contains("`epsilon`") && error.contains("1.5"), "{error}");
        let error = resolved(Verb::Train, "epsilon_high: 0.3\ndelta: 1.2").unwrap_err().to_string();
        assert!(error.contains("`delta`"), "{error}");
        let error =
            resolved(Verb::Train, "scale_rewards: none\nadvantage: group_std").unwrap_err().to_string();
        assert!(error.contains("`scale_rewards` and `advantage`"), "{error}");
    }

    #[test]
    fn unset_settings_follow_the_ones_they_name() {
        let s = train("learning_rate: 1e-5\nseed: 7\nlogging_steps: 5\ntemperature: 0.7");
        assert_eq!((s.optimizer.projector_lr, s.optimizer.tower_lr), (None, None));
        assert_eq!((s.run.rows.seed, s.run.records.grpo_logging_steps), (7, 5));
        assert_eq!(s.algorithm.sampling.scoring_temperature(), 0.7);
        assert_eq!(s.rewards.options.weights, [1.0, 1.0]);
        assert_eq!(s.run.max_steps, None);
        assert_eq!(train("max_steps: 0").run.max_steps, Some(0));
        let s = resolved(Verb::Eval, "").unwrap().settings;
        assert_eq!((s.algorithm.num_generations, s.algorithm.sampling.temperature), (1, 0.0));
        assert_eq!(s.algorithm.sampling.scoring_temperature(), 1.0);
        assert_eq!(resolved(Verb::Sft, "").unwrap().settings.optimizer.learning_rate, 2e-5);
        assert_eq!(train("").run.eval.when, EvalWhen::Never);
        assert_eq!(train("val_split_ratio: 10%").run.eval.when, EvalWhen::Epoch);
        assert_eq!(train("val_split_ratio: 0.1\neval_steps: 5").run.eval.when, EvalWhen::Steps(5));
    }

    #[test]
    fn directories_follow_the_name_of_an_experiment() {
        let io = train("exp_name: first-try").io;
        assert_eq!(io.output_dir, Some(PathBuf::from("checkpoints/rl/first-try")));
        for bad in ["a/b", "..", ".x", "a\\b", "\"\""] {
            assert!(resolved(Verb::Train, &format!("exp_name: {bad}")).is_err(), "{bad}");
        }
        assert!(resolved(Verb::Train, "exp_name: a\noutput_dir: b").is_err());
        let demo = resolved(Verb::Demo, "").unwrap().settings.io;
        assert_eq!(demo.output_dir, Some(PathBuf::from("runs/demo")));
    }

    #[test]
    fn vlm_r1s_switch_trains_the_towers() {
        let towers = |yaml: &str| {
            let s = train(yaml);
            (s.selection.towers, s.model.freeze_vision_modules)
        };
        assert_eq!(towers(""), (false, false));
        assert_eq!(towers("freeze_vision_modules: true"), (false, true));
        assert_eq!(towers("freeze_vision_modules: false"), (true, false));
        assert_eq!(towers("freeze_vision_modules: false\nuse_peft: true"), (false, false));
        assert_eq!(towers("preset: vivqa-x"), (false, true));
        assert_eq!(towers("preset: vivqa-x\nfreeze_vision_modules: false"), (true, false));
        assert_eq!(towers("preset: vivqa-x\ntune_mm_vision: true"), (true, false));
        assert_eq!(towers("preset: vivqa-x\ntune_mm_vision: false"), (false, true));
        assert_eq!(towers("preset: qwen-mcq\nfreeze_vision_modules: false"), (true, false));
        assert_eq!(towers("preset: r1-v"), (true, false));
        assert!(resolved(Verb::Train, "freeze_vision_modules: true\ntune_mm_vision: true").is_err());
    }

    #[test]
    fn weights_go_with_their_rewards() {
        let weights = |yaml: &str| train(yaml).rewards.options.weights;
        assert_eq!(weights("format_reward_weight: 0.3\naccuracy_reward_weight: 0.7"), [0.7, 0.3]);
        assert_eq!(weights("accuracy_reward_weight: 2"), [2.0, 1.0]);
        assert_eq!(weights("preset: qwen-mcq\nformat_reward_weight: 1"), [0.7, 1.0]);
        assert_eq!(weights("preset: qwen-mcq\nreward_funcs: format"), [0.3]);
        assert_eq!(weights("preset: qwen-mcq\nreward_funcs: random format accuracy"), [1.0, 0.3, 0.7]);
        let third = 1.0 / 3.0;
        assert_eq!(weights("preset: vivqa-x\nreward_funcs: accuracy format"), [third, third]);
        assert_eq!(
            weights("preset: vivqa-x\nreward_funcs: [accuracy, format, explanation, mine=cmd:x]"),
            [third, third, 1.0, 1.0]
        );
        // A list that overrides the preset is used unchanged.
        assert_eq!(weights("preset: vivqa-x\nreward_funcs: format\nreward_weights: 5"), [5.0]);
        for wrong in [
            "reward_weights: 1 2\nformat_reward_weight: 3",
            "reward_funcs: accuracy\nformat_reward_weight: 3",
            "preset: qwen-mcq\nreward_weights: 1",
        ] {
            assert!(resolved(Verb::Train, wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_stronger_source_wins_over_another_name_for_the_same() {
        let run = |yaml: &str| train(yaml).run;
        assert_eq!(run("preset: vivqa-x").max_steps, Some(500));
        assert_eq!(run("preset: vivqa-x\nnum_train_epochs: 2").max_steps, None);
        assert_eq!(run("preset: vivqa-x\nnum_train_epochs: 1\nmax_steps: 7").max_steps, Some(7));
        assert_eq!(run("preset: humanomni\nmax_steps: -1").num_epochs, 2.0);
        let loss = |yaml: &str| train(yaml).algorithm.advantage;
        assert_eq!(loss("preset: qwen-mcq\nscale_rewards: none"), AdvantageKind::GroupCenter);
        assert_eq!(train("preset: qwen-mcq\nwarmup_steps: 3").run.schedule.warmup_ratio, 0.0);
        assert_eq!(train("preset: r1-v\nfps: 1").prompts.media.video.nframes, None);
    }

    #[test]
    fn other_commands_take_of_a_preset_what_is_not_training() {
        for verb in [Verb::Eval, Verb::Generate] {
            let s = resolved(verb, "preset: qwen-mcq").unwrap().settings;
            let plain = resolved(verb, "").unwrap().settings;
            assert_eq!(s.algorithm.num_generations, 1);
            assert_eq!(s.algorithm.sampling.temperature, plain.algorithm.sampling.temperature);
            assert_eq!(s.algorithm.sampling.scoring_temperature(), 1.0);
            assert_eq!(
                (s.algorithm.sampling.max_completion_length, s.prompts.media.video.max_frames),
                (512, Some(8))
            );
            assert_eq!(s.prompts.media.image.max_pixels, Some(451_584));
        }
        let s = resolved(Verb::Eval, "preset: r1-v").unwrap().settings;
        assert_eq!(s.read.template.name, "r1-v");
        let sft = resolved(Verb::Sft, "preset: humanomni").unwrap().settings;
        assert_eq!((sft.optimizer.learning_rate, sft.run.num_epochs), (2e-5, 5.0));
        assert_eq!(sft.run.schedule.kind, ScheduleKind::Cosine);
        assert_eq!(sft.read.template.name, "none");
        let sft = resolved(Verb::Sft, "preset: qwen-video").unwrap().settings;
        assert_eq!((sft.optimizer.learning_rate, sft.run.num_epochs), (2e-5, 1.0));
        assert_eq!((sft.optimizer.weight_decay, sft.prompts.media.image.max_pixels), (0.0, Some(451_584)));
    }

    #[test]
    fn the_name_of_an_experiment_may_come_from_the_environment() {
        let env = |name: &str| Environment::read(|var| (var == "EXP_NAME").then(|| name.to_owned()));
        let run = |verb, yaml: &str, name: &str| {
            let given = config::parse(yaml, "test", |_| Origin::Flag);
            resolve(verb, given, env(name)).map(|resolved| resolved.settings.io.output_dir)
        };
        assert_eq!(run(Verb::Train, "", "vi").unwrap(), Some("checkpoints/rl/vi".into()));
        assert_eq!(run(Verb::Train, "exp_name: mine", "vi").unwrap(), Some("checkpoints/rl/mine".into()));
        assert_eq!(run(Verb::Sft, "output_dir: out", "vi").unwrap(), Some("out".into()));
        assert_eq!(run(Verb::Export, "merge: true\nadapter_path: a", "vi").unwrap(), None);
        assert!(run(Verb::Train, "", "a/b").is_err());
    }

    #[test]
    fn resuming_is_never_a_folder_called_false() {
        for (text, resume) in [
            ("auto", ResumeFrom::Newest),
            ("True", ResumeFrom::Newest),
            ("must", ResumeFrom::Must),
            ("false", ResumeFrom::Start),
            ("never", ResumeFrom::Start),
            ("runs/a/checkpoint-3", ResumeFrom::Path("runs/a/checkpoint-3".into())),
        ] {
            assert_eq!(train(&format!("resume_from_checkpoint: {text}")).run.resume.from, resume);
        }
    }

    #[test]
    fn rewards_get_their_settings() {
        let s = train(
            "reward_funcs: [accuracy, format, \"cmd:x\"]\nformat_mode: graded\naccuracy_mode: \
             mcq_iou\nreward_timeout_secs: 1.5\n\
             reward_workers: 3\nreward_weights: [2, 1, 0]\nmax_completion_length: 100",
        );
        let options = s.rewards.options;
        assert_eq!((options.format_mode, options.accuracy_mode), (FormatMode::Graded, AccuracyMode::McqIou));
        assert_eq!((options.max_completion_tokens, options.overlong_cache_tokens), (100, 20));
        assert_eq!(options.external.timeout, Duration::from_millis(1500));
        assert_eq!((options.external.pool_size, options.weights), (3, vec![2.0, 1.0, 0.0]));
    }

    #[test]
    fn lists_and_objects_are_read_from_files() {
        let s =
            train("reward_funcs: accuracy random\nreward_weights: 1, 0.5\nchat_template_kwargs: {a: [1, x]}");
        assert_eq!(s.rewards.funcs, ["accuracy", "random"]);
        assert_eq!(s.rewards.options.weights, [1.0, 0.5]);
        assert_eq!(Json::Object(s.prompts.render.kwargs), serde_json::json!({"a": [1, "x"]}));
        let s = train("train_file: [\"a,b.json\", c.json]\ncompat: [s2_accuracy, s4-format]");
        assert_eq!(s.data.train_file, [PathBuf::from("a,b.json"), PathBuf::from("c.json")]);
        assert_eq!(s.rewards.options.compat, [Compat::S2Accuracy, Compat::S4Format].into());
    }
}
