//! `plan`, and the prediction of memory that `train` makes before it loads a model: memory by part, and flags that reduce it.
//! `plan` also predicts the time of a run: on the CPU from measured rates, and on a GPU from stated ones.

use anyhow::Result;
use omnigrpo_models::MediumShape;
use omnigrpo_ops::{Device, Rates};
use omnigrpo_text::Form;
use omnigrpo_train::{
    Algorithm, BytesEach, Divided, Forecast, Limit, Longest, Memory, Need, Objective, Offload, Phase,
    Prepared, RunPlan, Speed, StepTime, Variant, fits, room,
};
use serde_json::{Map, Value as Json, json};

use crate::{Session, setup};
use omnigrpo_settings::cards::KnownCard;
use omnigrpo_settings::values::{Given, Origin, Raw, Resolved};
use omnigrpo_settings::{Problem, Settings, flags, rules};

/// Length of the longest bar, columns.
const BAR: u64 = 40;

/// Width of the names of parts, columns.
const PART: usize = 22;

/// Largest width of the names of other flags, columns. Longer ones have a line of their own.
const LONGEST_NAME: usize = 52;

/// A run with some flags changed.
struct Way {
    flags: Flags,
    need: Need,
}

/// Predicted time of a run.
struct Times {
    /// Where the run would take this time.
    place: String,
    /// Number of tokens of a completion, and the time of a step with such completions.
    steps: Vec<(usize, StepTime)>,
    num_steps: u64,
    steps_per_epoch: u64,
    /// Number of evaluations, and of batches in each.
    evaluations: [u64; 2],
}

impl Times {
    /// Predicts times, on a CPU after measuring rates for about a second.
    fn new(settings: &Settings, objective: Objective, prepared: &Prepared) -> Result<Self> {
        let (mut speed, place) = speed(settings, prepared)?;
        let longest = settings.algorithm.sampling.max_completion_length;
        let lengths = match objective {
            Objective::Imitate => vec![longest],
            Objective::Reinforce if longest == 1 => vec![1],
            Objective::Reinforce => vec![longest, longest / 2],
        };
        let of = |tokens| Ok((tokens, prepared.step_time(tokens, &mut speed)?));
        let (run, rows) = (&settings.run, prepared.usable_rows());
        let (num_steps, steps_per_epoch) = (run.num_steps(rows)?, run.steps_per_epoch(rows));
        let evaluations = prepared.eval().map_or([0, 0], |plan| {
            let batches = plan.rows.len().div_ceil(plan.options.batch_rows.max(1)) as u64;
            [run.num_evaluations(num_steps, steps_per_epoch), batches]
        });
        Ok(Self {
            place,
            steps: lengths.into_iter().map(of).collect::<Result<_>>()?,
            num_steps,
            steps_per_epoch,
            evaluations,
        })
    }

    /// Returns the seconds that steps and evaluations take, with completions of the length in `step`.
    fn of_steps(&self, step: &StepTime, steps: u64, evaluations: u64) -> f64 {
        steps as f64 * step.total() + (evaluations * self.evaluations[1]) as f64 * step.evaluation
    }

    fn table(&self, ranks: usize) -> String {
        let whose = match ranks {
            1 => format!("on {}", self.place),
            _ => format!("of one rank with all of {}", self.place),
        };
        let mut out = format!("\ntime {whose}, without rewards, reading media and saving checkpoints\n\n");
        for (tokens, step) in &self.steps {
            let of = |phases: &[&str]| {
                step.phases
                    .iter()
                    .filter(|(name, _)| phases.contains(name))
                    .map(|(_, secs)| secs)
                    .sum::<f64>()
            };
            let parts = [
                ("media", of(&["encode"])),
                ("completions", of(&["rollout"])),
                ("reference", of(&["reference"])),
                ("update", of(&["forward", "backward"])),
                ("optimizer", of(&["optimizer"])),
            ];
            let parts: Vec<String> = parts
                .iter()
                .filter(|(_, secs)| *secs > 0.005 * step.total())
                .map(|(name, secs)| format!("{name} {}", duration(*secs)))
                .collect();
            if self.steps.len() > 1 {
                out.push_str(&format!("completions of {tokens} tokens\n"));
            }
            let line =
                |name: &str, secs: f64, note: &str| format!("  {name:12}{:>9}  {note}\n", duration(secs));
            out.push_str(&line("a step", step.total(), &parts.join(", ")));
            let epoch = self.of_steps(step, self.steps_per_epoch, 0);
            out.push_str(&line("an epoch", epoch, &format!("{} steps", self.steps_per_epoch)));
            let [evaluations, _] = self.evaluations;
            let note = match evaluations {
                0 => format!("{} steps", self.num_steps),
                each => format!("{} steps and {each} evaluations", self.num_steps),
            };
            out.push_str(&line("the run", self.of_steps(step, self.num_steps, evaluations), &note));
        }
        out
    }

    fn as_json(&self) -> Json {
        let each = self.steps.iter().map(|(tokens, step)| {
            json!({
                "completion_tokens": tokens,
                "step_secs": step.total(),
                "phases": step.phases.iter().copied().collect::<std::collections::BTreeMap<_, _>>(),
                "epoch_secs": self.of_steps(step, self.steps_per_epoch, 0),
                "run_secs": self.of_steps(step, self.num_steps, self.evaluations[0]),
            })
        });
        json!({
            "place": self.place,
            "steps": self.num_steps,
            "steps_per_epoch": self.steps_per_epoch,
            "evaluations": self.evaluations[0],
            "with_completions": each.collect::<Vec<_>>(),
        })
    }
}

/// Exchange of a planned run between its ranks, without other work at the same time.
struct Exchange {
    ranks: usize,
    machines: usize,
    /// Bytes that a rank sends in a step.
    sent: u64,
    /// Each link: name, bytes per second, and seconds of a step.
    links: Vec<(&'static str, f64, f64)>,
    /// Seconds that a rank computes in a step, if they are known.
    compute: Option<f64>,
}

impl Exchange {
    /// Returns `None` for one rank.
    fn new(prepared: &Prepared, times: &Times) -> Result<Option<Self>> {
        const WITHIN: [(&str, f64); 3] =
            [("1 GB/s per rank", 1e9), ("4 GB/s per rank", 4e9), ("16 GB/s per rank", 16e9)];
        const BETWEEN: [(&str, f64); 5] = [
            ("1 Gb/s per machine", 0.125e9),
            ("10 Gb/s per machine", 1.25e9),
            ("25 Gb/s per machine", 3.125e9),
            ("100 Gb/s per machine", 12.5e9),
            ("400 Gb/s per machine", 50e9),
        ];
        let split = prepared.split();
        let (ranks, local) = (split.ranks.size(), split.local);
        if ranks == 1 {
            return Ok(None);
        }
        let (machines, sent) = (ranks / local.max(1), prepared.exchanged_bytes()?);
        // The ranks of a machine share its link, and messages between them do not use it.
        let leaving = (local * (ranks - local)) as f64 / (ranks - 1) as f64;
        let (links, bytes) = match machines {
            1 => (&WITHIN[..], sent as f64),
            _ => (&BETWEEN[..], sent as f64 * leaving),
        };
        // The ranks of a machine share its cores. The first length of completions is the longest.
        let on_cpu = prepared.devices().iter().all(|device| *device == Device::Cpu);
        let sharing = if on_cpu { local as f64 } else { 1.0 };
        let compute = times.steps.first().map(|(_, step)| step.total() * sharing);
        let links = links.iter().map(|&(name, rate)| (name, rate, bytes / rate)).collect();
        Ok(Some(Self { ranks, machines, sent, links, compute }))
    }

    fn share(&self, secs: f64) -> Option<f64> {
        Some(secs / (secs + self.compute?))
    }

    fn table(&self) -> String {
        let Self { ranks, machines, sent, .. } = self;
        let plural = if *machines == 1 { "" } else { "s" };
        let mut out = format!(
            "\n{ranks} ranks on {machines} machine{plural}: each sends {} in a step, without other work at the same time\n\n",
            room::size(*sent)
        );
        for (name, _, secs) in &self.links {
            let share = self
                .share(*secs)
                .map_or(String::new(), |share| format!("  {:.0} % of a step", 100.0 * share));
            out.push_str(&format!("  {name:20}{:>9}{share}\n", duration(*secs)));
        }
        out
    }

    fn as_json(&self) -> Json {
        let link = |(name, rate, secs): &(&str, f64, f64)| json!({ "link": name, "bytes_per_sec": rate, "step_secs": secs, "share": self.share(*secs) });
        json!({
            "ranks": self.ranks,
            "machines": self.machines,
            "sent_bytes": self.sent,
            "links": self.links.iter().map(link).collect::<Vec<_>>(),
        })
    }
}

/// Returns the speed of the run's device, and the name of the place where it has it.
///
/// # Errors
/// Returns an error if the run is on the CPU and the settings have rates of a GPU.
pub fn speed(settings: &Settings, prepared: &Prepared) -> Result<(Speed, String), Problem> {
    if prepared.devices().iter().all(|device| *device == Device::Cpu) {
        return match &settings.model.gpu_rates {
            None => Ok((Speed::Measured(Rates::default()), "this machine".to_owned())),
            Some((given, _)) => Err(Problem::usage("`gpu_rates` has no effect in this run")
                .at("--gpu_rates")
                .got(format!("`{given}`, and a run on the CPU, whose speed is measured"))
                .help("give `--gpu_memory` too, to plan for a GPU that this machine lacks")),
        };
    }
    let (name, rates) = settings.model.gpu_rates.clone().unwrap_or_else(|| {
        let card = KnownCard::with_memory(prepared.forecast().limit.map_or(0, |(bytes, _)| bytes));
        (card.name.to_owned(), card.rates())
    });
    let place = format!(
        "a GPU with {:.0} TFLOP/s and {:.0} GB/s (`--gpu_rates {name}`)",
        rates.flops / 1e12,
        rates.bytes / 1e9
    );
    Ok((Speed::Card(rates), place))
}

/// Time until a run shows something, and its whole time.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// Number of steps until the first evaluation during training, or of all steps.
    pub first_steps: u64,
    /// Seconds until then.
    pub first: f64,
    /// Number of steps of the run.
    pub steps: u64,
    /// Seconds of the run.
    pub whole: f64,
}

/// Predicts when a run with other values of some flags shows its first result: after `first_steps` steps and the evaluations until then,
/// with completions of the largest length. `None` if the flags contradict other settings.
pub fn wait(
    resolved: &Resolved,
    session: &Session,
    prepared: &Prepared,
    (flags, first_steps): (&[(&'static str, String)], u64),
    speed: &mut Speed,
) -> Result<Option<Wait>> {
    let timed = with_flags(resolved, session, prepared, flags, |settings, variant| -> Result<Wait> {
        // Only flags of media change the rows.
        let typical = match std::ptr::eq(variant.longest, prepared.longest()) {
            true => None,
            false => {
                let prompts = session.prompts(settings, session.checkpoint()?, true)?;
                prepared.typical().with(&prompts, variant.plan.objective)
            }
        };
        let typical = typical.as_ref().unwrap_or(prepared.typical());
        let length = settings.algorithm.sampling.max_completion_length;
        let step = prepared.step_time_of(variant, typical, length, speed)?;
        let rows = prepared.usable_rows();
        let (run, steps) = (&settings.run, settings.run.num_steps(rows)?);
        let batches =
            prepared.eval().map_or(0, |plan| plan.rows.len().div_ceil(plan.options.batch_rows.max(1)) as u64);
        let of = |steps: u64, evaluations: u64| {
            steps as f64 * step.total() + (evaluations * batches) as f64 * step.evaluation
        };
        let first_steps = first_steps.min(steps);
        let evaluations = run.num_evaluations(steps, run.steps_per_epoch(rows));
        Ok(Wait {
            first_steps,
            first: of(first_steps, 1 + u64::from(run.eval.on_start)),
            steps,
            whole: of(steps, evaluations),
        })
    });
    timed.transpose()
}

/// Formats a time with two to three digits.
pub fn duration(secs: f64) -> String {
    match secs {
        s if s < 1.0 => format!("{:.0} ms", 1e3 * s),
        s if s < 100.0 => format!("{s:.1} s"),
        s if s < 6000.0 => format!("{:.0} min", s / 60.0),
        s if s < 360_000.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}

/// Memory and time that a run needs.
pub struct Planned {
    /// The numbers, as `--json` writes them.
    pub numbers: Json,
    /// Tables with these numbers.
    pub tables: String,
    /// The reason why the run does not fit into memory.
    pub problem: Option<Problem>,
}

/// Predicts the memory and the time of a run.
pub(crate) fn plan(
    resolved: &Resolved,
    session: &Session,
    objective: Objective,
    prepared: &Prepared,
) -> Result<Planned> {
    let forecast = prepared.forecast();
    let ways = ways(resolved, session, prepared)?;
    let times = Times::new(&resolved.settings, objective, prepared)?;
    let exchange = Exchange::new(prepared, &times)?;
    let mut numbers = as_json(forecast, &ways);
    numbers["time"] = times.as_json();
    numbers["exchange"] = exchange.as_ref().map_or(Json::Null, Exchange::as_json);
    let mut tables = table(forecast, &ways, prepared.split().ranks.size());
    tables.push_str(&times.table(prepared.split().ranks.size()));
    tables.extend(exchange.map(|exchange| exchange.table()));
    Ok(Planned { numbers, tables, problem: too_much(forecast, &ways) })
}

/// Returns an error if the permanent part of a run's memory does not fit, and warns if the total does not fit. Both name the flags
/// that would make it fit.
pub(crate) fn refuse(resolved: &Resolved, session: &Session, prepared: &Prepared) -> Result<()> {
    let forecast = prepared.forecast();
    if forecast.allows(&forecast.need) {
        return Ok(());
    }
    let Some(problem) = too_much(forecast, &ways(resolved, session, prepared)?) else { return Ok(()) };
    if forecast.is_hopeless() {
        return Err(problem.into());
    }
    // The total includes activations. It assumes the longest rows and completions, which may never occur together.
    tracing::warn!("{}", problem.to_string().replacen("error: ", "", 1));
    Ok(())
}

/// Returns a problem if a run does not fit, with the flags that would make it fit.
fn too_much(forecast: &Forecast, ways: &[Way]) -> Option<Problem> {
    let problem = Problem::from(forecast.refusal()?);
    Some(problem.help(match ways.iter().find(|way| forecast.allows(&way.need)) {
        Some(way) => {
            format!("with `{}` it takes {}", typed(&way.flags), room::size(way.need.memory.total()))
        }
        None => {
            "no flag that `omnigrpo plan` tries makes it fit: take a smaller model, or shorter rows".into()
        }
    }))
}

/// Returns the flags that make a run fit and change its results least, and its memory with them; no flags if it fits without. Flags
/// in `kept` stay as they are.
///
/// # Errors
/// Returns an error if no flags suffice.
pub fn fit(
    resolved: &Resolved,
    session: &Session,
    prepared: &Prepared,
    kept: &[&str],
) -> Result<(Flags, Memory)> {
    let forecast = prepared.forecast();
    let mut ways = ways(resolved, session, prepared)?;
    let Some(problem) = too_much(forecast, &ways) else { return Ok((Flags::new(), forecast.need.memory)) };
    ways.retain(|way| way.flags.iter().all(|(name, _)| !kept.contains(name)));
    let mut way = ways.into_iter().find(|way| forecast.allows(&way.need)).ok_or(problem)?;
    // A combination may have more flags than it needs. A weight without a master is rounded at random.
    for at in (0..way.flags.len()).rev() {
        let mut flags = way.flags.clone();
        match flags.get(at) {
            Some(("stochastic_rounding", _)) | None => continue,
            Some(("pure_bf16", _)) => {
                flags.retain(|(name, _)| !["pure_bf16", "stochastic_rounding"].contains(name))
            }
            Some(_) => drop(flags.remove(at)),
        }
        let need = with_flags(resolved, session, prepared, &flags, |_, variant| prepared.memory(variant));
        if let Some(Ok(need)) = need.filter(|need| need.as_ref().is_ok_and(|need| forecast.allows(need))) {
            way = Way { flags, need };
        }
    }
    Ok((way.flags, way.need.memory))
}

/// Flags with their values.
pub type Flags = Vec<(&'static str, String)>;

/// Formats flags as the user types them.
pub fn typed(flags: &[(&'static str, String)]) -> String {
    let one = |(name, value): &(&str, String)| match value.as_str() {
        "true" => format!("--{name}"),
        value => format!("--{name} {value}"),
    };
    flags.iter().map(one).collect::<Vec<_>>().join(" ")
}

/// Returns flags that make media smaller: pictures first, then clips. The caller removes flags that a family does not read.
pub fn media_flags(s: &Settings, longest: &Longest) -> Vec<Flags> {
    /// Number of pixels that suffices for the details in most questions: 1,280 tokens of 28 × 28.
    const ENOUGH: usize = 1_003_520;
    let mut flags: Vec<Flags> = Vec::new();
    let mut one = |name, value: usize| {
        if !flags.iter().any(|have| have[0].0 == name) {
            flags.push(vec![(name, value.to_string())]);
        }
    };
    // The side of a patch is at least 14 pixels.
    let pixels = |shape: &MediumShape| match *shape {
        MediumShape::Patches(grid) => grid.h * grid.w * 14 * 14,
        MediumShape::Masked { side_px, .. } => side_px * side_px,
        _ => 0,
    };
    for (kind, shape) in longest.media() {
        match (kind.form(), shape) {
            (Form::Picture, MediumShape::Pictures { count, .. }) if count > 2 => {
                one("max_anyres_num", count / 2)
            }
            (Form::Picture, MediumShape::Tiles { rows, columns, .. }) if rows * columns > 1 => {
                one("max_anyres_num", rows * columns / 2)
            }
            (Form::Picture, shape) if pixels(&shape) > 2 * ENOUGH => one("max_pixels", ENOUGH),
            (Form::Picture, shape) if pixels(&shape) >= 1 << 17 => {
                one("max_pixels", pixels(&shape) / 2 / 784 * 784);
            }
            (Form::Clip, shape) => {
                let frames = match shape {
                    MediumShape::Patches(grid) => 2 * grid.t,
                    MediumShape::Pictures { count, .. } | MediumShape::Masked { count, .. } => count,
                    MediumShape::Frames { count, .. } => count,
                    MediumShape::Tiles { .. } | MediumShape::Mel { .. } => 0,
                };
                if frames >= 8 {
                    let fixed = s.prompts.media.video.nframes.is_some();
                    one(if fixed { "nframes" } else { "video_max_frames" }, frames / 4 * 2);
                }
                if pixels(&shape) >= 1 << 16 {
                    one("video_max_frame_pixels", pixels(&shape) / 2 / 784 * 784);
                }
            }
            _ => {}
        }
    }
    flags
}

/// Returns the flags of [`media_flags`] that shorten the longest prompt of this run.
pub fn shortening_flags(resolved: &Resolved, session: &Session, prepared: &Prepared) -> Vec<Flags> {
    let mut flags = media_flags(&resolved.settings, prepared.longest());
    flags.retain(|flags| {
        changed(resolved, flags).is_some_and(|settings| shortened(&settings, session, prepared).is_some())
    });
    flags
}

/// Returns the longest rows with other settings of media; `None` if the longest prompt does not become shorter.
fn shortened(settings: &Settings, session: &Session, prepared: &Prepared) -> Option<Longest> {
    let (own, prompts) =
        (prepared.longest(), session.prompts(settings, session.checkpoint().ok()?, true).ok()?);
    let longest = own.with(&prompts, prepared.variant().plan.objective)?;
    (longest.prompt_tokens() < own.prompt_tokens()).then_some(longest)
}

/// Returns the run with flags that reduce its memory: flags of media first, then those that change the results least.
fn ways(resolved: &Resolved, session: &Session, prepared: &Prepared) -> Result<Vec<Way>> {
    let media = shortening_flags(resolved, session, prepared);
    let mut ways = Vec::new();
    for flags in reductions(&resolved.settings, prepared, &media) {
        let need = with_flags(resolved, session, prepared, &flags, |_, variant| prepared.memory(variant));
        // Some flags do not apply to this model, such as adapters on weights that are fully trained.
        let Some(Ok(need)) = need else { continue };
        ways.push(Way { flags, need });
    }
    // The memory of the program itself is measured. It varies from one moment to the next, and no flag changes it.
    let total = |memory: &Memory| memory.total() - memory.program;
    let totals = |need: &Need| [total(&need.memory), need.main.as_ref().map_or(0, total)];
    let base = totals(&prepared.forecast().need);
    // A flag that saves less than one percent is not worth a line.
    ways.retain(|way| totals(&way.need).into_iter().zip(base).any(|(own, base)| own < base - base / 100));
    Ok(ways)
}

/// Calls `then` with the settings of a run that has other values of some flags. Returns `None` if they contradict another setting, or if
/// flags of media do not shorten the longest prompt.
fn with_flags<T>(
    resolved: &Resolved,
    session: &Session,
    prepared: &Prepared,
    flags: &[(&'static str, String)],
    then: impl FnOnce(&Settings, &Variant<'_>) -> T,
) -> Option<T> {
    let settings = changed(resolved, flags)?;
    let checkpoint = session.checkpoint().ok()?;
    let media = media_flags(&resolved.settings, prepared.longest());
    let is_of_media = |name: &str| media.iter().any(|flags| flags[0].0 == name);
    let longest = match flags.iter().any(|(name, _)| is_of_media(name)) {
        true => Some(shortened(&settings, session, prepared)?),
        false => None,
    };
    let objective = prepared.variant().plan.objective;
    // Both runs of a comparison decode the same number of completions at once.
    let algorithm =
        Algorithm { max_live: prepared.variant().algorithm.max_live, ..settings.algorithm.clone() };
    let variant = Variant {
        model: Some(&setup::model_plan(&settings, checkpoint, prepared.devices()[0])),
        selection: &setup::selection(&settings, checkpoint.family()),
        algorithm: &Divided { algorithm, split: prepared.split().clone() },
        optimizer: &settings.optimizer,
        plan: &RunPlan { objective, ..settings.run.clone() },
        media_bytes: setup::media_bytes(&settings),
        longest: longest.as_ref().unwrap_or(prepared.longest()),
    };
    Some(then(&settings, &variant))
}

fn one(name: &'static str, value: impl ToString) -> Flags {
    vec![(name, value.to_string())]
}

/// Returns the flags that may reduce the memory of a run: `media`, each of the others, and combinations.
fn reductions(s: &Settings, prepared: &Prepared, media: &[Flags]) -> Vec<Flags> {
    // Combinations have the first of these places.
    let places = match s.optimizer.offload {
        Offload::None if prepared.devices()[0] != Device::Cpu => &["cpu", "file"][..],
        Offload::None | Offload::Cpu => &["file"],
        Offload::File => &[],
    };
    let mut places = places.iter().map(|place| one("offload_optimizer", place));
    let exact = exact_reductions(s, prepared, places.next());
    let (has_peft, quantised) = (s.model.use_peft, s.model.load_in_8bit || s.model.load_in_4bit);
    let peft = if has_peft { Vec::new() } else { vec![one("use_peft", true)] };
    let few = if quantised { Vec::new() } else { vec![one("load_in_4bit", true)] };
    let adapted = |flag| [peft.concat(), one(flag, true)].concat();
    let completion = s.algorithm.sampling.max_completion_length;
    let (accumulation, samples) = (s.batch.accumulation, s.algorithm.num_generations);
    let mut single: Vec<Flags> = places.chain([one("torch_dtype", "bfloat16")]).collect();
    single.extend((accumulation >= 2).then(|| one("gradient_accumulation_steps", accumulation / 2)));
    single.extend((samples >= 4).then(|| one("num_generations", samples / 2)));
    single.extend((completion >= 64).then(|| one("max_completion_length", completion / 2)));
    single.extend(s.algorithm.loss.needs_reference().then(|| one("beta", 0)));
    single.extend(peft.clone());
    let small = small_state(s, prepared.forecast().need.memory.each, exact.concat().contains(&files()[0]));
    single.extend(small.clone());
    let smallest: Vec<Flags> = small.last().cloned().into_iter().collect();
    if !quantised {
        single.extend(["load_in_8bit", "load_in_4bit"].map(adapted));
    }
    // Combinations: media, flags that change no result, adapters, quantised weights. Each row adds to the one before.
    let mut all = [media, &exact, &single].concat();
    for parts in [
        &[&exact[..]][..],
        &[media, &exact],
        &[&exact, &smallest],
        &[&exact, &peft],
        &[&exact, &peft, &few],
        &[media, &exact, &peft],
        &[media, &exact, &peft, &few],
    ] {
        let flags: Flags = parts.iter().flat_map(|part| part.concat()).collect();
        if flags.len() > 1 && !all.contains(&flags) {
            all.push(flags);
        }
    }
    all
}

/// Returns the setting of a state in files.
fn files() -> Flags {
    one("offload_optimizer", "file")
}

/// Returns the flags with which a weight takes fewer bytes beside its value, in training of all weights: each form alone, and all. A
/// state in files has moments in f32.
fn small_state(s: &Settings, now: BytesEach, in_files: bool) -> Vec<Flags> {
    if s.model.use_peft {
        return Vec::new();
    }
    let in_files = in_files || s.optimizer.offload == Offload::File;
    let mut each = Vec::new();
    each.extend((now.moments == 8 && !in_files).then(|| one("optim", "adamw_8bit")));
    each.extend((now.gradient == 4).then(|| one("grad_dtype", "bfloat16")));
    each.extend(
        (now.master > 0).then(|| [one("pure_bf16", true), one("stochastic_rounding", true)].concat()),
    );
    if each.len() > 1 {
        each.push(each.concat());
    }
    each
}

/// Returns the flags that reduce the memory of a run and do not change its results, with `place` for the optimizer's state.
fn exact_reductions(s: &Settings, prepared: &Prepared, place: Option<Flags>) -> Vec<Flags> {
    let mut exact = Vec::new();
    exact.extend((!s.algorithm.recompute).then(|| one("gradient_checkpointing", true)));
    // A stream contains at least a prompt and one completion.
    let least = prepared.longest().prompt_tokens() + s.algorithm.sampling.max_completion_length;
    let least = least.next_multiple_of(64);
    exact.extend((2 * least <= s.algorithm.stream_rows()).then(|| one("max_stream_tokens", least)));
    exact.extend(place);
    let keeps_media = prepared.forecast().need.memory.media_store > 0;
    exact.extend(keeps_media.then(|| one("mm_processor_cache_gb", 0)));
    exact
}

/// Returns the settings with other values of some flags; `None` if these contradict other settings.
pub fn changed(resolved: &Resolved, flags: &[(&'static str, String)]) -> Option<Settings> {
    let mut values = resolved.values.clone();
    for (name, text) in flags {
        let flag = flags::find(name).filter(|flag| flag.verbs.contains(&resolved.verb))?;
        values.set(Given::read(flag, &Raw::Arguments(vec![text.clone()]), Origin::Flag).ok()?);
    }
    let settings = Settings::from_values(&values, resolved.settings.env.clone()).ok()?;
    rules::check(resolved.verb, &settings).is_empty().then_some(settings)
}

fn table(forecast: &Forecast, ways: &[Way], ranks: usize) -> String {
    let memory = &forecast.need.memory;
    let when = match memory.peak {
        Phase::Rollout => "a rollout",
        Phase::Update => "an update",
        Phase::Evaluation => "an evaluation",
    };
    let whose = if ranks == 1 { "this run".to_owned() } else { format!("each of {ranks} ranks") };
    let mut out = format!("memory of {whose}, with its longest rows, in {when}\n\n");
    let bars = Bars::new(memory, forecast.limit, PART);
    out.push_str(&bars.parts(memory, forecast.limit));
    if ranks == 1 {
        out.push_str(&of_each(memory.each));
    }
    if let Some(main) = &forecast.need.main {
        out.push_str("\nits main memory\n\n");
        out.push_str(&Bars::new(main, forecast.main_limit, PART).parts(main, forecast.main_limit));
    }
    if !ways.is_empty() {
        out.push_str("\nwith other flags\n\n");
    }
    let names = ways.iter().map(|way| typed(&way.flags).len());
    let width = names.filter(|width| *width <= LONGEST_NAME).max().unwrap_or(0).max(PART);
    let bars = Bars { width, ..bars };
    for way in ways {
        let note = if forecast.allows(&way.need) { "  fits" } else { "" };
        out.push_str(&bars.line(&typed(&way.flags), way.need.memory.total(), note));
    }
    out
}

/// Lines of names, sizes and bars.
struct Bars {
    /// Size of the longest bar, bytes.
    most: u64,
    /// Width of the names, columns.
    width: usize,
}

impl Bars {
    /// Creates bars for the parts of a memory and its limit.
    fn new(memory: &Memory, limit: Limit, width: usize) -> Self {
        let most = limit.map_or(0, |(limit, _)| limit).max(memory.total()).max(memory.disk).max(1);
        Self { most, width }
    }

    fn line(&self, name: &str, bytes: u64, note: &str) -> String {
        let full = "█".repeat((bytes * BAR / self.most) as usize);
        let bar = if full.is_empty() && bytes > 0 { "▏" } else { &full };
        // A long name has a line of its own.
        let (own, name) = match name.len() > self.width {
            true => (format!("{name}\n"), ""),
            false => (String::new(), name),
        };
        format!("{own}{name:width$}  {:>9}  {bar}{note}\n", room::size(bytes), width = self.width)
    }

    /// Returns a line for each part that takes memory, for their sum and for the limit.
    fn parts(&self, memory: &Memory, limit: Limit) -> String {
        let parts = memory.parts().into_iter().filter(|(_, bytes)| *bytes > 0);
        let mut out: String = parts.map(|(name, bytes)| self.line(name, bytes, "")).collect();
        out.push_str(&self.line("all of it", memory.total(), ""));
        if let Some((bytes, whose)) = limit {
            let note = if fits(memory, limit) { "  it fits" } else { "  it does not fit" };
            out.push_str(&self.line(&format!("free, {whose}"), bytes, note));
        }
        if memory.disk > 0 {
            out.push_str(&self.line("moments and masters, on a disk", memory.disk, ""));
        }
        out
    }
}

/// Returns a line with the bytes of a trained weight, or nothing if no weight is trained.
fn of_each(each: BytesEach) -> String {
    let BytesEach { value, gradient, moments, master } = each;
    let whole = if value == 2 && master == 2 { "rest of its master" } else { "master" };
    let parts = [(value, "for itself"), (gradient, "gradient"), (moments, "moments"), (master, whole)];
    let parts: Vec<String> =
        parts.iter().filter(|(bytes, _)| *bytes > 0).map(|(bytes, what)| format!("{bytes} {what}")).collect();
    match each.total() {
        0 => String::new(),
        all => format!("{all} bytes a trained weight: {}\n", parts.join(", ")),
    }
}

fn as_json(forecast: &Forecast, ways: &[Way]) -> Json {
    let parts = |memory: &Memory| -> Map<String, Json> {
        memory.parts().into_iter().map(|(name, bytes)| (name.replace(' ', "_"), bytes.into())).collect()
    };
    let bytes = |limit: Limit| limit.map(|(limit, _)| limit);
    let ways = ways.iter().map(|way| {
        json!({
            "flags": typed(&way.flags),
            "total": way.need.memory.total(),
            "parts": parts(&way.need.memory),
            "fits": forecast.allows(&way.need),
        })
    });
    let Need { memory, main, .. } = &forecast.need;
    let main = main.map(|main| {
        json!({
            "total": main.total(),
            "parts": parts(&main),
            "disk": main.disk,
            "limit": bytes(forecast.main_limit),
            "fits": fits(&main, forecast.main_limit),
        })
    });
    json!({
        "total": memory.total(),
        "parts": parts(memory),
        "disk": memory.disk,
        "limit": bytes(forecast.limit),
        "fits": forecast.allows(&forecast.need),
        "main_memory": main,
        "with_other_flags": ways.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(weights: u64, activations: u64) -> Need {
        Need { memory: Memory { weights, activations, ..Memory::default() }, ..Need::default() }
    }

    #[test]
    fn bars_are_shares_of_the_longest_and_the_first_way_that_fits_is_told() {
        let forecast = Forecast {
            need: of(2_000_000_000, 2_000_000_000),
            limit: Some((3_000_000_000, "memory")),
            main_limit: None,
        };
        let way = |flags: &[(&'static str, &str)], need: Need| {
            let flags = flags.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
            Way { flags, need }
        };
        let ways = [
            way(&[("num_generations", "4")], of(2_000_000_000, 1_500_000_000)),
            way(&[("gradient_checkpointing", "true")], of(2_000_000_000, 500_000_000)),
            way(&[("use_peft", "true"), ("load_in_4bit", "true")], of(700_000_000, 500_000_000)),
        ];
        let told = table(&forecast, &ways, 1);
        let line = |start: &str| told.lines().find(|line| line.starts_with(start)).unwrap().to_owned();
        assert!(line("weights").ends_with(&format!(" 2.0 GB  {}", "█".repeat(20))), "{told}");
        assert!(line("all of it").ends_with(&format!(" 4.0 GB  {}", "█".repeat(40))), "{told}");
        assert!(line("free, memory").ends_with("  it does not fit"), "{told}");
        assert!(
            !line("--num_generations").ends_with("fits") && line("--gradient").ends_with("  fits"),
            "{told}"
        );
        assert!(!told.contains("adapters"), "what takes nothing has no line: {told}");

        let problem = too_much(&forecast, &ways).unwrap().to_string();
        for part in [
            "does not fit into memory",
            "4.0 GB (weights 2.0 GB, activations 2.0 GB)",
            "at most the free 3.0 GB",
            "with `--gradient_checkpointing` it takes 2.5 GB",
        ] {
            assert!(problem.contains(part), "{problem}");
        }
        assert!(too_much(&forecast, &ways[..1]).unwrap().to_string().contains("no flag"));
        let enough = Forecast { limit: Some((4_000_000_000, "memory")), ..forecast };
        assert!(too_much(&enough, &ways).is_none());

        // A run on a card has two kinds of memory, and has to fit into both.
        let main = Memory { weights: 1_000_000_000, pinned: 64_000_000, ..Memory::default() };
        let on_card = |main_limit| Forecast {
            need: Need { main: Some(main), ..forecast.need },
            limit: Some((4_000_000_000, "the GPU's memory")),
            main_limit: Some((main_limit, "main memory")),
        };
        let told = table(&on_card(2_000_000_000), &[], 1);
        let (_, beside) = told.split_once("\nits main memory\n\n").unwrap();
        assert!(beside.contains("pinned buffers") && beside.contains("  it fits"), "{told}");
        assert!(too_much(&on_card(2_000_000_000), &ways).is_none());
        let problem = too_much(&on_card(1_000_000_000), &ways).unwrap().to_string();
        assert!(problem.contains("does not fit into main memory") && problem.contains("1.1 GB"), "{problem}");
        let json = as_json(&on_card(1_000_000_000), &ways);
        assert_eq!((&json["fits"], &json["main_memory"]["fits"]), (&json!(false), &json!(false)));
        assert_eq!(json["main_memory"]["parts"]["pinned_buffers"], json!(64_000_000));

        let json = as_json(&enough, &ways);
        assert_eq!(json["main_memory"], Json::Null);
        assert_eq!(json["total"], json!(4_000_000_000_u64));
        assert_eq!((&json["fits"], &json["parts"]["activations"]), (&json!(true), &json!(2_000_000_000)));
        assert_eq!(json["with_other_flags"][2]["flags"], json!("--use_peft --load_in_4bit"));
    }
}
