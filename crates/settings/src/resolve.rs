//! From names and values to the plans of a run: [`resolve`].

use std::path::Path;

use omnigrpo_train::Offload;

use super::environment::Environment;
use super::explain;
use super::flags::{self, Flag, Verb};
use super::layer::Layer;
use super::names::{Tracker, name_of};
use super::problem::Problem;
use super::values::{Given, Origin, Raw, Resolved, Value, Values};
use super::{Settings, config, deepspeed, presets, rules};

/// Combines the defaults of a verb, the environment, a preset, a file of settings and the given settings, and checks the result.
///
/// `given` may name a file (`config`) and a preset (`preset`). Each source replaces the values of the weaker ones before it. The
/// result has the plans of the libraries, the source of every value, and notes for the user.
///
/// # Errors
/// Returns all mistakes together: settings that are unknown, wrong, contradictory or without effect.
pub fn resolve(verb: Verb, given: Layer, env: Environment) -> Result<Resolved, Problem> {
    let mut this = Resolution::collect(verb, given, &env);
    this.settle_rivals();
    presets::complete(&mut this.values);
    deepspeed_file(&mut this.values);
    this.notes.extend(presets::reweigh(&mut this.values, &this.of_preset));
    let settings = match Settings::from_values(&this.values, env.clone()) {
        Ok(settings) => settings,
        Err(problem) => {
            this.problems.push(problem);
            return Err(Problem::joined(this.problems));
        }
    };
    this.fill_recipe(&settings);
    let idle = this.leave_out_idle(&settings, &env);
    let settings = Settings::from_values(&this.values, env)?;
    let Resolution { mut values, mut problems, dropped, changing, mut notes, .. } = this;
    problems.extend(rules::check(verb, &settings));
    Problem::all(problems)?;
    fold_weights(&mut values, &settings.rewards.options.weights, verb);
    for (written, why) in changing {
        notes.push(format!("{written} changes training there, and has no counterpart here: {why}"));
    }
    if !dropped.is_empty() {
        notes.push(without_counterpart(&dropped));
    }
    notes.extend(rules::doubts(verb, &settings));
    if verb == Verb::Train {
        notes.extend(rules::unreached_clip(&values, &settings));
    }
    notes.extend(notes_of(&settings));
    if settings.env.is_alone && settings.env.processes <= 1 && verb.is_divided() && !settings.io.dry_run {
        notes.push(
            "`accelerate launch` was to start several processes and has started one, as it does without GPUs; \
             `--nproc_per_node N` divides the work over N processes"
                .into(),
        );
    }
    Ok(Resolved { verb, values, idle, settings, notes })
}

/// Settings of a verb while their sources are combined.
struct Resolution {
    verb: Verb,
    values: Values,
    /// Values without preset, file and given settings.
    defaults: Values,
    /// Values with the preset alone.
    of_preset: Values,
    /// Values with the preset and the file, without the given settings.
    of_file: Values,
    problems: Vec<Problem>,
    /// Settings of other trainers without effect, each with the reason.
    dropped: Vec<(String, String)>,
    /// Settings of other trainers that change training there and have no counterpart, each with the reason.
    changing: Vec<(String, String)>,
    notes: Vec<String>,
}

impl Resolution {
    /// Reads the file and the preset that `given` names, and stores the values of all sources, the weakest first.
    fn collect(verb: Verb, given: Layer, env: &Environment) -> Self {
        let mut file = given.text("config").map(|path| config::read(Path::new(path))).unwrap_or_default();
        let preset = given.text("preset").or_else(|| file.text("preset"));
        let workload = given.text("workload").or_else(|| file.text("workload"));
        let preset = match (preset, workload) {
            (_, Some(name)) => presets::workload(name),
            (Some(name), None) => presets::layer(name, verb),
            (None, None) => Layer::default(),
        };
        let notes = presets::of_evaluation(&mut file, verb).into_iter().collect();
        let mut values = Values::defaults(verb);
        let trains_user_model = matches!(verb, Verb::Train | Verb::Sft);
        if let Some(name) = env.exp_name.clone().filter(|_| trains_user_model) {
            values.fill("exp_name", Value::Text(name), Origin::Environment("EXP_NAME"));
        }
        let (defaults, of_preset, of_file) = (values.clone(), values.clone(), values.clone());
        let (problems, dropped, changing) = (Vec::new(), Vec::new(), Vec::new());
        let mut this =
            Self { verb, values, defaults, of_preset, of_file, problems, dropped, changing, notes };
        for (at, layer) in [preset, file, given].into_iter().enumerate() {
            if at == 2 {
                this.of_file = this.values.clone();
            }
            this.notes.extend(layer.notes);
            this.problems.extend(layer.problems);
            this.dropped.extend(layer.dropped);
            this.changing.extend(layer.changing);
            // A file or preset describes a complete run; a verb uses only the settings that it takes.
            for given in layer.given.into_iter().filter(|given| given.flag.is_of(verb)) {
                if matches!(given.origin, Origin::Preset(_)) {
                    this.of_preset.set(given.clone());
                }
                this.values.set(given);
            }
        }
        this
    }

    /// Resets the setting of the weaker source if two settings for the same thing contradict each other.
    fn settle_rivals(&mut self) {
        for (a, b, same) in rules::RIVALS {
            let (Some((left, l)), Some((right, r))) = (self.values.lookup(a), self.values.lookup(b)) else {
                continue;
            };
            if *l == Origin::Default || *r == Origin::Default || l.rank() == r.rank() || !same(left, right) {
                continue;
            }
            let weaker = if l.rank() < r.rank() { a } else { b };
            self.values.reset(weaker, self.verb);
        }
    }

    /// Stores the values that come from the recipe, for settings that no source gives.
    fn fill_recipe(&mut self, settings: &Settings) {
        let given = |name| self.values.lookup(name).is_some();
        let scaled = given("scale_rewards");
        if given("advantage") && scaled {
            self.problems.push(
                Problem::usage("`scale_rewards` and `advantage` both set the divisor of the rewards")
                    .expected("one of them"),
            );
        }
        for flag in flags::all().filter(|flag| flag.of_recipe) {
            // The printed settings are complete and can be read back, so of two names for one thing only the given one is printed.
            let stands = flag.name == "advantage" && scaled;
            if let (false, Some(value)) = (stands, (flag.place.get)(settings)) {
                self.values.fill(flag.name, value, Origin::Recipe(settings.recipe.name));
            }
        }
    }

    /// Resets the settings without effect in this run, and returns them with the reasons. A setting that the user gave is a
    /// problem. It is a note if another setting overrides it, or if it is a line of a file that has an effect without the command line.
    fn leave_out_idle(&mut self, settings: &Settings, env: &Environment) -> Vec<(&'static str, String)> {
        let mut idle = Vec::new();
        let mut of_file = self.of_file.clone();
        presets::complete(&mut of_file);
        deepspeed_file(&mut of_file);
        let of_file = Settings::from_values(&of_file, env.clone()).ok();
        let verb = self.verb;
        let works_in_file = |when: flags::Idle| of_file.as_ref().is_some_and(|own| when(own, verb).is_none());
        let taken = flags::all().filter(|flag| flag.is_of(self.verb));
        for (flag, when, overridden) in taken.flat_map(|f| [(f, f.overridden, true), (f, f.idle, false)]) {
            let Some(why) = when(settings, self.verb) else { continue };
            idle.push((flag.name, why.to_owned()));
            if let Some((value, origin)) = self.asked_for(flag) {
                let shown = explain::yaml(&value);
                if overridden {
                    self.notes.push(format!("`{}` {shown} is not used: {why}", flag.name));
                } else if let (Origin::Config(place), true) = (&origin, works_in_file(when)) {
                    self.notes.push(format!("`{}` {shown} of {place} is not used: {why}", flag.name));
                } else {
                    let problem = Problem::usage(format!("`{}` has no effect in this run", flag.name))
                        .got(shown)
                        .help(format!("{why}; leave `{}` out, or change that", flag.name));
                    self.problems.push(problem.given_at(&origin));
                }
            }
            self.values.reset(flag.name, self.verb);
        }
        idle
    }

    /// Returns a value that the user gave and that differs from the default and from the preset; others change nothing.
    fn asked_for(&self, flag: &Flag) -> Option<(Value, Origin)> {
        let (value, origin) = self.values.lookup(flag.name)?;
        let same = |base: &Values| base.lookup(flag.name).is_some_and(|(known, _)| known == value);
        let given = origin.is_users();
        (given && !same(&self.defaults) && !same(&self.of_preset)).then(|| (value.clone(), origin.clone()))
    }
}

/// Applies the division and the offloading of a DeepSpeed file, unless the settings themselves are given. On a CPU, a state in main memory
/// is not offloaded.
fn deepspeed_file(values: &mut Values) {
    let Some((Value::Text(path), _)) = values.lookup("deepspeed").cloned() else { return };
    for (name, text) in deepspeed::implied(Path::new(&path)) {
        let flag = flags::find(name).filter(|_| values.rank(name) == 0);
        let given =
            flag.map(|flag| Given::read(flag, &Raw::Arguments(vec![text]), Origin::Config(path.clone())));
        if let Some(Ok(given)) = given {
            values.set(given);
        }
    }
    let on_cpu = values.lookup("device").is_some_and(|(device, _)| *device == Value::Text("cpu".to_owned()));
    let (offload, folder) = deepspeed::offloads_optimizer(Path::new(&path));
    let acts = offload == Offload::File || (offload == Offload::Cpu && !on_cpu);
    let implied =
        [("offload_optimizer", name_of(offload).filter(|_| acts).map(str::to_owned)), ("nvme_path", folder)];
    for (name, text) in implied {
        let flag = flags::find(name).filter(|_| values.rank(name) == 0);
        let in_files = Some(&Value::Text("file".to_owned()));
        // A folder has a meaning for files only.
        let acts =
            name != "nvme_path" || values.lookup("offload_optimizer").map(|(place, _)| place) == in_files;
        if let (Some(flag), Some(text), true) = (flag, text, acts) {
            values.set(Given { flag, value: Value::Text(text), origin: Origin::Config(path.clone()) });
        }
    }
}

/// Moves weights that name their reward into the list of all weights, so that the printed settings name each once.
fn fold_weights(values: &mut Values, weights: &[f64], verb: Verb) {
    const NAMED: [&str; 2] = ["format_reward_weight", "accuracy_reward_weight"];
    if NAMED.iter().all(|name| values.lookup(name).is_none()) {
        return;
    }
    let given = NAMED.iter().chain(&["reward_weights"]).filter_map(|name| values.lookup(name));
    let strongest = given.map(|(_, origin)| origin.clone()).max_by_key(Origin::rank);
    for name in NAMED {
        values.reset(name, verb);
    }
    if let (Some(flag), Some(origin)) = (flags::find("reward_weights"), strongest) {
        values.set(Given { flag, value: Value::Floats(weights.to_vec()), origin });
    }
}

/// Returns one note for all settings of other trainers that are left out.
fn without_counterpart(dropped: &[(String, String)]) -> String {
    let mut note = match dropped.len() {
        1 => "1 setting has no counterpart here and has no effect:".to_owned(),
        n => format!("{n} settings have no counterpart here and have no effect:"),
    };
    for (written, why) in dropped {
        note.push_str(&format!("\n{written}: {why}"));
    }
    note
}

/// Returns notes about environment and settings, for `--print_config` and the log.
fn notes_of(settings: &Settings) -> Vec<String> {
    let env = &settings.env;
    let mut notes = Vec::new();
    if settings.log.report_to == [Tracker::None] {
        notes.push("`report_to` none: only metrics.jsonl is written".into());
    }
    if env.wandb_disabled && settings.reports_to(Tracker::Wandb) {
        notes.push("WANDB_DISABLED is on: nothing is sent to W&B".into());
    }
    if let Some(path) = &env.debug_log {
        notes.push(format!("DEBUG_MODE is on: scored completions are appended to {}", path.display()));
    }
    if env.ds_skip_cuda_check {
        notes.push("DS_SKIP_CUDA_CHECK is on: it has no effect, since DeepSpeed is not used".into());
    }
    if let Some(devices) = &env.cuda_visible_devices {
        notes.push(format!("CUDA_VISIBLE_DEVICES={devices}"));
    }
    notes
}
