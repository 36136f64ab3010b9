//! JSON Schema of a file of settings, from the table of settings. Editors complete and check `--config` files with it.

use serde_json::{Map, Value as Json, json};

use super::explain::{default_text, expected};
use super::flags::{self, Fallback, Flag, Kind, Names, Verb};

/// Returns the JSON Schema (draft 2020-12) of a file for `--config`.
///
/// It has every setting that a file may contain, under each of its names. It accepts what [`resolve`](super::resolve()) reads for
/// one setting. It does not know contradictions between settings, nor the names of other trainers, which the program also reads.
pub fn schema() -> Json {
    let mut properties = Map::new();
    for flag in flags::all().filter(|flag| !flag.command_line_only && !flag.positional) {
        properties.insert(flag.name.to_owned(), property(flag));
        for alias in flag.aliases {
            let same = json!({
                "$ref": format!("#/properties/{}", flag.name),
                "description": format!("Another name of `{}`.", flag.name),
            });
            properties.insert((*alias).to_owned(), same);
        }
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of omnigrpo",
        "description": "A file for `--config`. Values of flags take precedence, then those of this file, then those of `preset`.",
        "type": "object",
        "additionalProperties": false,
        "properties": properties,
    })
}

/// Returns the schema of a setting: its values, its help and its default.
fn property(flag: &Flag) -> Json {
    let mut description = flag.help.to_owned();
    if let Kind::Choice(names) | Kind::Choices(names) | Kind::Switch(names) = flag.kind {
        for (name, help) in names() {
            description.push_str(&format!("\n`{name}`: {}", help.trim()));
        }
    } else {
        description.push_str(&format!(" ({})", expected(&flag.kind)));
    }
    let mut out = values(&flag.kind);
    match flag.default() {
        Fallback::Is(value) => out["default"] = value.json(),
        Fallback::Unset("") => {}
        Fallback::Unset(_) => {
            description.push_str(&format!(" Default: {}.", default_text(flag, Verb::Train)))
        }
    }
    out["description"] = description.into();
    out
}

/// Returns the schema of the values that a kind reads.
fn values(kind: &Kind) -> Json {
    let named = |names: Names| names().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    let list =
        |item: Json| json!({ "anyOf": [{ "type": "array", "items": item }, item, { "type": "string" }] });
    let scalar = || json!({ "type": ["string", "number", "boolean"] });
    match kind {
        Kind::Bool => json!({ "enum": [true, false, "true", "false", "yes", "no", 1, 0] }),
        Kind::Int { min, max } => json!({ "type": "integer", "minimum": min, "maximum": max }),
        Kind::Float { min, max } => json!({ "type": "number", "minimum": min, "maximum": max }),
        Kind::Fraction => json!({ "anyOf": [
            { "type": "number", "minimum": 0, "maximum": 1 },
            { "type": "string", "pattern": "^[0-9.]+ *%$" },
        ] }),
        // The text may look like a number or a switch: `exp_name: 7`, `resume_from_checkpoint: true`.
        Kind::Text => scalar(),
        Kind::Path => json!({ "type": "string", "minLength": 1 }),
        Kind::Choice(names) => json!({ "enum": named(*names) }),
        Kind::Switch(names) => json!({ "anyOf": [{ "enum": named(*names) }, values(&Kind::Bool)] }),
        Kind::Choices(names) => list(json!({ "enum": named(*names) })),
        Kind::Floats => list(json!({ "type": "number" })),
        Kind::Words | Kind::Paths(_) | Kind::Specs | Kind::Texts => list(scalar()),
        Kind::Object => json!({ "anyOf": [{ "type": "object" }, { "type": "string" }] }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::{config, explain, presets, values::Origin};

    /// Returns what is wrong with a value, by the keywords that [`schema`] uses. Another keyword is a mistake of this test.
    fn wrong(schema: &Json, root: &Json, value: &Json, at: &str) -> Option<String> {
        let number = |limit: &Json| limit.as_f64().zip(value.as_f64());
        let is = |name: &str| match name {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64(),
            other => panic!("type {other}"),
        };
        for (keyword, rule) in schema.as_object().unwrap() {
            let holds = match keyword.as_str() {
                "$schema" | "title" | "description" | "default" => true,
                "$ref" => {
                    let part = root.pointer(rule.as_str().unwrap().trim_start_matches('#')).unwrap();
                    wrong(part, root, value, at).is_none()
                }
                "type" => match rule {
                    Json::Array(types) => types.iter().any(|name| is(name.as_str().unwrap())),
                    name => is(name.as_str().unwrap()),
                },
                "enum" => rule.as_array().unwrap().contains(value),
                "anyOf" => rule.as_array().unwrap().iter().any(|one| wrong(one, root, value, at).is_none()),
                "minimum" => number(rule).is_none_or(|(least, value)| value >= least),
                "maximum" => number(rule).is_none_or(|(most, value)| value <= most),
                "minLength" => value.as_str().is_none_or(|text| text.len() as u64 >= rule.as_u64().unwrap()),
                "pattern" => {
                    assert_eq!(rule, "^[0-9.]+ *%$");
                    let share = value.as_str().and_then(|text| text.strip_suffix('%')).map(str::trim);
                    share.is_some_and(|share| share.parse::<f64>().is_ok())
                }
                "items" => value.as_array().unwrap().iter().all(|item| wrong(rule, root, item, at).is_none()),
                "properties" => {
                    for (name, value) in value.as_object().unwrap() {
                        let Some(part) = rule.get(name) else { continue };
                        if let Some(wrong) = wrong(part, root, value, name) {
                            return Some(wrong);
                        }
                    }
                    true
                }
                "additionalProperties" => {
                    assert_eq!(rule, false);
                    let known = |name: &String| schema["properties"].get(name).is_some();
                    let unknown = value.as_object().unwrap().keys().find(|name| !known(name));
                    if let Some(name) = unknown {
                        return Some(format!("unknown {name}"));
                    }
                    true
                }
                other => panic!("keyword {other}"),
            };
            if !holds {
                return Some(format!("{at}: {value} breaks {keyword} {rule}"));
            }
        }
        None
    }

    /// Returns what is wrong with the text of a file of settings.
    fn wrong_file(text: &str) -> Option<String> {
        let schema = schema();
        wrong(&schema, &schema, &serde_saphyr::from_str(text).unwrap(), "file")
    }

    fn yaml_files(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                yaml_files(&path, found);
            } else if path.extension().is_some_and(|end| end == "yaml") {
                found.push(path);
            }
        }
    }

    #[test]
    fn it_accepts_presets_and_examples() {
        for (name, _) in presets::words() {
            for text in presets::texts(name).filter(|text| !text.is_empty()) {
                assert_eq!(wrong_file(text), None, "preset {name}");
            }
        }
        let mut files = Vec::new();
        yaml_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples"), &mut files);
        // Tasks of other programs.
        files.retain(|file| file.iter().all(|part| part != "benchmarks"));
        assert!(files.len() >= 10, "{files:?}");
        files.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("../omnigrpo/assets/demo.yaml"));
        for file in files {
            assert_eq!(wrong_file(&std::fs::read_to_string(&file).unwrap()), None, "{}", file.display());
        }
    }

    #[test]
    fn it_refuses_what_is_no_setting_or_no_value_of_it() {
        for (text, part) in [
            ("learning_rat: 1.0e-5", "unknown learning_rat"),
            ("config: other.yaml", "unknown config"),
            ("learning_rate: fast", "learning_rate: \"fast\" breaks type"),
            ("num_generations: 0", "breaks minimum"),
            ("num_generations: 2.5", "breaks type"),
            ("loss_type: grpp", "breaks enum"),
            ("use_peft: maybe", "breaks enum"),
            ("val_split_ratio: 5 percent", "breaks anyOf"),
            ("reward_funcs: {accuracy: 1}", "breaks anyOf"),
            ("chat_template_kwargs: [a]", "breaks anyOf"),
            ("model_path: [a]", "model_path: [\"a\"] breaks $ref"),
        ] {
            let said = wrong_file(text).unwrap_or_default();
            assert!(said.contains(part), "{text}: {said}");
        }
    }

    /// The schema accepts every default as the program writes it, and what the parser reads from that.
    #[test]
    fn it_accepts_what_the_program_writes() {
        for flag in flags::all().filter(|flag| !flag.command_line_only && !flag.positional) {
            let Fallback::Is(value) = flag.default() else { continue };
            let text = format!("{}: {}", flag.name, explain::yaml(&value));
            assert_eq!(wrong_file(&text), None, "{text}");
            assert!(config::parse(&text, "", |_| Origin::Caller).problems.is_empty(), "{text}");
        }
    }
}
