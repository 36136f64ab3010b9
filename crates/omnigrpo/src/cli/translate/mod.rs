//! `translate`: turns the launch script or settings file of another trainer into a file for `train --config`.
//!
//! A script of a shell is read by `shell`, a training script by `python`; neither is run. Its settings pass through the tables of
//! `crate::settings::foreign`, as on the command line. The result names for each setting what it comes from, and what is different
//! here. Settings without a counterpart follow in comments with the reason.

mod launch;
mod python;
mod shell;
mod systems;

use std::cell::LazyCell;
use std::collections::HashSet;
use std::path::Path;

use serde_json::Value as Json;

use super::draft::{Draft, one_line};
use crate::settings::layer::{Entry, Layer, is_secret};
use crate::settings::values::Raw;
use crate::settings::{Environment, Given, Kind, Origin, Problem, Value, Verb, find, foreign};
use launch::Launch;
use python::{Argument, Call, Script};
use systems::{
    Counts, EASY_R1, MS_SWIFT, QWEN_VIDEO, R1_OMNI, R1_V, System, TRL, TRL_PEFT, UNSLOTH, VERL, VIDEO_R1,
    VIVQA_X, VLM_R1,
};

/// Maximum number of settings of a script.
const MAX_SETTINGS: usize = 4096;
/// Variables of a script that set the number of its processes or settings of a [`System`].
const VARIABLES: &[&str] = &[
    "NPROC_PER_NODE",
    "NNODES",
    "CUDA_VISIBLE_DEVICES",
    "MIN_PIXELS",
    "MAX_PIXELS",
    "FPS",
    "FPS_MIN_FRAMES",
    "FPS_MAX_FRAMES",
    "NFRAMES",
    "VIDEO_MIN_PIXELS",
    "VIDEO_MAX_PIXELS",
    "VIDEO_TOTAL_PIXELS",
];

/// The batch of a process.
const EACH: &str = "per_device_train_batch_size";

/// Settings whose meaning differs from that in the other trainers.
const DIFFERENCES: &[(&str, &str)] = &[
    ("max_prompt_length", "a longer prompt is skipped, never cut"),
    ("seed", "the same seed draws other numbers than there"),
    ("resume_from_checkpoint", "an unfinished run in `output_dir` is resumed by default"),
    ("push_to_hub", "needs HF_TOKEN in the environment"),
    ("lora_target_modules", "names of weights here; `all-linear` are those of the language model"),
    ("importance_sampling_correction", "rollouts come from the same weights, so it has little to correct"),
    ("reward_funcs", "`omnigrpo rewards list` describes each; a function of yours is FILE.py:FUNCTION"),
];

/// A file of another trainer, as settings.
struct Source {
    system: &'static System,
    entries: Vec<Entry>,
    launch: Launch,
    /// Differences that change training.
    changes: Vec<String>,
    notes: Vec<String>,
}

/// The translation of a file.
#[derive(Debug)]
pub struct Translation {
    /// Text of a file for `--config`.
    pub text: String,
    /// Settings that change training there and have no counterpart here, each with advice.
    pub changes: Vec<String>,
}

/// Translates a file. `read` returns the text of a file that the script names, if there is one.
///
/// # Errors
/// Returns an error if the file is not a launch script, a training script or a file of settings that configures one GRPO run.
pub fn translate(
    text: &str,
    path: &Path,
    home: &str,
    read: impl Fn(&Path) -> Option<String>,
) -> Result<Translation, Problem> {
    let name = path.display().to_string();
    let source = match path.extension().and_then(|extension| extension.to_str()) {
        Some("yaml" | "yml") => of_yaml(text, &name),
        Some("py") => of_python(text, path),
        _ => of_shell(text, path, home, &read),
    };
    let mut source = source.map_err(|problem| problem.at(name.clone()))?;
    hide_passwords(&mut source);
    if source.entries.len() > MAX_SETTINGS {
        return Err(Problem::usage("the file has too many settings")
            .at(name)
            .got(source.entries.len().to_string())
            .expected(format!("at most {MAX_SETTINGS}")));
    }
    Ok(write(source, &name, &read))
}

// Later parts of a launch override earlier ones.
fn of_shell(
    text: &str,
    path: &Path,
    home: &str,
    read: &impl Fn(&Path) -> Option<String>,
) -> Result<Source, Problem> {
    let name = path.display();
    let shell::Script { lines, notes: mut undecided } =
        shell::read(text, path, home, VARIABLES).map_err(|error| {
            Problem::usage("the file is no shell script").got(error).expected(
                "a launch script for a shell, a training script (`.py`) or a file of settings (`.yaml`)",
            )
        })?;
    let mut launches: Vec<_> = lines.iter().filter_map(|line| Some((line, launched(&line.words)?))).collect();
    let Some((line, (system, at))) = launches.pop() else {
        return Err(Problem::usage("the file starts no GRPO training that this program knows").expected(
            "a command of TRL, VLM-R1, R1-V, R1-Omni, qwen-vl-finetune, ms-swift, Unsloth, EasyR1 or verl, such as \
             `torchrun … grpo.py …`, `swift rlhf …` or `python -m verl.trainer.main_ppo …`",
        ));
    };
    if !launches.is_empty() {
        return Err(Problem::usage("the file starts several trainings")
            .got(format!("{} commands", launches.len() + 1))
            .expected("one per file")
            .help("copy each command into a file of its own"));
    }
    let (launcher, words) = line.words.split_at(at);
    let mut entries = entries_of(words);
    let mut notes = vec![format!("Translated from {name}, a launch script of {}.", system.name)];
    // A condition that depends on the machine may decide a setting.
    let (folders, changes): (Vec<String>, Vec<String>) =
        undecided.drain(..).partition(|note| note.contains("changes to the folder"));
    notes.extend(folders);
    for (variable, name) in system.variables {
        if let Some(value) = line.environment.get(*variable)
            && !entries.iter().any(|entry| underscored(entry) == *name)
        {
            entries.push(entry(name, vec![value.clone()], Origin::Environment(variable)));
        }
    }
    let launch = launch::of(launcher, &line.environment, read);
    let mut source = Source { system, entries, launch, changes, notes };
    source.include_script(launcher, read);
    source.include_config(read)?;
    if let Some(name) = source.take("accelerate_config") {
        source.launch.accelerate_config(&name, &line.environment, read);
    }
    Ok(source)
}

impl Source {
    /// Removes a setting and returns its text.
    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.entries.iter().position(|entry| underscored(entry) == name)?;
        Some(self.entries.remove(at).text())
    }

    /// Adds the settings of a file that the command does not give itself.
    fn add_missing(&mut self, file: Vec<Entry>) {
        let own: HashSet<String> = self.entries.iter().map(underscored).collect();
        self.entries.extend(file.into_iter().filter(|entry| !own.contains(&underscored(entry))));
    }

    /// Includes the settings of the training script that a launcher starts.
    fn include_script(&mut self, launcher: &[String], read: &impl Fn(&Path) -> Option<String>) {
        if let Some(script) = launcher.last().filter(|word| word.ends_with(".py"))
            && let Some(text) = read(Path::new(script))
            && let Ok(own) = of_python(&text, Path::new(script))
        {
            self.add_missing(own.entries);
            self.notes.extend(own.notes.into_iter().skip(1));
            self.notes.push(format!("Settings of {script}, which the script starts, are included."));
        }
    }

    /// Includes the settings of the file that the command names.
    fn include_config(&mut self, read: &impl Fn(&Path) -> Option<String>) -> Result<(), Problem> {
        let is_config = |entry: &Entry| matches!(entry.name.as_str(), "config" | "easyr1.config");
        let Some(at) = self.entries.iter().position(is_config) else { return Ok(()) };
        let file = self.entries.remove(at).text();
        let Some(text) = read(Path::new(&file)) else {
            self.changes.push(format!(
                "{file}, which the script names, was not found; the defaults of {} stand for it.",
                self.system.name
            ));
            return Ok(());
        };
        let base = of_yaml(&text, &file)?;
        self.add_missing(base.entries);
        self.notes.push(format!("Settings of {file}, which the script names, are included."));
        Ok(())
    }
}

/// Returns the name of a setting with underscores. Flags may be written with dashes.
fn underscored(entry: &Entry) -> String {
    entry.name.replace('-', "_")
}

/// Returns the trainer that a command starts, and the index of its first argument.
fn launched(words: &[String]) -> Option<(&'static System, usize)> {
    let pair = |at: usize, first: &str, second: &str| {
        words[at].ends_with(first) && words.get(at + 1).is_some_and(|word| word == second)
    };
    let all = LazyCell::new(|| words.join(" ").to_ascii_lowercase());
    let is_grpo = LazyCell::new(|| all.contains("grpo"));
    for (at, word) in words.iter().enumerate() {
        match word.as_str() {
            _ if pair(at, "swift", "rlhf") => return Some((&MS_SWIFT, at + 2)),
            _ if pair(at, "trl", "grpo") => return Some((&TRL, at + 2)),
            "verl.trainer.main" => return Some((&EASY_R1, at + 1)),
            module if module.contains("main_ppo") || module.contains("main_dapo") => {
                return Some((&VERL, at + 1));
            }
            script if script.ends_with("swift/cli/rlhf.py") => return Some((&MS_SWIFT, at + 1)),
            script if script.ends_with(".py") && *is_grpo => {
                let script = script.to_ascii_lowercase();
                let system = match () {
                    () if all.contains("humanomni") => &R1_OMNI,
                    () if all.contains("vivqa") => &VIVQA_X,
                    () if script.contains("grpo_jsonl") || script.contains("grpo_rec") => &VLM_R1,
                    () if all.contains("--data_file_paths") => &VLM_R1,
                    () if script.contains("train_grpo") || all.contains("--dataset_use") => &QWEN_VIDEO,
                    () if all.contains("--temporal") || all.contains("--len_control") => &VIDEO_R1,
                    () if script.contains("open_r1/") => &R1_V,
                    () => &TRL,
                };
                return Some((system, at + 1));
            }
            _ => {}
        }
    }
    None
}

/// Splits the arguments of a command into settings.
fn entries_of(words: &[String]) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut open = false;
    for word in words {
        // Hydra's marks for a setting that is added or replaced.
        if let Some((name, value)) = foreign::dotted(word.trim_start_matches('+')) {
            open = false;
            entries.push(entry(name, vec![value.to_owned()], Origin::Flag));
        } else if let Some(name) = word.strip_prefix("--").filter(|name| !name.is_empty()) {
            let (name, value) =
                name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value)));
            open = true;
            entries.push(entry(name, value.map(str::to_owned).into_iter().collect(), Origin::Flag));
        } else if let (true, Some(Entry { raw: Some(Raw::Arguments(words)), .. })) =
            (open, entries.last_mut())
        {
            words.push(word.clone());
        }
    }
    for entry in &mut entries {
        // A bare flag is a switch. A variable without a value leaves another flag bare.
        let is_switch =
            find(&entry.name).is_none_or(|flag| matches!(flag.kind, Kind::Bool | Kind::Switch(_)));
        match &mut entry.raw {
            Some(Raw::Arguments(words)) if words.is_empty() && is_switch => words.push("true".to_owned()),
            Some(Raw::Arguments(words)) if words.is_empty() => entry.raw = None,
            _ => {}
        }
    }
    entries
}

fn entry(name: &str, words: Vec<String>, origin: Origin) -> Entry {
    Entry { name: name.to_owned(), raw: Some(Raw::Arguments(words)), origin }
}

/// Replaces passwords and keys in addresses, and adds a note about each.
fn hide_passwords(source: &mut Source) {
    for entry in &mut source.entries {
        let Some(Raw::Arguments(words) | Raw::Items(words)) = &mut entry.raw else { continue };
        for word in words.iter_mut().filter(|word| word.contains("://")) {
            let hidden = omnigrpo_rewards::redacted(word);
            if hidden != *word {
                source
                    .notes
                    .push(format!("The address of `{}` has a secret, which is left out here.", entry.name));
                *word = hidden;
            }
        }
    }
}

fn of_yaml(text: &str, name: &str) -> Result<Source, Problem> {
    let json: Json = serde_saphyr::from_str(text).map_err(|error| {
        Problem::usage("the file is no YAML file of settings").got(error.without_snippet().to_string())
    })?;
    let Json::Object(all) = &json else {
        return Err(Problem::usage("the file has no settings").expected("lines of `setting: value`"));
    };
    let system = match () {
        () if all.contains_key("actor_rollout_ref") => &VERL,
        () if all.contains_key("worker") => &EASY_R1,
        () if all.contains_key("rlhf_type") => &MS_SWIFT,
        // A file for the launcher alone.
        () if all.contains_key("distributed_type") && all.contains_key("compute_environment") => {
            return Err(Problem::usage("the file configures accelerate, and no training")
                .expected("the script that names it, which `translate` reads together with it"));
        }
        () => &TRL,
    };
    let mut entries = Vec::new();
    flatten("", &json, name, &mut entries);
    let notes = vec![format!("Translated from {name}, a file of settings of {}.", system.name)];
    Ok(Source { system, entries, launch: Launch::default(), changes: Vec::new(), notes })
}

/// Turns nested settings into settings with dotted names. A mapping under a name without dots is the value of one setting.
fn flatten(path: &str, json: &Json, file: &str, entries: &mut Vec<Entry>) {
    let plain = |json: &Json| match json {
        Json::String(text) => text.clone(),
        other => other.to_string(),
    };
    let origin = Origin::Config(file.to_owned());
    match json {
        Json::Object(map)
            if path.is_empty() || foreign::dotted(&format!("{path}.x=1")).is_some() && !map.is_empty() =>
        {
            for (name, value) in map {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, value, file, entries);
            }
        }
        Json::Object(map) => {
            entries.push(Entry { name: path.to_owned(), raw: Some(Raw::Object(map.clone())), origin });
        }
        // Hydra writes a list as one word.
        Json::Array(items) if path.contains('.') => {
            let items: Vec<String> = items.iter().map(plain).collect();
            entries.push(entry(path, vec![format!("[{}]", items.join(","))], origin));
        }
        Json::Array(items) => {
            let raw = Some(Raw::Items(items.iter().map(plain).collect()));
            entries.push(Entry { name: path.to_owned(), raw, origin });
        }
        // A setting without a value has its default.
        Json::Null => {}
        scalar => entries.push(entry(path, vec![plain(scalar)], origin)),
    }
}

fn of_python(text: &str, path: &Path) -> Result<Source, Problem> {
    let script =
        python::read(text).map_err(|error| Problem::usage("the file is no Python script").got(error))?;
    if !script.calls.iter().any(|call| matches!(call.name, "GRPOConfig" | "GRPOTrainer")) {
        return Err(Problem::usage("the script configures no GRPO training")
            .expected("a call of `GRPOConfig` or `GRPOTrainer` of TRL or Unsloth"));
    }
    let is_unsloth = script.imports.iter().any(|module| module.starts_with("unsloth"));
    let makes_adapters = script.calls.iter().any(|call| call.name == "LoraConfig");
    let system = match (is_unsloth, makes_adapters) {
        (true, _) => &UNSLOTH,
        (false, true) => &TRL_PEFT,
        (false, false) => &TRL,
    };
    let mut notes =
        vec![format!("Translated from {}, a training script for {}.", path.display(), system.name)];
    let mut changes = Vec::new();
    let (mut entries, mut seen): (Vec<Entry>, HashSet<String>) = (Vec::new(), HashSet::new());
    for call in &script.calls {
        let mut own = match call.name {
            "GRPOConfig" | "LoraConfig" | "get_peft_model" | "BitsAndBytesConfig" => {
                of_config(call, &mut changes)
            }
            "GRPOTrainer" => of_trainer(call, &script, path, (&mut notes, &mut changes)),
            "from_pretrained" => of_model(call),
            "load_dataset" => of_dataset(call, &mut changes),
            _ => Vec::new(),
        };
        // The first call counts: a processor is loaded after the model, under the same name.
        own.retain(|entry| seen.insert(entry.name.clone()));
        entries.extend(own);
    }
    let adapters = script.calls.iter().any(|call| matches!(call.name, "LoraConfig" | "get_peft_model"));
    if adapters && !seen.contains("use_peft") {
        entries.push(entry("use_peft", vec!["true".to_owned()], Origin::Config("adapters".to_owned())));
    }
    Ok(Source { system, entries, launch: Launch::default(), changes, notes })
}

/// Returns an argument of a call as a setting.
fn of_argument(call: &Call, name: &str, words: &[String]) -> Entry {
    entry(name, words.to_vec(), Origin::Config(format!("line {}", call.line)))
}

/// Returns the named argument of a call, if it is a plain value, as the setting `to`.
fn named(call: &Call, from: &str, to: &str) -> Option<Entry> {
    match call.named.iter().find(|(name, _)| *name == from) {
        Some((_, Argument::Words(words))) => Some(of_argument(call, to, words)),
        _ => None,
    }
}

/// Returns the first positional argument of a call, if it is a plain value, as a setting.
fn first(call: &Call, name: &str) -> Option<Entry> {
    match call.positional.first() {
        Some(Argument::Words(words)) => Some(of_argument(call, name, words)),
        _ => None,
    }
}

/// Returns a note on an argument that is not a plain value.
fn unread(call: &Call, name: &str, source: &str) -> String {
    const MOST: usize = 200;
    let source: String = if is_secret(name) { "…".to_owned() } else { source.chars().take(MOST).collect() };
    format!(
        "`{name}` in line {} is `{}`, which is not a plain value: set it here if it matters.",
        call.line,
        omnigrpo_rewards::redacted(&source.split_whitespace().collect::<Vec<_>>().join(" "))
    )
}

/// Reads the arguments of a configuration, whose names are those of settings.
fn of_config(call: &Call, changes: &mut Vec<String>) -> Vec<Entry> {
    let mut own = Vec::new();
    for (name, argument) in &call.named {
        match argument {
            Argument::Words(words) => own.push(of_argument(call, name, words)),
            // A setting without effect here needs no value.
            Argument::Source(_)
                if matches!(foreign::fate(name, "x", |_| None), Some(foreign::Fate::Dropped(_))) => {}
            Argument::Source(source) => changes.push(unread(call, name, source)),
        }
    }
    own
}

/// Reads the model and the rewards of a trainer.
fn of_trainer(
    call: &Call,
    script: &Script,
    path: &Path,
    (notes, changes): (&mut Vec<String>, &mut Vec<String>),
) -> Vec<Entry> {
    let mut own: Vec<Entry> = Vec::new();
    for (name, argument) in &call.named {
        match (*name, argument) {
            ("model", Argument::Words(words)) => own.push(of_argument(call, "model_name_or_path", words)),
            ("reward_funcs", Argument::Words(words)) => {
                let is_function = |word: &String| script.functions.contains(word.as_str());
                if words.iter().any(is_function) {
                    notes.push(
                        "Rewards are functions of the script. To use them, this program imports the script: move \
                         them into a file of their own, so that the import starts no training."
                            .to_owned(),
                    );
                }
                let words: Vec<String> = words
                    .iter()
                    .map(|word| match is_function(word) {
                        true => format!("{}:{word}", path.display()),
                        false => word.clone(),
                    })
                    .collect();
                own.push(of_argument(call, name, &words));
            }
            ("reward_funcs", Argument::Source(source)) => changes.push(unread(call, name, source)),
            _ => {}
        }
    }
    own
}

/// Reads the arguments with which a model is loaded.
fn of_model(call: &Call) -> Vec<Entry> {
    // Unsloth gives the name of the model by name.
    let model = named(call, "model_name", "model_name_or_path").or_else(|| first(call, "model_name_or_path"));
    let others = call.named.iter().filter(|(name, _)| *name != "model_name" && foreign::knows(name));
    let own_names = call.named.iter().filter(|(name, _)| find(name).is_some());
    let plain = others.chain(own_names).filter_map(|(name, argument)| match argument {
        Argument::Words(words) => Some(of_argument(call, name, words)),
        Argument::Source(_) => None,
    });
    model.into_iter().chain(plain).collect()
}

/// Reads the name and the split of a dataset, or its files.
fn of_dataset(call: &Call, changes: &mut Vec<String>) -> Vec<Entry> {
    /// Formats that `load_dataset` reads from files.
    const FORMATS: [&str; 5] = ["json", "parquet", "csv", "imagefolder", "arrow"];
    let argument = |name: &str| call.named.iter().find(|(own, _)| *own == name).map(|(_, argument)| argument);
    let of_files = matches!(call.positional.first(), Some(Argument::Words(words)) if words.len() == 1 && FORMATS.contains(&words[0].as_str()));
    let rows = match (of_files, argument("data_files").or_else(|| argument("data_dir"))) {
        (true, Some(Argument::Words(files))) => Some(of_argument(call, "train_file", files)),
        (true, Some(Argument::Source(source))) => {
            changes.push(unread(call, "data_files", source));
            None
        }
        (true, None) => None,
        (false, _) => first(call, "dataset_name").or_else(|| named(call, "path", "dataset_name")),
    };
    // Files have one split, which is called train.
    let split =
        named(call, "split", "dataset_train_split").filter(|split| !(of_files && split.text() == "train"));
    rows.into_iter().chain(split).collect()
}

/// Settings of a translation while it is made.
struct Translated {
    draft: Draft,
    system: &'static System,
    /// Settings that have a default of the script's trainer.
    defaults: HashSet<&'static str>,
    changes: Vec<String>,
}

fn write(source: Source, file: &str, read: &impl Fn(&Path) -> Option<String>) -> Translation {
    let Source { system, mut entries, mut launch, changes, notes } = source;
    // The former name of ms-swift.
    for entry in entries.iter_mut().filter(|entry| underscored(entry) == "train_type") {
        entry.name = "tuner_type".to_owned();
    }
    for entry in entries.iter_mut().filter(|entry| entry.name == "system") {
        // ms-swift reads a file if there is one.
        let text = Some(entry.text()).filter(|file| file.len() < 256 && !file.contains('\n'));
        if let Some(text) = text.and_then(|file| read(Path::new(&file))) {
            entry.raw = Some(Raw::Arguments(vec![text.trim_end().to_owned()]));
        }
    }
    let written: Vec<(String, String)> =
        entries.iter().map(|entry| (underscored(entry), entry.text())).collect();
    let given = |name: &str| written.iter().any(|(own, _)| own == name);
    for (name, value) in system.defaults.iter().filter(|(name, _)| !given(name)) {
        entries.push(entry(name, vec![(*value).to_owned()], Origin::Preset(system.name.to_owned())));
    }
    let Layer { given, mut dropped, changing, problems, became, .. } =
        Layer::read(entries, Some(Verb::Train));
    let mut this = Translated { draft: Draft::default(), system, defaults: HashSet::new(), changes };
    for given in given.into_iter().filter(|given| !given.flag.command_line_only) {
        this.put(given, &written, &became);
    }
    // Columns with these names are read in any case, and rows without such media lack them.
    for (name, own) in [("image_column", "images"), ("video_column", "videos")] {
        if this.draft.value(name) == Some(&Value::Text(own.to_owned())) {
            this.draft.take(name);
        }
    }
    if let Some((Value::Text(file), _)) = this.draft.take("deepspeed") {
        launch.deepspeed(&file, read);
    }
    if system.counts == Counts::Rollouts {
        of_ray(&mut launch, &written, system);
    }
    this.preset();
    this.count_updates();
    this.divide(&launch);
    this.complete_groups();
    this.rewards(&given_names(&written));
    this.changes.extend(launch.open);
    this.changes.extend(changing.iter().map(|(written, why)| format!("{written}: {why}")));
    this.changes.extend(problems.iter().map(Problem::in_one_line));
    for (name, reason) in this.draft.settle() {
        match name {
            // A default that means nothing in this run is no loss.
            Some(name) if this.defaults.contains(name) => {}
            Some(name) if reason.contains("has no effect in this run") => {
                dropped.push((name.to_owned(), reason))
            }
            _ => this.changes.push(reason),
        }
    }
    this.leave_out_idle_defaults();
    let text = this.text(file, &notes, &dropped);
    Translation { text, changes: this.changes }
}

/// Reads the processes of verl and EasyR1, which are settings, and what FSDP divides.
fn of_ray(launch: &mut Launch, written: &[(String, String)], system: &System) {
    let given = |name: &str| written.iter().find(|(own, _)| own == name).map(|(_, text)| text.as_str());
    let value = |name: &str| {
        let default = || system.defaults.iter().find(|(own, _)| *own == name).map(|(_, text)| *text);
        given(name).or_else(default)
    };
    let number = |name: &str| value(name).map(|text| text.parse::<u64>().map_err(|_| text.to_owned()));
    const EACH: &str = "trainer.n_gpus_per_node";
    match number(EACH) {
        Some(Ok(processes)) => launch.processes = Some((processes, format!("`{EACH}`"))),
        Some(Err(text)) => launch.open.push(format!(
            "The number of processes is unknown (`{EACH}` {text}); write it as `nproc_per_node`, and divide \
             `gradient_accumulation_steps` by it."
        )),
        None => {}
    }
    if let Some(Ok(machines)) = number("trainer.nnodes") {
        launch.machines = machines;
    }
    let full =
        given("worker.actor.fsdp.enable_full_shard").is_none_or(|text| !text.eq_ignore_ascii_case("false"));
    let uses_fsdp = given("actor_rollout_ref.actor.strategy").is_none_or(|text| text.starts_with("fsdp"));
    if uses_fsdp {
        let shard = if full { "weights" } else { "gradients" };
        launch.shard = Some((shard, "FSDP".to_owned()));
    }
}

fn given_names(written: &[(String, String)]) -> Vec<&str> {
    written.iter().map(|(name, _)| name.as_str()).collect()
}

impl Translated {
    /// Puts a setting into the draft, with comments about its source and its meaning here. `became` has the original texts of
    /// settings with another name here.
    fn put(&mut self, given: Given, written: &[(String, String)], became: &[(&str, String)]) {
        let Given { flag, value, origin } = given;
        let source = match origin {
            Origin::Preset(_) => {
                self.defaults.insert(flag.name);
                Some(format!("default of {}", self.system.name))
            }
            _ => became.iter().find(|(name, _)| *name == flag.name).map(|(_, text)| format!("from {text}")),
        };
        let difference =
            DIFFERENCES.iter().find(|(name, _)| *name == flag.name).map(|(_, text)| (*text).to_owned());
        let own = |name: &str| name == flag.name || flag.aliases.contains(&name);
        let is_open = |text: &str| text.contains(['$', '`']) || text.starts_with('<') && text.ends_with('>');
        let is_open = written.iter().any(|(name, text)| own(name) && is_open(text))
            || source.as_deref().is_some_and(|source| source.contains('$'));
        let fill =
            is_open.then(|| "fill in what begins with `$`, or stands in backquotes or angles".to_owned());
        self.draft.put(flag.name, value, source.into_iter().chain(difference).chain(fill).collect());
    }

    /// Returns the text of the file: settings, and comments about the others.
    fn text(&self, file: &str, notes: &[String], dropped: &[(String, String)]) -> String {
        let mut text = one_line(&format!(
            "# omnigrpo train --config {}",
            Path::new(file).with_extension("yaml").display()
        ));
        text.push('\n');
        notes.iter().for_each(|note| text.push_str(&format!("# {}\n", one_line(note))));
        const NEEDED: [(&str, &[&str]); 3] = [
            ("model_name_or_path", &[]),
            ("train_file", &["dataset_use", "data_file_paths"]),
            ("output_dir", &["exp_name"]),
        ];
        let lacks = |(name, others): &(&str, &[&str])| {
            !self.draft.has(name) && !others.iter().any(|other| self.draft.has(other))
        };
        let missing: Vec<String> =
            NEEDED.iter().filter(|needed| lacks(needed)).map(|(name, _)| (*name).to_owned()).collect();
        // The processes of verl and EasyR1 have counterparts.
        let is_used = |(written, _): &&(String, String)| {
            !["trainer.n_gpus_per_node", "trainer.nnodes"]
                .contains(&written.split(' ').next().unwrap_or_default())
        };
        let dropped: Vec<String> =
            dropped.iter().filter(is_used).map(|(written, why)| format!("{written}: {why}")).collect();
        let list = |title: &str, items: &[String]| match items {
            [] => String::new(),
            items => {
                let lines: String = items.iter().map(|item| format!("#   {}\n", one_line(item))).collect();
                format!("\n# {title}\n{lines}")
            }
        };
        text.push_str(&list("Changes training there, and is not in this file:", &self.changes));
        text.push_str(&self.draft.text());
        text.push_str(&list("Required, and not in the file:", &missing));
        text.push_str(&list("Without a counterpart and without effect here:", &dropped));
        text
    }

    fn integer(&self, name: &str) -> Option<i64> {
        match self.draft.value(name) {
            Some(Value::Int(number)) => Some(*number),
            _ => None,
        }
    }

    /// Returns the number of a setting, from the preset if the script does not have it, or 1.
    fn number(&self, name: &str) -> i64 {
        let of_preset = || {
            let all = crate::settings::preset(self.system.preset, Verb::Train);
            all.into_iter().find(|given| given.flag.name == name).map(|given| given.value)
        };
        match self.draft.value(name).cloned().or_else(of_preset) {
            Some(Value::Int(number)) => number,
            _ => 1,
        }
    }

    fn default(&mut self, name: &'static str, value: Value, comment: String) {
        self.defaults.insert(name);
        self.draft.put(name, value, vec![comment]);
    }

    /// Names the preset of the trainer. The defaults of TRL are written out.
    fn preset(&mut self) {
        let system = self.system;
        if system.preset.is_empty() {
            return;
        }
        if !self.draft.has("preset") {
            self.draft.set("preset", system.preset, format!("defaults of {}", system.name));
        }
        if system.preset != "trl" {
            return;
        }
        // `SftArguments` of `swift/arguments/sft_args.py`.
        if system.name == "ms-swift" && !self.draft.has("learning_rate") {
            let adapters = self.draft.value("use_peft") == Some(&Value::Bool(true));
            let rate = if adapters { 1e-4 } else { 1e-5 };
            self.default("learning_rate", Value::Float(rate), "default of ms-swift".to_owned());
        }
        // `swift/dataset/preprocessor/core.py` makes messages of every row.
        if system.name == "ms-swift" && !self.draft.has("continue_text_prompts") {
            self.default(
                "continue_text_prompts",
                Value::Bool(false),
                "ms-swift makes turns of texts".to_owned(),
            );
        }
        let trains_adapters = self.draft.value("use_peft") == Some(&Value::Bool(true))
            || self.draft.has("adapter_name_or_path");
        let source = if system.name == "ms-swift" { system.name } else { "TRL" };
        for Given { flag, value, .. } in crate::settings::preset(system.preset, Verb::Train) {
            // Adapters have their own choice of what is trained besides them.
            let is_part = flag.name.starts_with("tune_") && trains_adapters;
            if !self.draft.has(flag.name) && !is_part {
                self.default(flag.name, value, format!("default of {source}"));
            }
        }
    }

    /// Leaves out defaults that a run would not use.
    fn leave_out_idle_defaults(&mut self) {
        let Ok(resolved) = self.draft.resolve(Environment::default()) else { return };
        for (name, _) in resolved.idle.iter().filter(|(name, _)| self.defaults.contains(name)) {
            self.draft.take(name);
        }
    }

    /// Turns steps that are rollouts with their updates into updates.
    fn count_updates(&mut self) {
        if self.system.counts != Counts::Rollouts {
            return;
        }
        let updates =
            self.integer("steps_per_generation").unwrap_or(1) * self.integer("num_iterations").unwrap_or(1);
        if updates <= 1 {
            return;
        }
        for name in ["max_steps", "save_steps", "eval_steps", "warmup_steps"] {
            let Some((Value::Int(steps), mut comments)) = self.draft.take(name) else { continue };
            let name = find(name).map_or("", |flag| flag.name);
            match steps.checked_mul(updates).filter(|_| steps > 0) {
                Some(all) => {
                    comments.push(format!("{steps} rollouts × {updates} updates"));
                    self.draft.put(name, Value::Int(all), comments);
                }
                None => self.draft.put(name, Value::Int(steps), comments),
            }
        }
    }

    /// Gives each process of the script one here.
    fn divide(&mut self, launch: &Launch) {
        const BATCHES: &str = "gradient_accumulation_steps";
        let of_settings = self.draft.take("nproc_per_node");
        let (processes, source) = match (&launch.processes, of_settings) {
            (Some((processes, source)), _) => (*processes, source.clone()),
            (None, Some((Value::Int(processes), comments))) => (
                u64::try_from(processes).unwrap_or(1),
                comments.first().map_or(String::new(), |text| text.trim_start_matches("from ").to_owned()),
            ),
            _ => (1, String::new()),
        };
        if launch.machines > 1 {
            let batch = match self.system.counts {
                Counts::Updates => "The batch is that of one machine",
                Counts::Rollouts => "The batch is the complete one",
            };
            self.changes.push(format!(
                "{} machines with {processes} processes each: `nproc_per_node` starts those of one. {batch}; `mpirun --host` \
                 starts processes on others.",
                launch.machines
            ));
        }
        let one = |name: &str| self.number(name);
        let count = i64::try_from(processes).unwrap_or(1);
        if processes > 1 {
            let alone = match self.system.counts {
                Counts::Updates => {
                    format!("{EACH}: {}", one(EACH).saturating_mul(count))
                }
                Counts::Rollouts => format!("{BATCHES}: {}", one(BATCHES)),
            };
            if self.system.counts == Counts::Rollouts {
                let all = one(BATCHES);
                if all % count != 0 {
                    self.changes.push(format!(
                        "{all} prompts of an update cannot be divided by {processes} processes, so the file has one process."
                    ));
                    return;
                }
                let (_, mut comments) = self.draft.take(BATCHES).unwrap_or((Value::Int(all), Vec::new()));
                comments.push(format!("{all} prompts of an update / {processes} processes"));
                self.draft.put("gradient_accumulation_steps", Value::Int(all / count), comments);
            }
            let comment = format!("from {source}; for one process, leave this line out and write `{alone}`");
            self.draft.put("nproc_per_node", Value::Int(count), vec![comment]);
        }
        if let Some((shard, source)) = &launch.shard
            && !self.draft.has("shard")
            && *shard != "none"
            && processes > 1
        {
            self.draft.set("shard", shard, format!("from {source}"));
        }
        if launch.offloads {
            self.draft.choose("offload_optimizer", "cpu", "from the file of the launcher");
        }
    }

    /// Raises the batch of Unsloth to one group, as Unsloth does.
    fn complete_groups(&mut self) {
        let one = |name: &str| self.number(name);
        let group = self.number("num_generations");
        let all = one(EACH) * one("gradient_accumulation_steps") * one("nproc_per_node");
        if self.system.name == "Unsloth" && group > 0 && all % group != 0 {
            let comment = format!("{} there, which Unsloth raises to `num_generations`", one(EACH));
            self.draft.put(EACH, Value::Int(group), vec![comment]);
        }
    }

    /// Leaves out rewards of plugins, and names rewards that the script does not.
    fn rewards(&mut self, written: &[&str]) {
        if self.system.counts == Counts::Rollouts && !self.draft.has("reward_funcs") {
            self.changes.push(format!(
                "{} scores rows by their column `data_source`, with functions of its own; here the rewards are `accuracy` and \
                 `format` until `reward_funcs` names others (`omnigrpo rewards list`).",
                self.system.name
            ));
        }
        let is_plugin = written.contains(&"external_plugins");
        let Some(Value::Texts(names)) = self.draft.value("reward_funcs").cloned() else {
            if self.system.name == "ms-swift" {
                self.changes
                    .push("The script names no reward; here they are `accuracy` and `format`.".to_owned());
            }
            return;
        };
        if !is_plugin {
            return;
        }
        let known = |name: &String| crate::settings::is_reward(name);
        let (kept, plugins): (Vec<usize>, Vec<usize>) = (0..names.len()).partition(|&at| known(&names[at]));
        if plugins.is_empty() {
            return;
        }
        for &at in &plugins {
            self.changes.push(format!(
                "The reward {} is a class of a plugin: give a function of a file to `reward_funcs` as FILE.py:FUNCTION.",
                names[at]
            ));
        }
        let (_, comments) = self.draft.take("reward_funcs").unwrap_or((Value::Int(0), Vec::new()));
        let weights = self.draft.take("reward_weights");
        if kept.is_empty() {
            return;
        }
        let pick = |at: &usize| names[*at].clone();
        self.draft.put("reward_funcs", Value::Texts(kept.iter().map(pick).collect()), comments);
        if let Some((Value::Floats(all), comments)) = weights
            && all.len() == names.len()
        {
            self.draft.put(
                "reward_weights",
                Value::Floats(kept.iter().map(|&at| all[at]).collect()),
                comments,
            );
        }
    }
}
