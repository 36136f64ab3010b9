//! The command line: from words to a verb and its resolved settings.

use std::ffi::OsString;
use std::path::Path;

use clap::builder::PossibleValuesParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};

use crate::environment::Environment;
use crate::explain;
use crate::flags::{self, Flag, Kind, Section, Verb};
use crate::layer::{Entry, Layer};
use crate::names::Tracker;
use crate::problem::Problem;
use crate::settings::Settings;
use crate::values::{Given, Origin, Raw, Resolved, Value, Values};
use crate::{config, deepspeed, foreign, presets, rules, values};

/// Result of reading a command line.
#[derive(Debug)]
pub enum Parsed {
    /// Text to print before the program ends: help, version or settings.
    Print(String),
    /// Verb to run, with its resolved settings.
    Run(Box<Resolved>),
}

/// Reads a command line (the program's name first) and the environment.
///
/// # Errors
/// Returns an error with exit code 2 if settings are unknown, wrong, missing, contradictory or without effect.
pub fn parse<I, E>(args: I, environment: E) -> Result<Parsed, Problem>
where
    I: IntoIterator<Item = OsString>,
    E: Fn(&str) -> Option<String>,
{
    let args: Vec<OsString> = args.into_iter().collect();
    if args.get(1).is_some_and(|word| word == HELP) {
        return help_on(args).map(Parsed::Print);
    }
    let (known, mut entries) = match verb_of(&args) {
        Some(verb) => set_apart(verb, switched(verb, args)),
        None => (args, Vec::new()),
    };
    let matches = match command(Shown::Parsed).try_get_matches_from(&known) {
        Ok(matches) => matches,
        Err(error) => return clap_problem(&error, &known).map(Parsed::Print),
    };
    let Some((verb, matches)) = chosen(&matches) else {
        return Err(Problem::usage("no command").help("`omnigrpo --help` lists them"));
    };
    entries.extend(from_matches(verb, matches));
    let mut layer = Layer::read(entries, Some(verb));
    // A verb that takes a list of words cannot have stray words.
    let words = matches.try_get_many::<String>(STRAY).ok().flatten();
    layer.problems.extend(words.into_iter().flatten().map(|word| stray(verb, word)));
    if let (Verb::Plan, Some(flag)) = (verb, flags::find("dry_run")) {
        layer.given.push(Given { flag, value: Value::Bool(true), origin: Origin::Flag });
    }
    let print = layer.given.iter().any(|g| g.flag.name == "print_config" && g.value == Value::Bool(true));
    let environment = Environment::read(environment);
    let several = environment.several_processes.clone();
    let resolved = resolve(verb.runs(), layer, environment)?;
    if print {
        return Ok(Parsed::Print(explain::print_config(&resolved)));
    }
    let lacking =
        |flag: &&Flag| flag.required.contains(&verb.runs()) && resolved.values.lookup(flag.name).is_none();
    let mut missing: Vec<Problem> = flags::all()
        .filter(lacking)
        .map(|flag| {
            let spelling =
                if flag.positional { flag.name.to_uppercase() } else { format!("--{}", flag.name) };
            Problem::usage(format!("`{}` needs `{spelling}`", verb.name()))
                .expected(explain::expected(&flag.kind))
                .help(flag.help)
        })
        .collect();
    missing.extend(rules::needs(verb.runs(), &resolved.settings));
    Problem::all(missing)?;
    match several {
        Some(variable) if WRITES.contains(&verb) => Err(Problem::usage(format!(
            "a launcher started several processes of `{}`",
            verb.name()
        ))
        .got(variable)
        .expected("one process, because several would do the same work and write the same files")
        .help(
            "start the program without the launcher, since one process uses all cores; if the variable is \
                     left from another job, unset it",
        )),
        _ => Ok(Parsed::Run(Box::new(resolved))),
    }
}

/// Name of the command that shows the help of another command or of a setting.
const HELP: &str = "help";

/// Verbs that write files.
const WRITES: &[Verb] = &[
    Verb::Train,
    Verb::Sft,
    Verb::Generate,
    Verb::Score,
    Verb::Eval,
    Verb::DataConvert,
    Verb::RewardsRun,
    Verb::Export,
    Verb::Demo,
];

/// Combines defaults, preset, file and flags, and checks the result.
///
/// # Errors
/// Returns an error if settings are unknown, wrong, contradictory or without effect.
pub fn resolve(verb: Verb, flags: Layer, env: Environment) -> Result<Resolved, Problem> {
    let text = |layer: &Layer, name: &str| {
        layer.given.iter().find(|g| g.flag.name == name).and_then(|g| match &g.value {
            Value::Text(text) => Some(text.clone()),
            _ => None,
        })
    };
    let mut file = text(&flags, "config").map(|path| config::read(Path::new(&path))).unwrap_or_default();
    let preset = text(&flags, "preset").or_else(|| text(&file, "preset"));
    let preset = preset.map(|name| presets::layer(&name, verb)).unwrap_or_default();
    let (mut problems, mut dropped, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    notes.extend(presets::of_evaluation(&mut file, verb));
    let mut values = Values::defaults(verb);
    let trains_user_model = matches!(verb, Verb::Train | Verb::Sft);
    if let Some(name) = env.exp_name.clone().filter(|_| trains_user_model) {
        values.fill("exp_name", Value::Text(name), Origin::Environment("EXP_NAME"));
    }
    let defaults = values.clone();
    let mut preset_values = values.clone();
    // A file or preset describes a complete run; a verb uses only the settings that it takes.
    for layer in [preset, file, flags] {
        problems.extend(layer.problems);
        dropped.extend(layer.dropped);
        for given in layer.given.into_iter().filter(|given| given.flag.is_of(verb)) {
            if matches!(given.origin, Origin::Preset(_)) {
                preset_values.set(given.clone());
            }
            values.set(given);
        }
    }
    for (a, b, same) in rules::RIVALS {
        let (Some((left, l)), Some((right, r))) = (values.lookup(a), values.lookup(b)) else { continue };
        if *l == Origin::Default || *r == Origin::Default || l.rank() == r.rank() || !same(left, right) {
            continue;
        }
        let weaker = if l.rank() < r.rank() { a } else { b };
        values.reset(weaker, verb);
    }
    presets::complete(&mut values);
    offload(&mut values);
    notes.extend(presets::reweigh(&mut values, &preset_values));
    let settings = match Settings::from_values(&values, env.clone()) {
        Ok(settings) => settings,
        Err(problem) => {
            problems.push(problem.clone());
            Problem::all(problems)?;
            return Err(problem);
        }
    };
    if values.lookup("advantage").is_some() && values.lookup("scale_rewards").is_some() {
        problems.push(
            Problem::usage("`scale_rewards` and `advantage` both set the divisor of the rewards")
                .expected("one of them"),
        );
    }
    for flag in flags::all().filter(|flag| flag.of_recipe) {
        // The printed settings are complete and can be read back, so of two names for one thing only the given one is printed.
        let stands = flag.name == "advantage" && values.lookup("scale_rewards").is_some();
        if let (false, Some(value)) = (stands, (flag.place.get)(&settings)) {
            values.fill(flag.name, value, Origin::Recipe(settings.recipe.name));
        }
    }
    let mut idle = Vec::new();
    let taken = flags::all().filter(|flag| flag.is_of(verb));
    for (flag, when, overridden) in taken.flat_map(|f| [(f, f.overridden, true), (f, f.idle, false)]) {
        let Some(why) = when(&settings, verb) else { continue };
        idle.push((flag.name, why.to_owned()));
        // A value equal to the default changes nothing.
        let same = |base: &Values, value: &Value| base.lookup(flag.name).is_some_and(|(v, _)| v == value);
        match values.lookup(flag.name).cloned() {
            Some((value, origin @ (Origin::Flag | Origin::Config(_))))
                if !same(&defaults, &value) && !same(&preset_values, &value) =>
            {
                if overridden {
                    notes.push(format!("`{}` {} is not used: {why}", flag.name, explain::yaml(&value)));
                } else {
                    let problem = Problem::usage(format!("`{}` has no effect in this run", flag.name))
                        .got(explain::yaml(&value))
                        .help(format!("{why}; leave `{}` out, or change that", flag.name));
                    problems.push(match origin {
                        Origin::Config(place) => problem.at(place),
                        _ => problem,
                    });
                }
            }
            _ => {}
        }
        values.reset(flag.name, verb);
    }
    let settings = Settings::from_values(&values, env)?;
    problems.extend(rules::check(verb, &settings));
    Problem::all(problems)?;
    fold_weights(&mut values, &settings.rewards.options.weights, verb);
    if !dropped.is_empty() {
        notes.push(without_counterpart(&dropped));
    }
    notes.extend(rules::doubts(verb, &settings));
    if verb == Verb::Train {
        notes.extend(rules::unreached_clip(&values, &settings));
    }
    notes.extend(notes_of(&settings));
    Ok(Resolved { verb, values, idle, settings, notes })
}

/// Applies the offloading of a DeepSpeed file, unless the setting itself is given or the device is the CPU.
fn offload(values: &mut Values) {
    let Some((Value::Text(path), _)) = values.lookup("deepspeed").cloned() else { return };
    let on_cpu = values.lookup("device").is_some_and(|(device, _)| *device == Value::Text("cpu".to_owned()));
    let asked = values.rank("offload_optimizer") == 0 && deepspeed::offloads_optimizer(Path::new(&path));
    if let (Some(flag), true, false) = (flags::find("offload_optimizer"), asked, on_cpu) {
        values.set(Given { flag, value: Value::Bool(true), origin: Origin::Config(path) });
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

/// Separates switches from the words of a command: the word behind a switch is its value only if it means on or off, as in
/// `watch --tui DIR`.
fn switched(verb: Verb, args: Vec<OsString>) -> Vec<OsString> {
    if !flags::all().any(|flag| flag.positional && flag.is_of(verb)) {
        return args;
    }
    let is_switch = |arg: &str| {
        let flag = arg.strip_prefix("--").and_then(flags::find);
        flag.is_some_and(|flag| matches!(flag.kind, Kind::Bool) && flag.is_of(verb))
    };
    let mut out = Vec::with_capacity(args.len());
    let mut rest = args.into_iter().peekable();
    while let Some(mut arg) = rest.next() {
        let text = arg.to_string_lossy().into_owned();
        if text == "--" {
            out.push(arg);
            break;
        }
        let says = |next: &OsString| {
            values::parse(&Kind::Bool, &Raw::Arguments(vec![next.to_string_lossy().into()]))
        };
        if is_switch(&text) && rest.peek().is_some_and(|next| says(next).is_err()) {
            arg.push("=true");
        }
        out.push(arg);
    }
    out.extend(rest);
    out
}

/// Takes flags that clap does not know, and those of other trainers, out of a command line, each with its values up to the
/// next flag.
fn set_apart(verb: Verb, args: Vec<OsString>) -> (Vec<OsString>, Vec<Entry>) {
    let (mut known, mut entries) = (Vec::new(), Vec::<Entry>::new());
    let (mut apart, mut rest) = (false, false);
    for arg in args {
        let text = arg.to_string_lossy();
        rest |= text == "--";
        if let Some((name, value)) = foreign::dotted(&text).filter(|_| !rest) {
            apart = true;
            let raw = Some(Raw::Arguments(vec![value.to_owned()]));
            entries.push(Entry { name: name.to_owned(), raw, origin: Origin::Flag });
            continue;
        }
        let name = text.strip_prefix("--").filter(|name| !rest && !name.is_empty());
        if let Some(name) = name {
            let (name, value) = match name.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (name, None),
            };
            let taken = flags::find(name).is_some_and(|flag| !flag.positional && flag.is_of(verb));
            apart = foreign::knows(name) || !(taken || matches!(name, HELP | "version"));
            if apart {
                let words = value.into_iter().collect();
                entries.push(Entry {
                    name: name.to_owned(),
                    raw: Some(Raw::Arguments(words)),
                    origin: Origin::Flag,
                });
            }
        }
        match entries.last_mut() {
            Some(Entry { raw: Some(Raw::Arguments(words)), .. }) if apart && !rest => {
                if name.is_none() {
                    words.push(text.into_owned());
                }
            }
            _ => known.push(arg),
        }
    }
    for entry in &mut entries {
        // A bare flag is a switch.
        if let Some(Raw::Arguments(words)) = &mut entry.raw
            && words.is_empty()
        {
            words.push("true".into());
        }
    }
    (known, entries)
}

/// Purpose for which the command line is described.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// Parsing. [`Layer::read`] checks the number of values and of repetitions, because it reports all mistakes and clap only the
    /// first.
    Parsed,
    /// The help `-h`: the settings of a first run.
    First,
    /// The help `--help`, manual pages and completion scripts: every setting.
    All,
}

/// Returns a description of the complete command line for clap.
pub fn command(shown: Shown) -> Command {
    let root = Command::new("omnigrpo")
        .version(env!("CARGO_PKG_VERSION"))
        .about("GRPO post-training for models that read, see and hear")
        .after_help(
            "`omnigrpo COMMAND -h` shows the settings of a first run, `--help` all of them, `omnigrpo help SETTING` one.\n\
             Settings can also come from `--config FILE.yaml` or `--preset NAME`.",
        )
        .subcommand_required(true)
        .disable_help_subcommand(true)
        .term_width(100);
    let mut root = root.subcommand(
        Command::new(HELP)
            .about("Show the help of a command or of a setting")
            .arg(Arg::new("words").value_name("COMMAND|SETTING").num_args(0..)),
    );
    let mut groups: Vec<Command> = Vec::new();
    for verb in Verb::ALL {
        match verb.words() {
            [group, _] => {
                let leaf = verb_command(*verb, shown);
                match groups.iter().position(|g| g.get_name() == *group) {
                    Some(i) => groups[i] = groups[i].clone().subcommand(leaf),
                    None => groups.push(
                        Command::new(*group)
                            .about(match *group {
                                "data" => "Check, show and convert datasets",
                                _ => "List and run reward functions",
                            })
                            .subcommand_required(true)
                            .disable_help_subcommand(true)
                            .subcommand(leaf),
                    ),
                }
            }
            _ => root = root.subcommand(verb_command(*verb, shown)),
        }
    }
    root.subcommands(groups)
}

/// Heading of the settings that `-h` shows.
const FIRST: &str = "Settings of a first run";

fn verb_command(verb: Verb, shown: Shown) -> Command {
    let (name, lenient) = (verb.words().last().copied().unwrap_or_default(), shown == Shown::Parsed);
    let first = verb.first_settings();
    let count = flags::all().filter(|flag| flag.is_of(verb)).count();
    let more = match first {
        [] => "Names may be written with dashes. Lists take spaces or commas.".to_owned(),
        _ if shown == Shown::First => {
            format!("`omnigrpo {} --help` shows all {count} settings.", verb.name())
        }
        _ => format!(
            "`omnigrpo {} -h` shows the settings of a first run alone. Names may be written with dashes. Lists take \
             spaces or commas.",
            verb.name()
        ),
    };
    let mut command = Command::new(name)
        .about(verb.about())
        .next_line_help(true)
        .after_help(format!("Example:\n  {}\n\n{more}", verb.example()))
        .disable_help_flag(true)
        .term_width(100);
    let common = first.iter().filter_map(|name| flags::find(name)).map(|flag| (FIRST, flag));
    let others =
        Section::ALL.iter().flat_map(|section| section.rows().iter().map(|flag| (section.title(), flag)));
    let others = others.filter(|(_, flag)| !first.contains(&flag.name));
    let others = others.filter(|_| first.is_empty() || shown != Shown::First);
    for (heading, flag) in common.chain(others).filter(|(_, flag)| flag.is_of(verb)) {
        let arg = argument(flag, verb, shown).help_heading(heading);
        command = command.arg(match flag.kind {
            // clap gets the names only for completion scripts, because the text of the help lists them already.
            Kind::Choice(names) if !lenient => arg
                .value_parser(PossibleValuesParser::new(names().into_iter().map(|(name, _)| name)))
                .hide_possible_values(true),
            kind if flag.positional && kind.is_list() => arg.num_args(0..),
            _ if flag.positional || !lenient => arg,
            kind if kind.is_list() => arg.num_args(0..),
            _ => arg.num_args(0..=1).action(ArgAction::Append),
        });
    }
    command = command.arg(
        Arg::new(HELP)
            .short('h')
            .long(HELP)
            .action(ArgAction::Help)
            .help("Show the settings of a first run (-h) or all of them (--help)")
            .help_heading("Help"),
    );
    // A verb that takes a list of words cannot have stray words.
    let words = |flag: &&Flag| flag.positional && flag.kind.is_list() && flag.is_of(verb);
    if lenient && !flags::all().any(|flag| words(&flag)) {
        command.arg(Arg::new(STRAY).num_args(0..))
    } else {
        command
    }
}

fn argument(flag: &'static Flag, verb: Verb, shown: Shown) -> Arg {
    let arg = Arg::new(flag.name).help(explain::help(flag, verb, shown == Shown::First));
    if flag.positional {
        return arg.value_name(flag.name.to_uppercase());
    }
    let dashed = |name: &str| name.replace('_', "-");
    let mut others: Vec<String> = flag.aliases.iter().flat_map(|a| [(*a).to_string(), dashed(a)]).collect();
    others.push(dashed(flag.name));
    others.retain(|name| name != flag.name);
    others.sort();
    others.dedup();
    let arg = arg.long(flag.name).aliases(others).value_name(explain::placeholder(&flag.kind));
    match flag.kind {
        Kind::Bool => arg.num_args(0..=1).default_missing_value("true"),
        Kind::Path => arg.value_hint(ValueHint::AnyPath),
        Kind::Paths(_) => arg.value_hint(ValueHint::AnyPath).num_args(1..).action(ArgAction::Append),
        Kind::Int { .. } | Kind::Float { .. } => arg.allow_negative_numbers(true),
        Kind::Floats => arg.num_args(1..).action(ArgAction::Append).allow_negative_numbers(true),
        kind if kind.is_list() => arg.num_args(1..).action(ArgAction::Append),
        _ => arg,
    }
}

fn chosen(matches: &ArgMatches) -> Option<(Verb, &ArgMatches)> {
    let (first, inner) = matches.subcommand()?;
    let (words, inner) = match inner.subcommand() {
        Some((second, leaf)) => (vec![first, second], leaf),
        None => (vec![first], inner),
    };
    Verb::ALL.iter().find(|verb| verb.words() == words).map(|verb| (*verb, inner))
}

fn from_matches(verb: Verb, matches: &ArgMatches) -> Vec<Entry> {
    let mut entries = Vec::new();
    for flag in flags::all().filter(|flag| flag.is_of(verb)) {
        let Some(times) = matches.get_occurrences::<String>(flag.name) else { continue };
        let mut times: Vec<Vec<String>> = times.map(|words| words.cloned().collect()).collect();
        if flag.kind.is_list() {
            times = vec![times.concat()];
        }
        entries.extend(times.into_iter().map(|words| Entry {
            name: flag.name.to_owned(),
            raw: (!words.is_empty()).then_some(Raw::Arguments(words)),
            origin: Origin::Flag,
        }));
    }
    entries
}

/// Name of the argument that collects words that belong to no flag.
const STRAY: &str = "stray";

fn stray(verb: Verb, word: &str) -> Problem {
    let verb = verb.name();
    Problem::usage(format!("unexpected `{word}`"))
        .expected(format!("flags of `{verb}`, written `--name value`"))
        .help(format!("`omnigrpo {verb} --help` lists them"))
}

/// Returns the verb at the start of a command line, for errors that clap raises before it reports the verb.
fn verb_of(args: &[OsString]) -> Option<Verb> {
    let words: Vec<&str> = args.iter().skip(1).take(2).filter_map(|a| a.to_str()).collect();
    Verb::ALL.iter().copied().find(|verb| words.starts_with(verb.words()))
}

/// Returns the help of the command at the start of `args`: only the settings of a first run if `args` contain `-h`.
fn help(args: &[OsString]) -> String {
    let shown = if args.iter().any(|arg| arg == "-h") { Shown::First } else { Shown::All };
    let words = args.iter().take_while(|arg| !arg.to_string_lossy().starts_with('-'));
    let asked = words.cloned().chain([OsString::from("--help")]);
    command(shown).try_get_matches_from(asked).err().map(|help| help.render().to_string()).unwrap_or_default()
}

/// Returns the answer to `help`, `help COMMAND` and `help SETTING`.
fn help_on(mut args: Vec<OsString>) -> Result<String, Problem> {
    args.remove(1);
    let words: Vec<String> = args[1..].iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let words: Vec<&str> =
        words.iter().map(String::as_str).filter(|word| !matches!(*word, "-h" | "--help")).collect();
    let is_command = Verb::ALL.iter().any(|verb| verb.words().starts_with(&words) || words == verb.words());
    if is_command || matches!(words[..], [HELP]) {
        return Ok(help(&args));
    }
    let name = words.join(" ");
    if let Some(flag) = flags::find(name.trim_start_matches("--")) {
        return Ok(explain::setting(flag));
    }
    let commands = Verb::ALL.iter().map(|verb| verb.name()).collect::<Vec<_>>();
    let near = explain::nearest(
        &name,
        commands.iter().map(String::as_str).chain(flags::all().map(|flag| flag.name)),
    );
    let problem = Problem::usage(format!("no command and no setting is named `{name}`"));
    Err(match near {
        Some(near) => problem.help(format!("did you mean `omnigrpo help {near}`?")),
        None => problem.help("`omnigrpo --help` lists the commands, `omnigrpo train --help` the settings"),
    })
}

/// Returns the help, or the problem that clap found.
fn clap_problem(error: &clap::Error, args: &[OsString]) -> Result<String, Problem> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::DisplayHelp => Ok(help(args)),
        ErrorKind::DisplayVersion => Ok(error.render().to_string()),
        ErrorKind::UnknownArgument => {
            let word = context(ContextKind::InvalidArg).unwrap_or_default();
            Err(match verb_of(args) {
                Some(verb) => stray(verb, &word),
                None => Problem::usage(format!("unexpected `{word}`"))
                    .help("`omnigrpo --help` lists the commands"),
            })
        }
        ErrorKind::InvalidSubcommand => {
            let word = context(ContextKind::InvalidSubcommand).unwrap_or_default();
            let problem = Problem::usage(format!("unknown command `{word}`"));
            let near =
                explain::nearest(&word, Verb::ALL.iter().filter_map(|verb| verb.words().last().copied()));
            let near = Verb::ALL.iter().find(|verb| verb.words().last().copied() == near);
            Err(match near {
                Some(verb) => problem.help(format!("did you mean `omnigrpo {}`?", verb.name())),
                None => problem.help("`omnigrpo --help` lists the commands"),
            })
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Err(Problem::usage("no command").help("`omnigrpo --help` lists them"))
        }
        _ => {
            let text = error.render().to_string();
            let first = text.lines().next().unwrap_or_default();
            Err(Problem::usage(first.trim_start_matches("error: ").to_string()))
        }
    }
}
