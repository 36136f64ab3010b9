//! Texts about settings: values in the form users write them, and the resolved settings of a run.

use std::path::Path;

use crate::flags::{Fallback, Flag, Kind, Names, Section, Verb};
use crate::values::{self, Given, Origin, Raw, Resolved, Value};

/// Smallest bound that only guards against overflow. Messages name such bounds only if a value exceeds them.
const UNBOUNDED: i64 = 1 << 30;

/// Returns the bound that a number exceeded, if [`expected`] does not show it.
pub fn passed_bound(kind: &Kind, text: &str) -> Option<String> {
    let number: f64 = text.parse().ok()?;
    match *kind {
        Kind::Int { max, .. } if max >= UNBOUNDED && number > max as f64 => Some(format!("at most {max}")),
        Kind::Float { max, .. } if max >= 1e9 && number > max && number.is_finite() => {
            Some(format!("at most {max}"))
        }
        Kind::Float { min, .. } if min <= -1e9 && number < min && number.is_finite() => {
            Some(format!("at least {min}"))
        }
        _ => None,
    }
}

/// Returns a description of the values that a flag accepts.
pub fn expected(kind: &Kind) -> String {
    match kind {
        Kind::Bool => "true or false".into(),
        Kind::Int { min, max } => match (*min, *max) {
            (min, max) if max >= UNBOUNDED => format!("a whole number from {min} up"),
            (min, max) => format!("a whole number from {min} to {max}"),
        },
        Kind::Float { min, max } => match (*min, *max) {
            (min, max) if max >= 1e9 && min <= -1e9 => "a number".into(),
            (min, max) if max >= 1e9 => format!("a number from {min} up"),
            (min, max) => format!("a number from {min} to {max}"),
        },
        Kind::Fraction => "a share from 0 to 1, or a percentage such as `5%`".into(),
        Kind::Text => "a text".into(),
        Kind::Path => "a path".into(),
        Kind::Choice(names) => format!("one of {}", listed(*names, ", ")),
        Kind::Switch(names) => format!("one of {}, or true or false", listed(*names, ", ")),
        Kind::Choices(names) => format!("some of {}", listed(*names, ", ")),
        Kind::Words => "words with spaces or commas between them".into(),
        Kind::Floats => "numbers with spaces or commas between them".into(),
        Kind::Paths(separators) if separators.contains(&':') => {
            "paths with spaces, commas or colons between them".into()
        }
        Kind::Paths(_) => "paths with spaces or commas between them".into(),
        Kind::Specs => "reward names, `DIR`, `cmd:PROGRAM`, `FILE.py:FUNCTION` or `http://…`".into(),
        Kind::Texts => "texts, one per argument".into(),
        Kind::Object => "a JSON object".into(),
    }
}

pub fn listed(names: Names, separator: &str) -> String {
    names().into_iter().map(|(name, _)| name).collect::<Vec<_>>().join(separator)
}

pub fn default_text(flag: &Flag, verb: Verb) -> String {
    if flag.required.contains(&verb.runs()) {
        return String::new();
    }
    match flag.default_for(verb) {
        Fallback::Is(value) => plain(&value),
        Fallback::Unset(text) => text.to_string(),
    }
}

/// Parses a default that the table stores as text.
pub fn default_value(kind: &Kind, text: &str) -> Option<Value> {
    values::parse(kind, &Raw::Arguments(vec![text.to_owned()])).ok()
}

/// Writes a default as a user would type it.
pub fn plain(value: &Value) -> String {
    let number = |v: &f64| {
        let text = format!("{v:?}");
        text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
    };
    match value {
        Value::Float(v) => number(v),
        Value::Floats(v) => v.iter().map(number).collect::<Vec<_>>().join(" "),
        Value::Text(v) => v.clone(),
        Value::Texts(v) => v.join(" "),
        other => yaml(other),
    }
}

/// Writes a YAML scalar or flow sequence that reads back as the same value, also in YAML 1.1.
pub fn yaml(value: &Value) -> String {
    match value {
        Value::Bool(v) => v.to_string(),
        Value::Int(v) => v.to_string(),
        Value::Float(v) => yaml_float(*v),
        Value::Text(v) => yaml_text(v),
        Value::Texts(v) => format!("[{}]", v.iter().map(|t| yaml_text(t)).collect::<Vec<_>>().join(", ")),
        Value::Floats(v) => format!("[{}]", v.iter().map(|x| yaml_float(*x)).collect::<Vec<_>>().join(", ")),
        // JSON is valid YAML.
        Value::Object(v) => serde_json::Value::Object(v.clone()).to_string(),
    }
}

fn yaml_float(v: f64) -> String {
    let text = format!("{v:?}");
    // YAML 1.1 reads `1e-6` as text, because it has no decimal point.
    match text.split_once('e') {
        Some((mantissa, exponent)) if !mantissa.contains('.') => format!("{mantissa}.0e{exponent}"),
        _ => text,
    }
}

fn yaml_text(text: &str) -> String {
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/' || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_-./%".contains(c))
        && !["true", "false", "yes", "no", "on", "off", "null", "y", "n"]
            .contains(&text.to_ascii_lowercase().as_str());
    if plain { text.to_string() } else { serde_json::Value::from(text).to_string() }
}

/// Returns the resolved settings of a run as a file for `--config`, with the source of each in a comment.
pub fn print_config(resolved: &Resolved) -> String {
    let mut out = format!("# omnigrpo {}\n", resolved.verb.name());
    for note in &resolved.notes {
        out.push_str(&format!("# {}\n", note.replace('\n', "\n#   ")));
    }
    for section in Section::ALL {
        let mut lines = Vec::new();
        for flag in section.rows().iter().filter(|f| f.is_of(resolved.verb)) {
            if flag.command_line_only || flag.name == "preset" {
                continue;
            }
            let idle = resolved.idle.iter().find(|(name, _)| *name == flag.name);
            lines.push(match (idle, resolved.values.lookup(flag.name)) {
                (Some((_, why)), _) => (format!("# {}:", flag.name), format!("no effect: {why}")),
                (None, Some((value, origin))) => {
                    (format!("{}: {}", flag.name, yaml(&without_secrets(flag, value))), source(origin))
                }
                (None, None) => (format!("# {}:", flag.name), unset(flag, resolved.verb)),
            });
        }
        if lines.is_empty() {
            continue;
        }
        out.push_str(&format!("\n# {}\n", section.title()));
        for (setting, comment) in lines {
            out.push_str(&format!("{setting:<44} # {comment}\n"));
        }
    }
    out
}

/// Returns the command line of a run with the settings that the user gave. Paths other than that of the model are reduced to file
/// names, and programs of rewards are omitted, because the model card shows this line to others.
pub fn command(resolved: &Resolved) -> String {
    let name_of = |text: &str| match omnigrpo_fetch::is_repo_name(text) && !Path::new(text).exists() {
        true => text.to_owned(),
        false => Path::new(text).file_name().map_or(text.into(), |name| name.to_string_lossy().into()),
    };
    let spec = |text: &str| match (text.split_once("cmd:"), text.contains("://")) {
        (Some((name, _)), _) => format!("{name}cmd:…"),
        (None, true) => text.to_owned(),
        (None, false) => name_of(text),
    };
    let is_place = |text: &str| Path::new(text).is_absolute() || Path::new(text).exists();
    let quoted = |text: String| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,%…".contains(c);
        match !text.is_empty() && text.chars().all(plain) {
            true => text,
            false => format!("'{}'", text.replace('\'', r"'\''")),
        }
    };
    let mut out = format!("omnigrpo {}", resolved.verb.name());
    for Given { flag, value, origin } in resolved.values.given() {
        let personal = flag.command_line_only || flag.name == "notify";
        if matches!(origin, Origin::Preset(_) | Origin::Environment(_)) || personal {
            continue;
        }
        let words: Vec<String> = match (flag.kind, without_secrets(flag, &value)) {
            (Kind::Specs, Value::Texts(texts)) => texts.iter().map(|text| spec(text)).collect(),
            (Kind::Paths(_), Value::Texts(texts)) => texts.iter().map(|text| name_of(text)).collect(),
            (_, Value::Texts(texts)) => texts,
            (Kind::Path, Value::Text(text)) => vec![name_of(&text)],
            (_, Value::Text(text)) if is_place(&text) => vec![name_of(&text)],
            (_, Value::Floats(numbers)) => numbers.iter().map(f64::to_string).collect(),
            (_, other) => vec![plain(&other)],
        };
        let words: Vec<String> = words.into_iter().map(quoted).collect();
        out.push_str(&format!(" \\\n  --{} {}", flag.name, words.join(" ")));
    }
    out
}

/// Removes secrets from a value before it is written to a file: the address or command of a reward may contain a password.
pub fn without_secrets(flag: &Flag, value: &Value) -> Value {
    match (flag.kind, value) {
        (_, Value::Texts(specs)) if flag.name == "notify" => {
            Value::Texts(specs.iter().map(|spec| redacted_target(spec)).collect())
        }
        (Kind::Specs, Value::Texts(specs)) => {
            Value::Texts(specs.iter().map(|spec| omnigrpo_rewards::redacted(spec)).collect())
        }
        (_, Value::Text(spec)) if flag.name == "environment" => Value::Text(omnigrpo_rewards::redacted(spec)),
        _ => value.clone(),
    }
}

/// Replacement for a secret, as in the specs of rewards.
pub const HIDDEN: &str = "***";

/// Returns the host and port of an address.
pub fn host(address: &str) -> &str {
    let rest = address.split_once("://").map_or(address, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    authority.rsplit('@').next().unwrap_or_default()
}

/// Returns a destination of messages without its secrets. Only the program of a command, and the scheme and the host of a webhook
/// remain.
pub fn redacted_target(spec: &str) -> String {
    match (spec.strip_prefix("cmd:"), spec.split_once("://")) {
        (Some(command), _) => match command.split_once(char::is_whitespace) {
            Some((program, _)) => format!("cmd:{program} {HIDDEN}"),
            None => spec.to_owned(),
        },
        (None, Some((scheme, _))) => format!("{scheme}://{}/{HIDDEN}", host(spec)),
        (None, None) => omnigrpo_rewards::redacted(spec),
    }
}

fn unset(flag: &Flag, verb: Verb) -> String {
    match default_text(flag, verb) {
        text if text.is_empty() => "not set".into(),
        text => format!("not set: {text}"),
    }
}

fn source(origin: &Origin) -> String {
    match origin {
        Origin::Default => "default".into(),
        Origin::Recipe(name) => format!("loss_type {name}"),
        Origin::Environment(name) => format!("environment {name}"),
        Origin::Preset(name) => format!("preset {name}"),
        Origin::Config(place) => format!("config {place}"),
        Origin::Flag => "flag".into(),
        Origin::Caller => "program".into(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::environment::Environment;
    use crate::{config, resolve};

    #[test]
    fn a_command_line_for_others_names_no_place_and_no_program() {
        let yaml = "model_name_or_path: /srv/me/models/tiny\ntrain_file: [/data/a b.jsonl, rows.jsonl]\nlearning_rate: 1e-5\n\
                    system_prompt: Answer yes/no, it's easy.\nreward_funcs: [accuracy, \"mine=cmd:./r --key 1\", /srv/me/f.py:g]\n\
                    output_dir: /srv/me/runs/first\nuse_peft: true\n";
        let layer = config::parse(yaml, "test", |_| Origin::Flag);
        let resolved = resolve(Verb::Train, layer, Environment::default()).unwrap();
        let text = command(&resolved);
        assert!(text.starts_with("omnigrpo train \\\n  --"), "{text}");
        for line in [
            "  --model_name_or_path tiny",
            "  --train_file 'a b.jsonl' rows.jsonl",
            "  --learning_rate 1e-5",
            r"  --system_prompt 'Answer yes/no, it'\''s easy.'",
            "  --reward_funcs accuracy mine=cmd:… f.py:g",
            "  --output_dir first",
            "  --use_peft true",
        ] {
            assert!(text.lines().any(|own| own.trim_end_matches(" \\") == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("srv") && !text.contains("key"), "{text}");
    }
}
