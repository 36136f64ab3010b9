//! Settings of one source: the command line, a file or a preset. All mistakes of a source are collected, so that the user can fix
//! them together.

use omnigrpo_guard::names::{nearest, shown};
use serde_json::Value as Json;

use crate::explain;
use crate::flags::{self, Flag, Verb};
use crate::foreign::{self, Fate};
use crate::problem::Problem;
use crate::values::{Given, Origin, Raw, Value};

/// Name and value of a setting as the user wrote them.
#[derive(Clone)]
pub struct Entry {
    /// Name of the setting in any spelling, without leading dashes.
    pub name: String,
    /// Value; `None` if the user gave only the name.
    pub raw: Option<Raw>,
    /// Source of the entry.
    pub origin: Origin,
}

/// Settings and mistakes of a source.
#[derive(Debug, Default)]
pub struct Layer {
    /// Valid settings.
    pub given: Vec<Given>,
    /// Settings of other trainers that have no effect here, as written, each with the reason.
    pub dropped: Vec<(String, String)>,
    /// Settings of another trainer that change training there and are left out here, as written, each with the reason.
    pub changing: Vec<(String, String)>,
    /// Mistakes found while reading the source.
    pub problems: Vec<Problem>,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Settings that a setting of another trainer became, each with that setting as written.
    pub became: Vec<(&'static str, String)>,
}

impl Layer {
    /// Returns a layer that contains only the problem of a source that cannot be read.
    pub fn unreadable(problem: Problem) -> Self {
        Self { problems: vec![problem], ..Self::default() }
    }

    /// Reads names and values that a program gives for a run of a verb. A value has the type of its setting, or is its text.
    pub fn of<N: Into<String>>(verb: Verb, given: impl IntoIterator<Item = (N, Json)>) -> Self {
        let entry = |(name, value): (N, Json)| Entry {
            name: name.into(),
            raw: Raw::of(value),
            origin: Origin::Caller,
        };
        Self::read(given.into_iter().map(entry).collect(), Some(verb))
    }

    /// Returns the value of a setting of text.
    pub fn text(&self, name: &str) -> Option<&str> {
        let given = self.given.iter().find(|given| given.flag.name == name);
        given.and_then(|given| if let Value::Text(text) = &given.value { Some(text.as_str()) } else { None })
    }

    /// Reads entries of the command line of a verb or of a file. Of a flag that the command line repeats, the last value counts, and a note
    /// says so.
    pub fn read(mut entries: Vec<Entry>, verb: Option<Verb>) -> Self {
        let mut layer = Self { notes: leave_last(&mut entries), ..Self::default() };
        // Settings implied by other settings. They are added after all entries are read, when it is known which settings are
        // given directly.
        let mut becoming = Vec::new();
        let mut defaults = Vec::new();
        let texts: Vec<(String, String)> =
            entries.iter().map(|entry| (entry.name.replace('-', "_"), entry.text())).collect();
        let others = |name: &str| {
            let other = texts.iter().find(|(known, _)| known == name);
            other.map(|(_, text)| text.as_str())
        };
        for entry in entries {
            let text = entry.text();
            let shown = entry.shown();
            // Messages are written to logs, so they must not contain secrets.
            let value = if is_secret(&shown) { "…".to_owned() } else { omnigrpo_rewards::redacted(&text) };
            let value = value.as_str();
            // A default of another trainer gives way to what the user gives, without a word.
            let is_default = matches!(entry.origin, Origin::Preset(_));
            match foreign::fate(&entry.name, &text, others) {
                Some(Fate::Becomes(name, value)) => becoming.push((is_default, name, value, entry)),
                Some(fate @ (Fate::BecomesAll(_) | Fate::Partly(..))) => {
                    let settings = match fate {
                        Fate::Partly(settings, why) => {
                            layer.changing.push((format!("{shown} {value}"), why.into()));
                            settings
                        }
                        Fate::BecomesAll(settings) => settings,
                        _ => Vec::new(),
                    };
                    becoming.extend(
                        settings
                            .into_iter()
                            .enumerate()
                            .map(|(at, (name, value))| (at > 0 || is_default, name, value, entry.clone())),
                    );
                }
                Some(Fate::Dropped(_)) if is_default => {}
                Some(Fate::Lost(why)) => layer.changing.push((format!("{shown} {value}"), why.into())),
                Some(Fate::Dropped(why)) => layer.dropped.push((format!("{shown} {value}"), why.into())),
                Some(Fate::Refused(advice)) => layer.problem(
                    &entry.origin,
                    Problem::usage(format!("`{shown}` is unsupported")).got(value).help(advice),
                ),
                Some(Fate::Own | Fate::Depends(..)) | None if is_default => defaults.push(entry),
                Some(Fate::Own | Fate::Depends(..)) | None => match layer.setting(&entry, verb) {
                    Ok(given) => layer.given.push(given),
                    Err(problem) => layer.problem(&entry.origin, problem),
                },
            }
        }
        // Implied settings come last, and among them the defaults.
        becoming.sort_by_key(|(implied, _, _, entry)| (*implied, matches!(entry.origin, Origin::Preset(_))));
        layer.add(becoming, verb);
        for entry in defaults {
            let is_given = flags::find(&entry.name)
                .is_some_and(|flag| layer.given.iter().any(|given| given.flag.name == flag.name));
            if !is_given && let Ok(given) = layer.setting(&entry, verb) {
                layer.given.push(given);
            }
        }
        layer
    }

    /// Adds settings that follow from entries with other names, unless they are given directly. Each has a flag, true if it is only
    /// implied, a name, a value and its entry.
    fn add(&mut self, becoming: Vec<(bool, &'static str, String, Entry)>, verb: Option<Verb>) {
        let mut became: Vec<(&str, String, String)> = Vec::new();
        for (implied, name, value, entry) in becoming {
            if let Some((_, first, shown)) = became.iter().find(|(known, ..)| *known == name) {
                if !implied && *first != value {
                    let problem = Problem::usage(format!("two settings give `{name}`"))
                        .got(format!("`{shown}` gives {first}, `{}` gives {value}", entry.shown()))
                        .expected("one of them");
                    self.problem(&entry.origin, problem);
                }
                continue;
            }
            let rivals: &[&str] = if name == "train_file" {
                &["train_file", "dataset_use", "data_file_paths"]
            } else {
                &[name]
            };
            let rival = self.given.iter().find(|given| rivals.contains(&given.flag.name));
            if let Some(rival) = rival {
                let raw = Raw::Arguments(vec![value.clone()]);
                let own = Given::read(rival.flag, &raw, entry.origin.clone());
                if rival.flag.name == name && own.is_ok_and(|own| own.value == rival.value) {
                    continue;
                }
                if matches!(entry.origin, Origin::Preset(_)) {
                    continue;
                }
                let why = format!("`{}` is given", rival.flag.name);
                self.dropped.push((format!("{} {value}", entry.shown()), why));
                continue;
            }
            became.push((name, value.clone(), entry.shown()));
            self.became.push((name, format!("`{} {}`", entry.shown(), entry.text())));
            let entry = Entry { name: name.into(), raw: Some(Raw::Arguments(vec![value])), ..entry };
            match self.setting(&entry, verb) {
                Ok(given) => self.given.push(given),
                Err(problem) => self.problem(&entry.origin, problem),
            }
        }
    }

    fn problem(&mut self, origin: &Origin, problem: Problem) {
        self.problems.push(problem.given_at(origin));
    }

    fn setting(&self, entry: &Entry, verb: Option<Verb>) -> Result<Given, Problem> {
        let Some(flag) = flags::find(&entry.name) else {
            return Err(unknown(entry, verb));
        };
        match verb {
            Some(verb) if !flag.is_of(verb) => {
                let verbs: Vec<String> = flag.verbs.iter().map(|v| format!("`{}`", v.name())).collect();
                return Err(Problem::usage(format!("`{}` does not take `{}`", verb.name(), entry.shown()))
                    .help(format!("it is a flag of {}", verbs.join(", "))));
            }
            None if flag.command_line_only || flag.positional => {
                return Err(Problem::usage(format!(
                    "`{}` belongs on the command line, not in a file",
                    flag.name
                )));
            }
            _ => {}
        }
        if self.given.iter().any(|other| other.flag.name == flag.name) {
            return Err(Problem::usage(format!("`{}` is given twice", flag.name))
                .expected("each setting only once, under one of its names"));
        }
        match &entry.raw {
            Some(raw) => Given::read(flag, raw, entry.origin.clone()).map(|mut given| {
                if let ("reward_funcs", Value::Texts(specs)) = (flag.name, &mut given.value) {
                    specs.iter_mut().for_each(|spec| *spec = foreign::reward(spec).to_owned());
                }
                given
            }),
            None => Err(Problem::usage(format!("`{}` has no value", flag.name))
                .expected(explain::expected(&flag.kind))
                .help("leave it out to use the default")),
        }
    }
}

/// Removes the entries of the command line that a later one repeats. Returns a note for each flag that is repeated.
fn leave_last(entries: &mut Vec<Entry>) -> Vec<String> {
    let name = |entry: &Entry| entry.name.replace('-', "_");
    let (mut kept, mut notes): (Vec<Entry>, Vec<String>) = (Vec::new(), Vec::new());
    for entry in std::mem::take(entries) {
        let is_same = |other: &Entry| other.origin == Origin::Flag && name(other) == name(&entry);
        match kept.iter().position(is_same).filter(|_| entry.origin == Origin::Flag) {
            Some(at) => {
                let note = format!("`{}` is given several times: the last value counts", entry.shown());
                kept[at] = entry;
                if !notes.contains(&note) {
                    notes.push(note);
                }
            }
            None => kept.push(entry),
        }
    }
    *entries = kept;
    notes
}

impl Entry {
    /// Returns the words of the value, separated by spaces. A mapping is JSON.
    pub fn text(&self) -> String {
        match &self.raw {
            // A name of a file may have spaces.
            Some(Raw::Arguments(words) | Raw::Items(words)) if foreign::is_list(&self.name) => {
                words.join(",")
            }
            Some(Raw::Arguments(words) | Raw::Items(words)) => words.join(" "),
            Some(Raw::Object(map)) => Json::Object(map.clone()).to_string(),
            None => String::new(),
        }
    }

    /// Returns the name as written.
    fn shown(&self) -> String {
        // verl and EasyR1 write `group.name=value` without dashes.
        let dashes = self.origin == Origin::Flag && !self.name.contains('.');
        if dashes { format!("--{}", self.name) } else { self.name.clone() }
    }
}

fn unknown(entry: &Entry, verb: Option<Verb>) -> Problem {
    let dashes = if entry.origin == Origin::Flag { "--" } else { "" };
    let fits = |flag: &&Flag| match verb {
        Some(verb) => flag.is_of(verb),
        None => !flag.command_line_only,
    };
    let known = flags::all().filter(fits).filter(|flag| !flag.positional);
    let names = known.flat_map(|flag| std::iter::once(flag.name).chain(flag.aliases.iter().copied()));
    let what = if dashes.is_empty() { "setting" } else { "flag" };
    let problem = Problem::usage(format!("unknown {what} `{}`", shown(&entry.shown())));
    match (nearest(&entry.name, names), verb) {
        (Some(near), _) => problem.help(format!("did you mean `{dashes}{near}`?")),
        (None, Some(verb)) => problem.help(format!("`omnigrpo {} --help` lists the flags", verb.name())),
        (None, None) => problem.help("`docs/generated/flags.md` lists every setting"),
    }
}

/// Returns true if the value of a setting with this name must not be shown.
pub fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let words = [
        "token",
        "secret",
        "webhook_url",
        "api_key",
        "access_key",
        "password",
        "passwd",
        "passphrase",
        "_pass",
        "_pwd",
        "_pat",
        "credentials",
    ];
    words.iter().any(|word| name.ends_with(word))
}
