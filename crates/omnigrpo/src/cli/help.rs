//! Help texts of settings, and the reference page of all settings.

use super::verbs::demo;
use crate::settings::explain::{default_text, expected, listed, plain};
use crate::settings::flags::{Fallback, Flag, Kind, Section, Verb};

/// Returns the placeholder of a flag's value in the help.
pub const fn placeholder(kind: &Kind) -> &'static str {
    match kind {
        Kind::Bool => "BOOL",
        Kind::Int { .. } => "N",
        Kind::Float { .. } | Kind::Fraction => "X",
        Kind::Text => "TEXT",
        Kind::Path => "PATH",
        Kind::Choice(_) | Kind::Switch(_) => "NAME",
        Kind::Choices(_) | Kind::Words => "NAME,…",
        Kind::Floats => "X,…",
        Kind::Paths(_) => "PATH,…",
        Kind::Specs => "REWARD,…",
        Kind::Texts => "TEXT…",
        Kind::Object => "JSON",
    }
}

/// Returns the help of a flag: its effect, names and default. A `short` one has only the first sentence of the effect.
pub fn help(flag: &Flag, verb: Verb, short: bool) -> String {
    let first = flag.help.split_inclusive(". ").next().unwrap_or_default();
    let mut text = if short { first.trim_end() } else { flag.help }.to_owned();
    if let Kind::Choice(names) | Kind::Choices(names) | Kind::Switch(names) = flag.kind {
        text.push_str(&format!(" [{}]", listed(names, "|")));
    }
    let own = (verb == Verb::Demo).then(|| demo::default_of(flag.name)).flatten();
    let default = own.unwrap_or_else(|| default_text(flag, verb));
    if flag.required.contains(&verb.runs()) {
        text.push_str(" [required]");
    } else if !default.is_empty() {
        text.push_str(&format!(" [default: {default}]"));
    }
    text
}

/// Returns the settings about a topic: those that have it in a name, and those of a section with it in the title. `None` without any.
pub fn topic(word: &str) -> Option<String> {
    let word = word.trim_start_matches("--").to_lowercase().replace('-', "_");
    let has = |text: &str| text.to_lowercase().split(|c: char| !c.is_alphanumeric()).any(|part| part == word);
    let is_about = |flag: &Flag| std::iter::once(flag.name).chain(flag.aliases.iter().copied()).any(has);
    let mut out = String::new();
    for section in Section::ALL {
        let whole = has(section.title());
        for flag in section.rows().iter().filter(|flag| whole || is_about(flag)) {
            let first = flag.help.split_inclusive(". ").next().unwrap_or_default();
            out.push_str(&format!("  --{:<30} {}\n", flag.name, first.trim_end()));
        }
    }
    (!word.is_empty() && !out.is_empty())
        .then(|| format!("Settings about `{word}`:\n\n{out}\n`omnigrpo help SETTING` describes one.\n"))
}

/// Returns the text that `help SETTING` prints.
pub fn setting(flag: &Flag) -> String {
    let dashes = if flag.positional { "" } else { "--" };
    let mut out = format!("{dashes}{} {}\n\n{}\n", flag.name, placeholder(&flag.kind), flag.help);
    match flag.kind {
        Kind::Choice(names) | Kind::Choices(names) | Kind::Switch(names) => {
            out.push('\n');
            for (name, about) in names() {
                out.push_str(&format!("  {name:<24} {about}\n"));
            }
            out.push('\n');
        }
        kind => out.push_str(&format!("\nvalue:    {}\n", expected(&kind))),
    }
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            out.push_str(&format!("{name:<9} {value}\n"));
        }
    };
    line("default:", default_words(flag));
    line("aliases:", flag.aliases.iter().map(|alias| format!("--{alias}")).collect::<Vec<_>>().join(", "));
    line("commands:", flag.verbs.iter().map(|verb| verb.name()).collect::<Vec<_>>().join(", "));
    out
}

/// Returns the default of a setting in words, with the defaults of commands that differ.
fn default_words(flag: &Flag) -> String {
    let mut default = match flag.default() {
        Fallback::Unset("") if !flag.required.is_empty() => "required".to_string(),
        Fallback::Unset("") => "none".to_string(),
        Fallback::Unset(text) => text.to_string(),
        Fallback::Is(value) => match plain(&value).as_str() {
            "" => "none".to_string(),
            text => format!("`{text}`"),
        },
    };
    for (verb, text) in flag.verb_defaults {
        default.push_str(&format!("; {} `{text}`", verb.name()));
    }
    default
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Returns the reference page `docs/generated/flags.md`.
    fn reference() -> String {
        let mut out = String::from(
            "# Settings\n\nThis page lists every setting. A test writes it from the table of flags. Every setting is a flag \
             (`--name`, dashes or underscores) and a key of `--config` files. Flags win over the file, the file over `--preset`, the preset over defaults. \
             A setting that can have no effect, whatever the rows and the machine, is an error. \
             `plan` and `init` take the settings of `train`. `omnigrpo help SETTING` shows one of them.\n",
        );
        for section in Section::ALL {
            out.push_str(&format!(
                "\n## {}\n\n| setting | value | default | verbs |\n|---|---|---|---|\n",
                section.title()
            ));
            for flag in section.rows() {
                let mut name = if flag.positional {
                    format!("`{}` (word)", flag.name)
                } else {
                    format!("`{}`", flag.name)
                };
                for alias in flag.aliases {
                    name.push_str(&format!(", `{alias}`"));
                }
                // `plan` takes the settings of `train`.
                let verbs = flag.verbs.iter().filter(|verb| **verb != Verb::Plan).map(|verb| verb.name());
                let verbs = verbs.collect::<Vec<_>>().join(", ");
                let mut help = flag.help.to_string();
                match flag.kind {
                    Kind::Choice(names) | Kind::Choices(names) | Kind::Switch(names) => {
                        for (name, about) in names() {
                            help.push_str(&format!(" <br>`{name}`: {}.", about.trim().trim_end_matches('.')));
                        }
                    }
                    kind => help.push_str(&format!(" ({})", expected(&kind))),
                }
                let cells = [name, help, default_words(flag), verbs];
                out.push_str(&format!("| {} |\n", cells.map(|c| c.replace('|', "\\|")).join(" | ")));
            }
        }
        out
    }

    #[test]
    fn the_reference_page_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/generated/flags.md");
        let page = reference();
        if std::env::var_os("WRITE_DOCS").is_some() {
            std::fs::write(path, &page).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            found == page,
            "docs/generated/flags.md is out of date: run the tests once with WRITE_DOCS=1"
        );
    }
}
