//! A file of settings that the program writes for the user: settings by section, each with comments.

use crate::settings::explain::{without_secrets, yaml};
use crate::settings::values::{Raw, parse};
use crate::settings::{Environment, Origin, Problem, Resolved, Section, Value, Verb, config, find, resolve};

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

    /// Sets a value and replaces its comments.
    pub fn put(&mut self, name: &'static str, value: Value, comments: Vec<String>) {
        self.0.retain(|line| line.name != name);
        self.0.push(Line { name, value, comments });
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
        let layer =
            config::parse(&text, "", |line| Origin::Config(format!("line {line} of the chosen settings")));
        resolve(Verb::Train, layer, environment)
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
                    match line.comments.join("; ").replace('\n', " ") {
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
