//! The command line: words to a verb and its resolved settings.

use std::ffi::OsString;
use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::explain::{self, Problem};
use crate::flags::{self, FLAGS, FOREIGN, Flag, Kind, Section, Verb};
use crate::settings::{Environment, Settings, needs, recipe_values};
use crate::values::{Given, Origin, Raw, Resolved, Value, Values};
use crate::{config, presets, rules};

/// What a command line asks for.
#[derive(Debug)]
pub enum Parsed {
    /// Print this and stop: help, version or settings.
    Print(String),
    /// Run the verb.
    Run(Box<Resolved>),
}

/// Reads a command line (the program's name first) and the environment.
///
/// # Errors
/// Anything unknown, wrong, missing, contradictory or without effect; exit code 2.
pub fn parse<I, E>(args: I, environment: E) -> Result<Parsed, Problem>
where
    I: IntoIterator<Item = OsString>,
    E: Fn(&str) -> Option<String>,
{
    let args: Vec<OsString> = args.into_iter().collect();
    let matches = match command().try_get_matches_from(&args) {
        Ok(matches) => matches,
        Err(error) => return from_clap(&error, verb_of(&args)),
    };
    let Some((verb, matches)) = chosen(&matches) else {
        return Err(Problem::usage("no command").help("`omnigrpo --help` lists them"));
    };
    let given = from_matches(verb, matches)?;
    let print_config = given.iter().any(|g| g.flag.name == "print_config" && g.value == Value::Bool(true));
    let resolved = resolve(verb, given, Environment::read(environment))?;
    if print_config {
        return Ok(Parsed::Print(explain::print_config(&resolved)));
    }
    for flag in FLAGS.iter().filter(|flag| flag.required.contains(&verb)) {
        if resolved.values.lookup(flag.name).is_none() {
            let spelling =
                if flag.positional { flag.name.to_uppercase() } else { format!("--{}", flag.name) };
            return Err(Problem::usage(format!("`{}` needs `{spelling}`", verb.name()))
                .expected(explain::expected(&flag.kind))
                .help(flag.help));
        }
    }
    match needs(verb, &resolved.settings) {
        Some(problem) => Err(problem),
        None => Ok(Parsed::Run(Box::new(resolved))),
    }
}

/// Puts defaults, preset, file and flags on top of each other and checks the result.
///
/// # Errors
/// As [`parse`], except for what is missing.
pub fn resolve(verb: Verb, flags: Vec<Given>, env: Environment) -> Result<Resolved, Problem> {
    let text = |given: &[Given], name: &str| {
        given.iter().find(|g| g.flag.name == name).and_then(|g| match &g.value {
            Value::Text(text) => Some(text.clone()),
            _ => None,
        })
    };
    let file = match text(&flags, "config") {
        Some(path) => config::read(Path::new(&path))?,
        None => vec![],
    };
    let preset = text(&flags, "preset").or_else(|| text(&file, "preset"));
    let preset = match preset.as_deref().and_then(|name| Some((name, presets::text(name)?))) {
        Some((name, yaml)) => config::parse(yaml, name, |_| Origin::Preset(name.to_string()))?,
        None => vec![],
    };
    let mut values = Values::defaults(verb)?;
    // A file or preset describes a run; other verbs take from it what concerns them.
    for given in preset.into_iter().chain(file).chain(flags) {
        if given.flag.verbs.contains(&verb) {
            values.set(given);
        }
    }
    presets::complete(&mut values);
    let settings = Settings::from_values(&values, env.clone())?;
    if values.lookup("advantage").is_some() && values.lookup("scale_rewards").is_some() {
        return Err(
            Problem::usage("`scale_rewards` and `advantage` both name the deviation").expected("one of them")
        );
    }
    let recipe = settings.loss.recipe;
    for (name, value) in recipe_values(recipe, &values) {
        values.fill(name, value, Origin::Recipe(recipe.name));
    }
    let defaults = Values::defaults(verb)?;
    let mut idle = Vec::new();
    for rule in rules::IDLE {
        let Some(why) = (rule.when)(&settings) else { continue };
        let takes = |f: &&Flag| f.name == rule.flag && f.verbs.contains(&verb) && rule.verbs.contains(&verb);
        let Some(flag) = FLAGS.iter().find(takes) else { continue };
        idle.push((flag.name, why));
        match values.lookup(flag.name) {
            Some((value, origin @ (Origin::Flag | Origin::Config(_))))
                if Some(value) != defaults.lookup(flag.name).map(|(default, _)| default) =>
            {
                let mut problem = Problem::usage(format!("`{}` has no effect in this run", flag.name))
                    .got(explain::yaml(value))
                    .help(format!("{why}; leave `{}` out, or change that", flag.name));
                if let Origin::Config(place) = origin {
                    problem = problem.at(place);
                }
                return Err(problem);
            }
            _ => values.reset(flag.name, verb)?,
        }
    }
    let settings = Settings::from_values(&values, env)?;
    rules::check(verb, &settings)?;
    let notes = notes(&settings.env);
    Ok(Resolved { verb, values, idle, settings, notes })
}

/// What the environment contributes to a run, for `--print_config`.
fn notes(env: &Environment) -> Vec<String> {
    let mut notes = Vec::new();
    if env.wandb_disabled {
        notes.push("WANDB_DISABLED is on: nothing is sent to W&B, as always".into());
    }
    if env.debug_mode {
        notes.push(
            "DEBUG_MODE is on: every completion with its rewards is in rollouts/ of the run directory, as always; \
             LOG_PATH is not written"
                .into(),
        );
    }
    if env.ds_skip_cuda_check {
        notes
            .push("DS_SKIP_CUDA_CHECK is on: no effect, there is no DeepSpeed and no CUDA check here".into());
    }
    if let Some(devices) = &env.cuda_visible_devices {
        notes.push(format!("CUDA_VISIBLE_DEVICES={devices}"));
    }
    if let Some(processes) = env.world_size.filter(|&n| n > 1) {
        notes.push(format!(
            "WORLD_SIZE={processes}: no effect, a run is one process; of several that a launcher starts, one gets the \
             run directory and the others end with an error"
        ));
    }
    notes
}

/// The whole command line as clap sees it.
pub fn command() -> Command {
    let root = Command::new("omnigrpo")
        .version(env!("CARGO_PKG_VERSION"))
        .about("GRPO post-training for models that read, see and hear")
        .after_help(
            "Every command takes --help. Settings can also come from --config FILE.yaml or --preset NAME.",
        )
        .subcommand_required(true)
        .disable_help_subcommand(true)
        .term_width(100);
    let mut root = root;
    let mut groups: Vec<Command> = Vec::new();
    for verb in Verb::ALL {
        match verb.words() {
            [group, _] => {
                let leaf = verb_command(*verb);
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
            _ => root = root.subcommand(verb_command(*verb)),
        }
    }
    root.subcommands(groups)
}

fn verb_command(verb: Verb) -> Command {
    let name = verb.words().last().copied().unwrap_or_default();
    let mut command = Command::new(name)
        .about(verb.about())
        .next_line_help(true)
        .after_help("Names may be written with dashes. Lists take spaces or commas.")
        .term_width(100);
    for section in Section::ALL {
        for flag in FLAGS.iter().filter(|f| f.section == *section && f.verbs.contains(&verb)) {
            command = command.arg(argument(flag, verb));
        }
    }
    command
}

fn argument(flag: &'static Flag, verb: Verb) -> Arg {
    let arg = Arg::new(flag.name).help(explain::help(flag, verb)).help_heading(flag.section.title());
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

fn from_matches(verb: Verb, matches: &ArgMatches) -> Result<Vec<Given>, Problem> {
    FLAGS
        .iter()
        .filter(|flag| flag.verbs.contains(&verb))
        .filter_map(|flag| Some((flag, matches.get_many::<String>(flag.name)?)))
        .map(|(flag, texts)| Given::read(flag, &Raw::Arguments(texts.cloned().collect()), Origin::Flag))
        .collect()
}

/// The verb at the start of a command line, for errors that clap raises before it tells.
fn verb_of(args: &[OsString]) -> Option<Verb> {
    let words: Vec<&str> = args.iter().skip(1).take(2).filter_map(|a| a.to_str()).collect();
    Verb::ALL.iter().copied().find(|verb| words.starts_with(verb.words()))
}

fn from_clap(error: &clap::Error, verb: Option<Verb>) -> Result<Parsed, Problem> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Parsed::Print(error.render().to_string())),
        ErrorKind::UnknownArgument => {
            Err(unknown_flag(&context(ContextKind::InvalidArg).unwrap_or_default(), verb))
        }
        ErrorKind::InvalidSubcommand => {
            let word = context(ContextKind::InvalidSubcommand).unwrap_or_default();
            let problem = Problem::usage(format!("unknown command `{word}`"));
            let near = Verb::ALL
                .iter()
                .map(|verb| (strsim::jaro_winkler(&word, verb.words().last().unwrap_or(&"")), verb))
                .filter(|(score, _)| *score > 0.75)
                .max_by(|a, b| a.0.total_cmp(&b.0));
            Err(match near {
                Some((_, verb)) => problem.help(format!("did you mean `omnigrpo {}`?", verb.name())),
                None => problem.help("`omnigrpo --help` lists the commands"),
            })
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Err(Problem::usage("no command").help("`omnigrpo --help` lists them"))
        }
        ErrorKind::ArgumentConflict => {
            let name = context(ContextKind::InvalidArg).unwrap_or_default();
            let name = name.split_whitespace().next().unwrap_or_default();
            Err(Problem::usage(format!("`{name}` is given twice"))
                .expected("each flag once, under one of its names"))
        }
        ErrorKind::InvalidValue | ErrorKind::TooFewValues | ErrorKind::WrongNumberOfValues => {
            let name = context(ContextKind::InvalidArg).unwrap_or_default();
            let flag = flag_of(&name);
            let problem = Problem::usage(format!(
                "`{}` has no value",
                name.split_whitespace().next().unwrap_or_default()
            ));
            Err(match flag {
                Some(flag) => problem.expected(explain::expected(&flag.kind)),
                None => problem,
            })
        }
        _ => {
            let text = error.render().to_string();
            let first = text.lines().next().unwrap_or_default();
            Err(Problem::usage(first.trim_start_matches("error: ").to_string()))
        }
    }
}

fn flag_of(argument: &str) -> Option<&'static Flag> {
    let name = argument.trim_start_matches('-');
    let end = name.find(|c: char| c == '=' || c.is_whitespace()).unwrap_or(name.len());
    flags::find(&name[..end])
}

fn unknown_flag(argument: &str, verb: Option<Verb>) -> Problem {
    let name = argument.trim_start_matches('-');
    let name = name.split('=').next().unwrap_or_default();
    let verb_name = verb.map(Verb::name).unwrap_or_default();
    if !argument.starts_with("--") {
        return Problem::usage(format!("unexpected `{argument}`"))
            .expected(format!("flags of `{verb_name}`, written `--name value`"))
            .help(format!("`omnigrpo {verb_name} --help` lists them"));
    }
    let problem = Problem::usage(format!("unknown flag `--{name}`"));
    if let Some(flag) = flag_of(argument) {
        let verbs: Vec<String> = flag.verbs.iter().map(|v| format!("`{}`", v.name())).collect();
        return Problem::usage(format!("`{verb_name}` does not take `--{name}`"))
            .help(format!("it is a flag of {}", verbs.join(", ")));
    }
    let normal = name.replace('-', "_");
    if let Some((_, advice)) = FOREIGN.iter().find(|(names, _)| names.contains(&normal.as_str())) {
        return problem.help(*advice);
    }
    match flags::closest(name, |flag| !flag.positional && verb.is_none_or(|v| flag.verbs.contains(&v))) {
        Some(near) => problem.help(format!("did you mean `--{near}`?")),
        None => problem.help(format!("`omnigrpo {verb_name} --help` lists the flags")),
    }
}
