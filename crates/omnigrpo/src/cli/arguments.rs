//! The command line: from words to a verb and its resolved settings.

use std::ffi::OsString;

use clap::builder::PossibleValuesParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};
use omnigrpo_guard::names::{nearest, shown};

use super::help;
use super::verbs::demo;
use crate::settings::flags::{self, Flag, Kind, Section, Verb};
use crate::settings::layer::{Entry, Layer};
use crate::settings::values::{self, Given, Origin, Raw, Resolved, Value};
use crate::settings::{Environment, Problem, Settings, explain, foreign, print_config, resolve, rules};

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
    let Some((verb, matches)) = chosen(&matches) else { return Ok(Parsed::Print(help_page(&known))) };
    entries.extend(from_matches(verb, matches));
    let mut layer = Layer::read(entries, Some(verb));
    // A verb that takes a list of words cannot have stray words.
    let words = matches.try_get_many::<String>(STRAY).ok().flatten();
    layer.problems.extend(words.into_iter().flatten().map(|word| stray(verb, word)));
    // Both look at a run without starting it.
    if let (Verb::Plan | Verb::Init, Some(flag)) = (verb, flags::find("dry_run")) {
        layer.given.push(Given { flag, value: Value::Bool(true), origin: Origin::Flag });
    }
    let output = layer.given.iter().find(|g| verb == Verb::Init && g.flag.name == "output").cloned();
    let print = layer.given.iter().any(|g| g.flag.name == "print_config" && g.value == Value::Bool(true));
    let environment = Environment::read(environment);
    let processes = environment.processes;
    let mut resolved = resolve(verb.runs(), layer, environment)?;
    if print {
        // The demo has the settings of its recipe.
        if verb == Verb::Demo {
            resolved = demo::run_settings(&resolved)?;
        }
        return Ok(Parsed::Print(print_config(&resolved)));
    }
    if verb == Verb::Init {
        // `init` asks for missing settings itself, and `train` has no file to write.
        resolved.verb = verb;
        if let Some(output) = output {
            resolved.values.set(output);
            resolved.settings = Settings::from_values(&resolved.values, resolved.settings.env.clone())?;
        }
    } else {
        Problem::all(missing(verb, &resolved))?;
    }
    if processes > 1 && WRITES.contains(&verb) {
        return Err(Problem::usage(format!("a launcher started several processes of `{}`", verb.name()))
            .got(format!("{processes} processes"))
            .expected("one process, because several would do the same work and write the same files")
            .help(
                "start the program without the launcher, since one process uses all cores; if the variables of the \
                 launcher are left from another job, unset them; `train`, `sft`, `generate` and `eval` divide their work over processes",
            ));
    }
    Ok(Parsed::Run(Box::new(resolved)))
}

/// Returns a problem for each setting that a verb needs and that has no value.
fn missing(verb: Verb, resolved: &Resolved) -> Vec<Problem> {
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
    missing
}

/// Name of the command that shows the help of another command or of a setting.
const HELP: &str = "help";

/// Verbs that write files as one process.
const WRITES: &[Verb] =
    &[Verb::Init, Verb::Score, Verb::DataConvert, Verb::RewardsRun, Verb::Convert, Verb::Export, Verb::Demo];

/// Separates switches from the words of a command: the word behind a switch is its value only if it means on or off, as in
/// `watch --tui DIR`.
fn switched(verb: Verb, args: Vec<OsString>) -> Vec<OsString> {
    if !flags::all().any(|flag| flag.positional && flag.is_of(verb)) {
        return args;
    }
    let switch = |arg: &str| {
        let flag = arg.strip_prefix("--").and_then(flags::find);
        flag.filter(|flag| matches!(flag.kind, Kind::Bool | Kind::Switch(_)) && flag.is_of(verb))
    };
    let mut out = Vec::with_capacity(args.len());
    let mut rest = args.into_iter().peekable();
    while let Some(mut arg) = rest.next() {
        let text = arg.to_string_lossy().into_owned();
        if text == "--" {
            out.push(arg);
            break;
        }
        let says = |next: &OsString, kind: &Kind| {
            values::parse(kind, &Raw::Arguments(vec![next.to_string_lossy().into()])).is_ok()
        };
        if let (Some(flag), Some(next)) = (switch(&text), rest.peek())
            && !says(next, &flag.kind)
        {
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
        .version(omnigrpo_observe::version())
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
            .about("Show the help of a command, of a setting or of a topic such as `lora`")
            .arg(helped(Arg::new("words").value_name("COMMAND|SETTING|TOPIC").num_args(0..), shown)),
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

/// Adds the words that `help` knows, for completion scripts.
fn helped(arg: Arg, shown: Shown) -> Arg {
    if shown != Shown::All {
        return arg;
    }
    let commands = Verb::ALL.iter().filter_map(|verb| verb.words().first().copied());
    let mut words: Vec<&str> = commands.chain(flags::all().map(|flag| flag.name)).collect();
    words.sort_unstable();
    words.dedup();
    arg.value_parser(PossibleValuesParser::new(words)).hide_possible_values(true)
}

/// Heading of the settings that `-h` shows.
const FIRST: &str = "Settings of a first run";

fn verb_command(verb: Verb, shown: Shown) -> Command {
    let (name, lenient) = (verb.words().last().copied().unwrap_or_default(), shown == Shown::Parsed);
    let first = verb.first_settings();
    let count = flags::all().filter(|flag| flag.is_of(verb)).count();
    let more = match shown {
        _ if first.is_empty() => "Names may be written with dashes. Lists take spaces or commas.".to_owned(),
        Shown::First => {
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
    let arg = Arg::new(flag.name).help(help::help(flag, verb, shown == Shown::First));
    if flag.positional {
        return arg.value_name(flag.name.to_uppercase());
    }
    let dashed = |name: &str| name.replace('_', "-");
    let mut others: Vec<String> = flag.aliases.iter().flat_map(|a| [(*a).to_string(), dashed(a)]).collect();
    others.push(dashed(flag.name));
    others.retain(|name| name != flag.name);
    others.sort();
    others.dedup();
    let arg = arg.long(flag.name).aliases(others).value_name(help::placeholder(&flag.kind));
    match flag.kind {
        Kind::Bool | Kind::Switch(_) => arg.num_args(0..=1).default_missing_value("true"),
        Kind::Path => match flag.alone.iter().find(|(of, _)| *of == verb) {
            Some((_, value)) => arg
                .value_hint(ValueHint::AnyPath)
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value(*value),
            None => arg.value_hint(ValueHint::AnyPath),
        },
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
    Problem::usage(format!("unexpected `{}`", shown(word)))
        .expected(format!("flags of `{verb}`, written `--name value`"))
        .help(format!("`omnigrpo {verb} --help` lists them"))
}

/// Returns the verb at the start of a command line, for errors that clap raises before it reports the verb.
fn verb_of(args: &[OsString]) -> Option<Verb> {
    let words: Vec<&str> = args.iter().skip(1).take(2).filter_map(|a| a.to_str()).collect();
    Verb::ALL.iter().copied().find(|verb| words.starts_with(verb.words()))
}

/// Returns the help of the command at the start of `args`: only the settings of a first run if `args` contain `-h`.
fn help_page(args: &[OsString]) -> String {
    let shown = if args.iter().any(|arg| arg == "-h") { Shown::First } else { Shown::All };
    let words = args.iter().take_while(|arg| !arg.to_string_lossy().starts_with('-'));
    let asked = words.cloned().chain([OsString::from("--help")]);
    command(shown).try_get_matches_from(asked).err().map(|page| page.render().to_string()).unwrap_or_default()
}

/// Returns the answer to `help`, `help COMMAND`, `help SETTING` and `help TOPIC`.
fn help_on(mut args: Vec<OsString>) -> Result<String, Problem> {
    args.remove(1);
    let words: Vec<String> = args[1..].iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let words: Vec<&str> =
        words.iter().map(String::as_str).filter(|word| !matches!(*word, "-h" | "--help")).collect();
    let is_command = Verb::ALL.iter().any(|verb| verb.words().starts_with(&words) || words == verb.words());
    if is_command || matches!(words[..], [HELP]) {
        return Ok(help_page(&args));
    }
    let name = words.join(" ");
    if let Some(flag) = flags::find(name.trim_start_matches("--")) {
        return Ok(help::setting(flag));
    }
    if let Some(page) = help::topic(&name) {
        return Ok(page);
    }
    let commands = Verb::ALL.iter().map(|verb| verb.name()).collect::<Vec<_>>();
    let near = nearest(&name, commands.iter().map(String::as_str).chain(flags::all().map(|flag| flag.name)));
    let problem = Problem::usage(format!("no command and no setting is named `{}`", shown(&name)));
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
        ErrorKind::DisplayHelp => Ok(help_page(args)),
        ErrorKind::DisplayVersion => Ok(error.render().to_string()),
        ErrorKind::UnknownArgument => {
            let word = context(ContextKind::InvalidArg).unwrap_or_default();
            Err(match verb_of(args) {
                Some(verb) => stray(verb, &word),
                None => Problem::usage(format!("unexpected `{}`", shown(&word)))
                    .help("`omnigrpo --help` lists the commands"),
            })
        }
        ErrorKind::InvalidSubcommand => {
            let word = context(ContextKind::InvalidSubcommand).unwrap_or_default();
            let problem = Problem::usage(format!("unknown command `{}`", shown(&word)));
            let near = nearest(&word, Verb::ALL.iter().filter_map(|verb| verb.words().last().copied()));
            let near = Verb::ALL.iter().find(|verb| verb.words().last().copied() == near);
            Err(match near {
                Some(verb) => problem.help(format!("did you mean `omnigrpo {}`?", verb.name())),
                None => problem.help("`omnigrpo --help` lists the commands"),
            })
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Ok(help_page(args))
        }
        _ => {
            let text = error.render().to_string();
            let first = text.lines().next().unwrap_or_default();
            Err(Problem::usage(first.trim_start_matches("error: ").to_string()))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use std::collections::BTreeMap;
    use std::ffi::OsString;

    use super::*;
    use crate::settings::values::{Given, Origin, Raw};
    use crate::settings::{Flag, Kind, Layer, Settings, all, config};

    /// A setting that is a number refuses NaN and infinity by name, on the command line, in a file and from a program. JSON has
    /// neither, so a program can only give their texts.
    #[test]
    fn numbers_that_are_not_finite_are_refused_everywhere() {
        let is_number = |kind: &Kind| {
            matches!(kind, Kind::Int { .. } | Kind::Float { .. } | Kind::Fraction | Kind::Floats)
        };
        let of_text = [("gpu_memory", "GB"), ("keep", "")];
        let unit = |flag: &Flag| of_text.iter().find(|(name, _)| *name == flag.name).map(|(_, unit)| *unit);
        let numbers: Vec<&Flag> =
            all().filter(|flag| is_number(&flag.kind) || unit(flag).is_some()).collect();
        assert!(numbers.len() > 100, "{}", numbers.len());
        // A command line names each of its mistakes.
        let mut by_verb: BTreeMap<String, Vec<&Flag>> = BTreeMap::new();
        for flag in numbers.iter().filter(|flag| is_number(&flag.kind)) {
            by_verb.entry(flag.verbs[0].name()).or_default().push(flag);
        }
        for (verb, flags) in by_verb {
            let wrong =
                flags.iter().map(|flag| format!("--{}=nan{}", flag.name, unit(flag).unwrap_or_default()));
            let words =
                ["omnigrpo", verb.as_str()].into_iter().flat_map(|word| word.split(' ')).map(str::to_owned);
            let told = parse(words.chain(wrong).map(OsString::from), |_| None).expect_err(&verb).to_string();
            for flag in flags {
                assert!(told.contains(&format!("`{}`", flag.name)), "{verb} {}: {told}", flag.name);
            }
        }
        for flag in numbers {
            let (name, unit, verb) = (flag.name, unit(flag).unwrap_or_default(), flag.verbs[0]);
            let named = |problem: &str, text: &str| {
                assert!(
                    problem.contains(&format!("`{name}`")) || problem.contains(&format!("--{name}")),
                    "{name} {text}: {problem}"
                );
            };
            let said = |layer: Layer| -> Vec<String> {
                let of_field = |given: &Given| (given.flag.place.set)(&mut Settings::default(), &given.value);
                let late = layer.given.iter().filter_map(|given| of_field(given).err());
                layer.problems.iter().map(ToString::to_string).chain(late.map(|p| p.to_string())).collect()
            };
            for text in ["nan", "NaN", "inf", "-inf", "Infinity", "1e999", "-1e999"] {
                let text = format!("{text}{unit}");
                let given = Given::read(flag, &Raw::Arguments(vec![text.clone()]), Origin::Flag);
                let of_field =
                    given.and_then(|given| (flag.place.set)(&mut Settings::default(), &given.value));
                named(&of_field.expect_err(name).to_string(), &text);
                let from_program: Vec<String> = said(Layer::of(verb, [(name, text.clone().into())]));
                named(&from_program.concat(), &text);
                if matches!(flag.kind, Kind::Floats) {
                    let list = serde_json::json!([1.0, text]);
                    let from_program: Vec<String> = said(Layer::of(verb, [(name, list)]));
                    named(&from_program.concat(), &text);
                }
            }
            for text in [".nan", ".NaN", ".inf", "-.inf", "+.Inf", "nan", "1e999", "[1, .nan]", "[.inf]"] {
                let lines = format!("{name}: {text}");
                let from_file: Vec<String> = said(config::parse(&lines, "f", |_| Origin::Flag));
                named(&from_file.concat(), text);
            }
        }
    }
}
