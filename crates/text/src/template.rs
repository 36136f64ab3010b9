//! The model's chat template, run as `transformers` runs it.
//!
//! Jinja with `trim_blocks`, `lstrip_blocks`, loop controls, Python's string and dict methods, and the functions that
//! `transformers` adds (`utils/chat_template_utils.py`): `raise_exception`, `strftime_now`, and a `tojson` that
//! escapes no HTML. `{% generation %}` blocks are transparent: which tokens are trained is found without them.
//!
//! Templates come with models and are not trusted: they see only what is passed in, cannot read files or include other
//! templates, and stop at a number of instructions, a recursion depth and an output size. What is not bounded is the
//! memory of values that are never written, such as a string appended to itself over and over: the engine limits only
//! repetition.
//!
//! Differences from Jinja2: only single `None`, `True` and `False` print as in Python, lists and dicts do not;
//! `strftime_now` needs a time from the caller.

use std::fmt;
use std::io;
use std::path::Path;

use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use crate::files::{read_json, read_limited};
use crate::{Result, Role, TextError};

const MAX_TEMPLATE_BYTES: u64 = 1 << 20;
const MAX_CONFIG_BYTES: u64 = 16 << 20;
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Instructions per render. A long conversation takes some ten thousand.
const FUEL: u64 = 1_000_000;
const MAX_JSON_DEPTH: usize = 64;

const BUILT_IN: &str = include_str!("qwen.jinja");

/// Where a template came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TemplateOrigin {
    /// `chat_template.jinja`.
    JinjaFile,
    /// `chat_template.json`.
    JsonFile,
    /// `chat_template` in `tokenizer_config.json`.
    TokenizerConfig,
    /// The directory has none: the built-in template in the format of the Qwen2-VL models. Worth a warning.
    BuiltIn,
    /// Given by the caller.
    Given,
}

impl fmt::Display for TemplateOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TemplateOrigin::JinjaFile => "chat_template.jinja",
            TemplateOrigin::JsonFile => "chat_template.json",
            TemplateOrigin::TokenizerConfig => "tokenizer_config.json",
            TemplateOrigin::BuiltIn => "built in",
            TemplateOrigin::Given => "given",
        })
    }
}

/// The shape of `content` that a template reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContentForm {
    /// `[{"type": "text", "text": …}, {"type": "image"}, …]`.
    Parts,
    /// One string.
    Text,
}

/// A compiled chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    origin: TemplateOrigin,
    /// For system, user, assistant.
    forms: [ContentForm; 3],
}

impl ChatTemplate {
    /// The template of the model in `dir`: `chat_template.jinja`, `chat_template.json`, `chat_template` of
    /// `tokenizer_config.json` (of several named ones, `default`), else the built-in one, which
    /// [`origin`](Self::origin) tells.
    ///
    /// # Errors
    /// [`TextError::Read`], [`TextError::TooLarge`], [`TextError::BadFile`]; [`TextError::Template`] if it does not
    /// compile.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("chat_template.jinja");
        if let Some(bytes) = read_limited(&path, MAX_TEMPLATE_BYTES)? {
            let source = String::from_utf8(bytes)
                .map_err(|e| TextError::BadFile { path, problem: format!("not UTF-8: {e}") })?;
            return Self::compile(&source, TemplateOrigin::JinjaFile);
        }
        let json_files = [
            ("chat_template.json", TemplateOrigin::JsonFile),
            ("tokenizer_config.json", TemplateOrigin::TokenizerConfig),
        ];
        for (name, origin) in json_files {
            let path = dir.join(name);
            let Some(json) = read_json(&path, MAX_CONFIG_BYTES)? else { continue };
            let problem = match json.get("chat_template") {
                None | Some(serde_json::Value::Null) => continue,
                Some(serde_json::Value::String(source)) => return Self::compile(source, origin),
                Some(serde_json::Value::Array(named)) => {
                    let default =
                        named.iter().find(|t| t["name"] == "default").and_then(|t| t["template"].as_str());
                    if let Some(source) = default {
                        return Self::compile(source, origin);
                    }
                    "chat_template is a list without a template named \"default\"".to_owned()
                }
                Some(other) => {
                    format!("chat_template is {other}, expected a string or a list of named templates")
                }
            };
            return Err(TextError::BadFile { path, problem });
        }
        Self::compile(BUILT_IN, TemplateOrigin::BuiltIn)
    }

    /// Compiles a template given as text.
    ///
    /// # Errors
    /// [`TextError::Template`] if it does not compile.
    pub fn from_source(source: &str) -> Result<Self> {
        Self::compile(source, TemplateOrigin::Given)
    }

    fn compile(source: &str, origin: TemplateOrigin) -> Result<Self> {
        let mut env = Environment::new();
        let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(
            syntax.map_err(|e| TextError::Template { origin: origin.to_string(), problem: e.to_string() })?,
        );
        env.set_fuel(Some(FUEL)); // the engine's own recursion limit holds too
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_formatter(|out, state, value| match value.kind() {
            ValueKind::None => out.write_str("None").map_err(Error::from),
            ValueKind::Bool if value.is_true() => out.write_str("True").map_err(Error::from),
            ValueKind::Bool => out.write_str("False").map_err(Error::from),
            _ => minijinja::escape_formatter(out, state, value),
        });
        env.add_filter("tojson", tojson);
        env.add_function("raise_exception", |message: String| -> std::result::Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        let mut template = ChatTemplate {
            env,
            source: without_generation_tags(source),
            origin,
            forms: [ContentForm::Parts; 3],
        };
        template.env.template_from_str(&template.source).map_err(|e| template.error(&e))?;
        template.forms = template.probe_forms();
        Ok(template)
    }

    /// Where it came from.
    pub fn origin(&self) -> TemplateOrigin {
        self.origin
    }

    /// The template's text, without `{% generation %}` tags.
    pub fn source(&self) -> &str {
        &self.source
    }

    pub(crate) fn form(&self, role: Role) -> ContentForm {
        self.forms[role as usize]
    }

    /// Runs the template. `messages` is the list of messages; `variables` is everything else it may see.
    pub(crate) fn run(
        &self,
        messages: &serde_json::Value,
        add_generation_prompt: bool,
        variables: &serde_json::Map<String, serde_json::Value>,
        now: Option<jiff::civil::DateTime>,
    ) -> Result<String> {
        let strftime_now =
            Value::from_function(move |format: String| -> std::result::Result<String, Error> {
                let failed = |why: String| Error::new(ErrorKind::InvalidOperation, why);
                let now =
                    now.ok_or_else(|| failed("asks for the current time, but none was given".to_owned()))?;
                jiff::fmt::strtime::format(&format, now)
                    .map_err(|e| failed(format!("strftime_now({format:?}): {e}")))
            });
        // `transformers` always passes tools and documents.
        let mut context: Vec<(&str, Value)> =
            vec![("tools", Value::from(())), ("documents", Value::from(()))];
        context.extend(variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        context.push(("messages", Value::from(Serde(messages))));
        context.push(("add_generation_prompt", Value::from(add_generation_prompt)));
        context.push(("strftime_now", strftime_now));

        let mut output = Bounded(Vec::new());
        let template = self.env.template_from_str(&self.source).map_err(|e| self.error(&e))?;
        template.render_captured_to(Value::from_pairs(context), &mut output).map_err(|e| self.error(&e))?;
        String::from_utf8(output.0).map_err(|e| self.problem(format!("writes what is no UTF-8: {e}")))
    }

    fn error(&self, error: &Error) -> TextError {
        let mut problem = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            problem = format!("{problem}: {cause}");
            source = cause.source();
        }
        self.problem(problem)
    }

    fn problem(&self, problem: String) -> TextError {
        TextError::Template { origin: self.origin.to_string(), problem }
    }

    /// Templates of text-only models read `content` as a string, those of multimodal models as a list; some do one for
    /// the system turn and the other for the rest. The template itself is asked.
    fn probe_forms(&self) -> [ContentForm; 3] {
        const PROBE: &str = "omnigrpo-probe";
        let list = serde_json::json!([{"type": "text", "text": PROBE}]);
        let string = serde_json::json!(PROBE);
        let content = |form, text: &serde_json::Value| match form {
            ContentForm::Parts => serde_json::json!([{"type": "text", "text": text}]),
            ContentForm::Text => text.clone(),
        };
        // (writes the text once, writes a key of the list's items)
        let shows = |messages: serde_json::Value| {
            let now = Some(jiff::civil::DateTime::default());
            let output = self.run(&messages, false, &serde_json::Map::new(), now).unwrap_or_default();
            (output.matches(PROBE).count() == 1, output.contains("\"type\"") || output.contains("'type'"))
        };
        let choose = |place: &dyn Fn(&serde_json::Value) -> serde_json::Value| {
            let [(list_has_text, list_has_key), (string_has_text, string_has_key)] =
                [&list, &string].map(|probe| shows(place(probe)));
            let prints_list = list_has_key && !string_has_key;
            if prints_list || (!list_has_text && string_has_text) {
                ContentForm::Text
            } else {
                ContentForm::Parts
            }
        };
        let user = choose(&|probe| serde_json::json!([{"role": "user", "content": probe}]));
        let other = content(user, &serde_json::json!("x"));
        let system = choose(
            &|probe| serde_json::json!([{"role": "system", "content": probe}, {"role": "user", "content": other}]),
        );
        let assistant = choose(
            &|probe| serde_json::json!([{"role": "user", "content": other}, {"role": "assistant", "content": probe}]),
        );
        [system, user, assistant]
    }
}

/// `{% generation %}` marks assistant text for `transformers`. As a condition that always holds it leaves the same text
/// and the same whitespace.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        let Some(close) = tag[2..].find("%}").map(|at| at + 2) else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(close + 2);
        let inner = &tag[2..close];
        let word = inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match word {
            "generation" => out.push_str(&format!("{{%{}%}}", inner.replacen(word, "if true", 1))),
            "endgeneration" => out.push_str(&format!("{{%{}%}}", inner.replacen(word, "endif", 1))),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Collects output up to a limit.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT_BYTES {
            return Err(io::Error::other(format!("writes more than {MAX_OUTPUT_BYTES} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(value: &Value, options: Kwargs) -> std::result::Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let format = JsonFormat {
        ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        separators: match separators.as_deref() {
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
            Some([item, key]) => (item.clone(), key.clone()),
            Some(other) => return Err(invalid(format!("tojson: {} separators, expected 2", other.len()))),
        },
    };
    options.assert_all_used()?;
    let mut out = String::new();
    format.write(&mut out, value, 0)?;
    Ok(out)
}

fn invalid(problem: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

struct JsonFormat {
    ascii: bool,
    sort: bool,
    indent: Option<usize>,
    separators: (String, String),
}

impl JsonFormat {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> std::result::Result<(), Error> {
        if depth > MAX_JSON_DEPTH {
            return Err(invalid(format!("tojson: nested deeper than {MAX_JSON_DEPTH}")));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&python_float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(out, '[', ']', depth, &items, |out, item| self.write(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.write_items(out, '{', '}', depth, &keys, |out, key| {
                    let name =
                        key.as_str().ok_or_else(|| invalid(format!("tojson: key {key} is no string")))?;
                    self.write_string(out, name);
                    out.push_str(&self.separators.1);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            kind => return Err(invalid(format!("tojson: a value of kind {kind} is not JSON"))),
        }
        Ok(())
    }

    fn write_items(
        &self,
        out: &mut String,
        open: char,
        close: char,
        depth: usize,
        items: &[Value],
        write: impl Fn(&mut String, &Value) -> std::result::Result<(), Error>,
    ) -> std::result::Result<(), Error> {
        let new_line = |out: &mut String, depth: usize| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(' ', indent.min(16) * depth));
            }
        };
        out.push(open);
        for (k, item) in items.iter().enumerate() {
            if k > 0 {
                out.push_str(&self.separators.0);
            }
            new_line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            new_line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn write_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ascii && !c.is_ascii()) || (self.ascii && c == '\u{7f}') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Python's `repr` of a float: the shortest digits, an exponent below 1e-4 and from 1e16.
fn python_float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) {
        let text = format!("{x:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{x:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(source: &str, variables: serde_json::Value) -> Result<String> {
        let template = ChatTemplate::from_source(source)?;
        let variables = variables.as_object().cloned().unwrap_or_default();
        template.run(&json!([{"role": "user", "content": "hi"}]), false, &variables, None)
    }

    #[test]
    fn tojson_writes_what_python_writes() {
        // python3 -c 'import json; print(json.dumps(x, ensure_ascii=False))' and the options named.
        let x = json!({"b": [1, 2.0, -0.5, 1e-5, 1e16, 1.5e300], "a": "é<\"\\\n\u{1}\u{7f}>", "n": null, "t": true,
            "e": [], "f": {}});
        let plain = "{\"b\": [1, 2.0, -0.5, 1e-05, 1e+16, 1.5e+300], \"a\": \"é<\\\"\\\\\\n\\u0001\u{7f}>\", \
                     \"n\": null, \"t\": true, \"e\": [], \"f\": {}}";
        assert_eq!(run("{{ x | tojson }}", json!({"x": x})).unwrap(), plain);
        let y = json!({"b": [1, {"k": "ü😀"}], "a": []});
        assert_eq!(
            run("{{ y | tojson(indent=2, ensure_ascii=true, sort_keys=true) }}", json!({"y": y})).unwrap(),
            "{\n  \"a\": [],\n  \"b\": [\n    1,\n    {\n      \"k\": \"\\u00fc\\ud83d\\ude00\"\n    }\n  ]\n}"
        );
        assert_eq!(
            run("{{ y | tojson(separators=(',', ':')) }}", json!({"y": y})).unwrap(),
            "{\"b\":[1,{\"k\":\"ü😀\"}],\"a\":[]}"
        );
    }

    #[test]
    fn jinja_as_transformers_sets_it_up() {
        let source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m['content'] | trim }}!\n    {% endif %}\n{% endfor %}\n";
        assert_eq!(run(source, json!({})).unwrap(), "hi!\n");
        assert_eq!(run("{{ none }} {{ true }} {{ undefined_name }}|", json!({})).unwrap(), "None True |");
        assert_eq!(run("{{ 'a</think>b'.split('</think>')[-1].strip('b') + 'c' }}", json!({})).unwrap(), "c");
        assert_eq!(run("{% generation %}\na\n{%- endgeneration %}\nb", json!({})).unwrap(), "ab");
        assert_eq!(run("{{ tools is none }}", json!({})).unwrap(), "True");
        assert_eq!(
            run("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", json!({}))
                .unwrap(),
            "1"
        );
    }

    #[test]
    fn time_comes_from_the_caller() {
        let template = ChatTemplate::from_source("{{ strftime_now('%d %b %Y') }}").unwrap();
        let now = jiff::civil::date(2024, 7, 26).at(9, 0, 0, 0);
        let empty = serde_json::Map::new();
        assert_eq!(template.run(&json!([]), false, &empty, Some(now)).unwrap(), "26 Jul 2024");
        let error = template.run(&json!([]), false, &empty, None).unwrap_err().to_string();
        assert!(error.contains("none was given"), "{error}");
    }

    #[test]
    fn limits_hold() {
        let error = run("{{ raise_exception('no tools here') }}", json!({})).unwrap_err().to_string();
        assert!(error.contains("no tools here") && error.contains("given"), "{error}");
        for source in [
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% set big = 'x' * 90000000 %}{{ big }}",
            "{% include 'other' %}",
            "{{ messages[0].content.missing.deeper }}",
        ] {
            assert!(matches!(run(source, json!({})), Err(TextError::Template { .. })), "{source}");
        }
        for broken in ["{% for %}", "{%}", "{%", "{{%}"] {
            assert!(matches!(ChatTemplate::from_source(broken), Err(TextError::Template { .. })), "{broken}");
        }
    }

    #[test]
    fn order_of_sources_and_named_templates() {
        let dir = tempfile::tempdir().unwrap();
        let origin = || ChatTemplate::from_dir(dir.path()).map(|t| (t.origin(), t.source().to_owned()));
        assert_eq!(origin().unwrap().0, TemplateOrigin::BuiltIn);
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("tokenizer_config.json", r#"{"chat_template": [{"name": "rag", "template": "r"}]}"#);
        assert!(matches!(origin(), Err(TextError::BadFile { .. })));
        write(
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}"#,
        );
        assert_eq!(origin().unwrap(), (TemplateOrigin::TokenizerConfig, "d".to_owned()));
        write("chat_template.json", r#"{"chat_template": "j"}"#);
        assert_eq!(origin().unwrap(), (TemplateOrigin::JsonFile, "j".to_owned()));
        write("chat_template.jinja", "x");
        assert_eq!(origin().unwrap(), (TemplateOrigin::JinjaFile, "x".to_owned()));
    }

    #[test]
    fn content_form_is_what_the_template_reads() {
        let string = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}";
        assert_eq!(ChatTemplate::from_source(string).unwrap().forms, [ContentForm::Text; 3]);
        let printed = "{% for m in messages %}{{ m.content }}{% endfor %}";
        assert_eq!(ChatTemplate::from_source(printed).unwrap().forms, [ContentForm::Text; 3]);
        assert_eq!(
            ChatTemplate::compile(BUILT_IN, TemplateOrigin::BuiltIn).unwrap().forms,
            [ContentForm::Parts; 3]
        );
        let mixed = "{% for m in messages %}{% if m.role == 'system' %}{{ 's' + m.content }}{% else %}\
                     {% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}";
        let [system, user, assistant] = ChatTemplate::from_source(mixed).unwrap().forms;
        assert_eq!((system, user, assistant), (ContentForm::Text, ContentForm::Parts, ContentForm::Parts));
    }
}
