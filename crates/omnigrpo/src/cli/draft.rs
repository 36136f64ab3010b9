//! A file of settings that the program writes for the user: settings by section, each with comments.

use crate::settings::explain::{without_secrets, yaml};
use crate::settings::values::{Raw, parse};
use crate::settings::{Environment, Origin, Problem, Resolved, Section, Value, Verb, config, find, resolve};

/// End of the place of a problem, after the number of the setting.
const OF_DRAFT: &str = " of the chosen settings";

/// Returns a text that cannot leave its comment.
pub fn one_line(text: &str) -> String {
    text.replace(|c: char| c.is_control() || "\u{2028}\u{2029}".contains(c), " ")
}

/// Settings of a `train` run with comments.
#[derive(Debug, Default)]
pub struct Draft(Vec<Line>);

/// A setting with its comments.
#[derive(Debug)]
struct Line {
    name: &'static str,
    value: Value,
    comments: Vec<String>,
}

impl Draft {
    /// Sets a value and replaces its comments. The value is ignored if its text does not fit the setting, which the tests exclude.
    pub fn set(&mut self, name: &'static str, text: &str, comment: impl Into<String>) {
        let value =
            find(name).and_then(|flag| parse(&flag.kind, &Raw::Arguments(vec![text.to_owned()])).ok());
        debug_assert!(value.is_some(), "{name}: {text}");
        if let Some(value) = value {
            self.put(name, value, vec![comment.into()]);
        }
    }

    /// Sets a value if the setting has none.
    pub fn choose(&mut self, name: &'static str, text: &str, comment: impl Into<String>) {
        if !self.has(name) {
            self.set(name, text, comment);
        }
    }

    /// Sets a value and replaces its comments.
    pub fn put(&mut self, name: &'static str, value: Value, comments: Vec<String>) {
        self.take(name);
        self.0.push(Line { name, value, comments });
    }

    /// Removes a setting. Returns its value and its comments.
    pub fn take(&mut self, name: &str) -> Option<(Value, Vec<String>)> {
        let at = self.0.iter().position(|line| line.name == name)?;
        let Line { value, comments, .. } = self.0.remove(at);
        Some((value, comments))
    }

    /// Returns the value of a setting.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|line| line.name == name).map(|line| &line.value)
    }

    /// Returns true if the setting has a value.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|line| line.name == name)
    }

    /// Returns the names of the settings.
    pub fn names(&self) -> Vec<&'static str> {
        self.0.iter().map(|line| line.name).collect()
    }

    /// Resolves the settings as `train --config` does.
    ///
    /// # Errors
    /// Returns the problems of the settings.
    pub fn resolve(&self, environment: Environment) -> Result<Resolved, Problem> {
        let text: String =
            self.0.iter().map(|line| format!("{}: {}\n", line.name, yaml(&line.value))).collect();
        let layer = config::parse(&text, "", |line| Origin::Config(format!("line {line}{OF_DRAFT}")));
        resolve(Verb::Train, layer, environment)
    }

    /// Removes settings that `train` does not accept together with the others. Returns the reasons, each with the setting that it
    /// is about.
    pub fn settle(&mut self) -> Vec<(Option<&'static str>, String)> {
        let mut reasons = Vec::new();
        while let Err(problem) = self.resolve(Environment::default()) {
            let line = |one: &Problem| -> Option<usize> {
                one.place()?.strip_prefix("line ")?.strip_suffix(OF_DRAFT)?.parse().ok()
            };
            let name = |line: usize| self.0.get(line.checked_sub(1)?).map(|line| line.name);
            let wrong: Vec<usize> = problem.each().filter_map(line).collect();
            reasons.extend(problem.each().map(|one| (line(one).and_then(name), one.in_one_line())));
            let before = self.0.len();
            let mut line = 0;
            self.0.retain(|_| {
                line += 1;
                !wrong.contains(&line)
            });
            if self.0.len() == before {
                break;
            }
        }
        reasons
    }

    /// Returns the settings as lines of a file, by section.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for section in Section::ALL {
            let rows = section.rows().iter();
            let lines =
                rows.filter_map(|flag| Some((flag, self.0.iter().find(|line| line.name == flag.name)?)));
            let lines: Vec<String> = lines
                .map(|(flag, line)| {
                    let setting = format!("{}: {}", line.name, yaml(&without_secrets(flag, &line.value)));
                    match one_line(&line.comments.join("; ")) {
                        comment if comment.is_empty() => format!("{setting}\n"),
                        comment => format!("{setting:<44} # {comment}\n"),
                    }
                })
                .collect();
            if !lines.is_empty() {
                text.push_str(&format!("\n# {}\n{}", section.title(), lines.concat()));
            }
        }
        text
    }
}
