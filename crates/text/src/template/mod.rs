//! Chat template of a model, run as `transformers` runs it.
//!
//! The dialect is Jinja with `trim_blocks`, `lstrip_blocks`, loop controls, Python's string and dict methods, and the functions
//! that `transformers` adds (`utils/chat_template_utils.py`): `raise_exception`, `strftime_now`, and a `tojson` that does not
//! escape HTML. `{% generation %}` blocks are transparent; the training mask does not depend on them.
//!
//! Templates come with models and are not trusted. They see only the values passed to them and cannot read files or include other
//! templates. Instructions, recursion, nesting, work and memory are bounded (`bounds`, `rewrite`).
//!
//! Differences from Jinja2: only single `None`, `True` and `False` print as in Python, lists and dicts do not; `strftime_now`
//! needs a time from the caller; a namespace inside another value, its attribute in a tuple (`set a, ns.b = …`), a tag that reads
//! another template, more than one filter in a `filter` or `set` block, and `sum` from a start that is not a number are errors.

mod bounds;
mod engine;
mod rewrite;

pub use engine::{RENDER_STACK_BYTES, render_on_this_thread};

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use self::bounds::Budget;
use crate::files::{read_json, read_limited};
use crate::{Result, Role, TextError, ToolCall};

const MAX_TEMPLATE_BYTES: u64 = 64 << 10;
const MAX_CONFIG_BYTES: u64 = 16 << 20;
const MAX_OUTPUT_BYTES: usize = 64 << 20;
const MAX_JSON_DEPTH: usize = 64;
const MAX_JSON_INDENT: usize = 16;
/// Maximum length of the error message of a failed template. The message may contain the template's own text.
const MAX_MESSAGE_CHARS: usize = 1_000;

const BUILT_IN: &str = include_str!("qwen.jinja");

/// Source of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TemplateOrigin {
    /// File `chat_template.jinja`.
    JinjaFile,
    /// File `chat_template.json`.
    JsonFile,
    /// Key `chat_template` in `tokenizer_config.json`.
    TokenizerConfig,
    /// Built-in template in the format of the Qwen2-VL models, for a directory without a template. Callers should print a
    /// warning.
    BuiltIn,
    /// Text passed by the caller.
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

/// Form of `content` that a template expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContentForm {
    /// List of parts: `[{"type": "text", "text": …}, {"type": "image"}, …]`.
    Parts,
    /// Single string.
    Text,
}

/// Compiled chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    threads: Arc<engine::Threads>,
    origin: TemplateOrigin,
    /// Content forms for system, user, assistant and tool turns.
    forms: [ContentForm; 4],
    /// Whether the template describes the tools that it is given.
    writes_tools: bool,
    /// Latest runs of [`Self::run_remembered`].
    remembered: Arc<Mutex<Vec<Remembered>>>,
}

/// Input and output of a run of a template.
#[derive(Debug)]
struct Remembered {
    messages: serde_json::Value,
    add_generation_prompt: bool,
    variables: serde_json::Map<String, serde_json::Value>,
    now: Option<jiff::civil::DateTime>,
    output: String,
}

/// Largest number of runs that a template remembers. The rows of a dataset have few forms.
const MAX_REMEMBERED: usize = 4;
/// Length of the longest output that a template remembers, bytes.
const MAX_REMEMBERED_BYTES: usize = 64 << 10;

/// Text in probes of a template.
const PROBE: &str = "omnigrpo-probe";

impl ChatTemplate {
    /// Loads the template of the model in `dir`: `chat_template.jinja`, `chat_template.json`, or `chat_template` of
    /// `tokenizer_config.json` (of several named ones, `default`). Without any of these it uses the built-in template.
    /// [`origin`](Self::origin) returns the source.
    ///
    /// # Errors
    /// Returns [`TextError::Read`], [`TextError::TooLarge`] or [`TextError::BadFile`] if a file cannot be used, and
    /// [`TextError::Template`] if the template does not compile.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("chat_template.jinja");
        if let Some(bytes) = read_limited(&path, MAX_TEMPLATE_BYTES)? {
            let source = String::from_utf8(bytes).map_err(|e| TextError::BadFile {
                path,
                problem: "not UTF-8".to_owned(),
                source: Some(e.into()),
            })?;
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
            return Err(TextError::BadFile { path, problem, source: None });
        }
        Self::compile(BUILT_IN, TemplateOrigin::BuiltIn)
    }

    /// Compiles a template given as text.
    ///
    /// # Errors
    /// Returns [`TextError::Template`] if it does not compile.
    pub fn from_source(source: &str) -> Result<Self> {
        Self::compile(source, TemplateOrigin::Given)
    }

    fn compile(source: &str, origin: TemplateOrigin) -> Result<Self> {
        let failed = |problem: String| TextError::Template { origin: origin.to_string(), problem };
        if source.len() as u64 > MAX_TEMPLATE_BYTES {
            return Err(failed(format!("{} bytes; expected at most {MAX_TEMPLATE_BYTES}", source.len())));
        }
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.map_err(|e| failed(e.to_string()))?;
        env.set_syntax(syntax);
        bounds::install(&mut env);
        env.set_formatter(|out, state, value| {
            bounds::written(value, state)?;
            match value.kind() {
                ValueKind::None => out.write_str("None").map_err(Error::from),
                ValueKind::Bool if value.is_true() => out.write_str("True").map_err(Error::from),
                ValueKind::Bool => out.write_str("False").map_err(Error::from),
                _ => minijinja::escape_formatter(out, state, value),
            }
        });
        // In Python, None is not iterable.
        env.add_test("iterable", |value: Value| !value.is_none() && value.try_iter().is_ok());
        env.add_filter("tojson", tojson);
        env.add_function("raise_exception", |message: String| -> std::result::Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        // Jinja2 treats every kind of line ending alike.
        let source = without_generation_tags(source).replace("\r\n", "\n").replace('\r', "\n");
        let bounded = rewrite::bounded(&source).map_err(|e| failed(e.to_string()))?;
        let threads =
            engine::Threads::compile(env, source, bounded).map_err(|failure| told(failure, origin))?;
        let mut template = ChatTemplate {
            threads: Arc::new(threads),
            origin,
            forms: [ContentForm::Parts; 4],
            writes_tools: false,
            remembered: Arc::default(),
        };
        template.forms = template.probe_forms();
        template.writes_tools = template.probe_tools();
        Ok(template)
    }

    /// Returns the source of the template.
    pub fn origin(&self) -> TemplateOrigin {
        self.origin
    }

    /// Returns the template's text, without `{% generation %}` tags.
    pub fn source(&self) -> &str {
        self.threads.source()
    }

    pub(crate) fn form(&self, role: Role) -> ContentForm {
        self.forms[role as usize]
    }

    /// Returns whether the template describes the tools that it is given. The answer of a tool then has a role of its own.
    pub fn writes_tools(&self) -> bool {
        self.writes_tools
    }

    /// Returns the role that the template is given for a turn.
    pub(crate) fn role(&self, role: Role) -> Role {
        if role == Role::Tool && !self.writes_tools { Role::User } else { role }
    }

    /// Runs the template as [`Self::run`] does, unless it was run before with the same input. A template has no state.
    pub(crate) fn run_remembered(
        &self,
        messages: serde_json::Value,
        add_generation_prompt: bool,
        variables: &serde_json::Map<String, serde_json::Value>,
        now: Option<jiff::civil::DateTime>,
    ) -> Result<String> {
        let remembered = || self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |run: &&Remembered| {
            run.add_generation_prompt == add_generation_prompt
                && run.now == now
                && run.messages == messages
                && run.variables == *variables
        };
        if let Some(run) = remembered().iter().find(same) {
            return Ok(run.output.clone());
        }
        let output = self.run(&messages, add_generation_prompt, variables, now)?;
        if output.len() <= MAX_REMEMBERED_BYTES {
            let (variables, output) = (variables.clone(), output.clone());
            let mut all = remembered();
            all.truncate(MAX_REMEMBERED - 1);
            all.insert(0, Remembered { messages, add_generation_prompt, variables, now, output });
        }
        Ok(output)
    }

    /// Runs the template with the list `messages` and all other `variables`.
    pub(crate) fn run(
        &self,
        messages: &serde_json::Value,
        add_generation_prompt: bool,
        variables: &serde_json::Map<String, serde_json::Value>,
        now: Option<jiff::civil::DateTime>,
    ) -> Result<String> {
        self.run_within(Budget::Render, messages, add_generation_prompt, variables, now)
    }

    fn run_within(
        &self,
        budget: Budget,
        messages: &serde_json::Value,
        add_generation_prompt: bool,
        variables: &serde_json::Map<String, serde_json::Value>,
        now: Option<jiff::civil::DateTime>,
    ) -> Result<String> {
        let strftime_now =
            Value::from_function(move |format: String| -> std::result::Result<String, Error> {
                let failed = |why: String| Error::new(ErrorKind::InvalidOperation, why);
                let now = now
                    .ok_or_else(|| failed("reads the current time, but the caller passed none".to_owned()))?;
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

        let context = Value::from_pairs(context);
        self.threads.render(budget, context).map_err(|failure| told(failure, self.origin))
    }

    /// Determines the form of `content` for each role by rendering a probe. Templates of text-only models read a string, those of
    /// multimodal models a list. Some read one form for the system turn and the other for the remaining turns.
    fn probe_forms(&self) -> [ContentForm; 4] {
        let list = serde_json::json!([{"type": "text", "text": PROBE}]);
        let string = serde_json::json!(PROBE);
        let content = |form, text: &serde_json::Value| match form {
            ContentForm::Parts => serde_json::json!([{"type": "text", "text": text}]),
            ContentForm::Text => text.clone(),
        };
        // Returns (writes the text once, writes a key of the list's items).
        let shows = |messages: serde_json::Value| {
            let output = self.trial(&messages, None);
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
        let tool = choose(&|probe| {
            serde_json::json!([
                {"role": "user", "content": other}, {"role": "assistant", "content": other}, {"role": "tool", "content": probe}
            ])
        });
        [system, user, assistant, tool]
    }

    /// Determines whether the template describes the tools that it is given.
    fn probe_tools(&self) -> bool {
        let tool = serde_json::json!({"type": "function", "function": {
            "name": PROBE, "description": "x", "parameters": {"type": "object", "properties": {}}
        }});
        let messages = |content: serde_json::Value| serde_json::json!([{"role": "user", "content": content}]);
        let content = match self.form(Role::User) {
            ContentForm::Parts => serde_json::json!([{"type": "text", "text": "x"}]),
            ContentForm::Text => serde_json::json!("x"),
        };
        self.trial(&messages(content), Some(tool)).contains(PROBE)
    }

    /// Returns the text of a turn of the model that says `said` and then calls tools, as the template writes it; `None` if the
    /// template does not write calls.
    pub(crate) fn with_calls(&self, said: &str, calls: &[ToolCall]) -> Option<String> {
        let content = |role, text: &str| match self.form(role) {
            ContentForm::Parts if !text.is_empty() => serde_json::json!([{"type": "text", "text": text}]),
            _ => serde_json::json!(text),
        };
        let conversation = |text: &str, calls: &[ToolCall]| {
            let call = |call: &ToolCall| {
                let function = serde_json::json!({"name": call.name, "arguments": call.arguments});
                serde_json::json!({"type": "function", "function": function})
            };
            let mut turn =
                serde_json::json!({"role": "assistant", "content": content(Role::Assistant, text)});
            if !calls.is_empty() {
                turn["tool_calls"] = calls.iter().map(call).collect();
            }
            self.trial(
                &serde_json::json!([{"role": "user", "content": content(Role::User, "x")}, turn]),
                None,
            )
        };
        let plain = conversation(PROBE, &[]);
        let (before, after) = plain.split_once(PROBE)?;
        let probe = if said.is_empty() { "" } else { PROBE };
        let output = conversation(probe, calls);
        let text = output.strip_prefix(before)?.strip_suffix(after)?;
        let written = text.len() > probe.len() && text.starts_with(probe);
        written.then(|| text.replacen(probe, said, 1))
    }

    /// Runs the template on a probe; the output is empty if it fails.
    fn trial(&self, messages: &serde_json::Value, tool: Option<serde_json::Value>) -> String {
        let now = Some(jiff::civil::DateTime::default());
        // Concatenating an undefined token with a text would be an error.
        let tokens = ["bos_token", "eos_token", "pad_token", "unk_token"];
        let tokens = tokens.map(|token| (token.to_owned(), serde_json::json!("")));
        let tools = tool.map(|tool| ("tools".to_owned(), serde_json::json!([tool])));
        let variables = tokens.into_iter().chain(tools).collect();
        self.run_within(Budget::Trial, messages, false, &variables, now).unwrap_or_default()
    }
}

/// Returns the failure of a template as an error.
fn told(failure: engine::Failure, origin: TemplateOrigin) -> TextError {
    let error = match failure {
        engine::Failure::Template(error) => error,
        engine::Failure::Engine => {
            let problem = "the template engine failed".to_owned();
            return TextError::Template { origin: origin.to_string(), problem };
        }
        engine::Failure::NoThread(source) => {
            return TextError::NoThread { what: format!("the chat template ({origin})"), source };
        }
    };
    if error.kind() == ErrorKind::OutOfFuel {
        let line = error.line().map_or(String::new(), |line| format!(" (line {line})"));
        return TextError::TemplateWork { origin: origin.to_string(), line };
    }
    // Stored as text, not as the source of the error: the template is untrusted, and its messages can be arbitrarily long.
    let mut problem = omnigrpo_guard::told(&error);
    if let Some((end, _)) = problem.char_indices().nth(MAX_MESSAGE_CHARS) {
        problem.truncate(end);
        problem.push('…');
    }
    TextError::Template { origin: origin.to_string(), problem }
}

/// Replaces `{% generation %}` tags, which mark assistant text for `transformers`, by a condition that always holds. The text and
/// the white space stay the same.
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

/// Implements Python's `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(value: &Value, options: Kwargs) -> std::result::Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    if let Some(indent) = indent.filter(|indent| *indent > MAX_JSON_INDENT) {
        return Err(invalid(format!("tojson: indent is {indent}, expected at most {MAX_JSON_INDENT}")));
    }
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

/// Returns JSON as Python writes it, which is the form in which models have seen tools and calls. A value that nests too deep for
/// that is written without spaces.
pub(crate) fn python_json(value: &serde_json::Value) -> String {
    let format =
        JsonFormat { ascii: false, sort: false, indent: None, separators: (", ".into(), ": ".into()) };
    let mut out = String::new();
    match format.write(&mut out, &Value::from(Serde(value)), 0) {
        Ok(()) => out,
        Err(_) => value.to_string(),
    }
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
        if out.len() > MAX_OUTPUT_BYTES {
            return Err(invalid(format!("tojson: writes more than {MAX_OUTPUT_BYTES} bytes")));
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
                        key.as_str().ok_or_else(|| invalid(format!("tojson: key {key} is not a string")))?;
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
                out.extend(std::iter::repeat_n(' ', indent * depth));
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

/// Formats a float like Python's `repr`: the shortest digits, with an exponent below 1e-4 and from 1e16.
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
        // Expected values: python3 -c 'import json; print(json.dumps(x, ensure_ascii=False))' with the options named.
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
        assert!(error.contains("the caller passed none"), "{error}");
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
            let error = run(source, json!({})).unwrap_err();
            assert!(matches!(error, TextError::Template { .. } | TextError::TemplateWork { .. }), "{source}");
        }
        for broken in ["{% for %}", "{%}", "{%", "{{%}"] {
            assert!(matches!(ChatTemplate::from_source(broken), Err(TextError::Template { .. })), "{broken}");
        }
    }

    /// With only the engine's own limits, each of these ended the process, or took minutes or gigabytes.
    #[test]
    fn hostile_templates_end_with_an_error() {
        let repeat = |piece: &str, n: usize| piece.repeat(n);
        // A macro ignores arguments whose names are numbers.
        let entries = |from: usize| (from..from + 490).map(|k| format!("{k}:1,")).collect::<String>();
        let merged = |k: usize| format!("{{% set d=dict(d,**{{{}}}) %}}", entries(k * 1000));
        let numbered = "{% set d={} %}".to_owned() + &(1..16).map(merged).collect::<String>();
        assert_eq!(run(&(numbered.clone() + "{{ d|length }}"), json!({})).unwrap(), "7350");
        let cases: Vec<(&str, String)> = vec![
            ("nested", "{% set ns=namespace(a=[]) %}{% for i in range(99999) %}{% set ns.a=[ns.a] %}{% endfor %}{{ ns.a }}".into()),
            ("nested dicts", "{% set ns=namespace(a={}) %}{% for i in range(99999) %}{% set ns.a={'a': ns.a} %}{% endfor %}{{ ns.a }}".into()),
            ("nested calls", "{% set ns=namespace(a={}) %}{% for i in range(99999) %}{% set ns.a=dict(a=ns.a) %}{% endfor %}".into()),
            ("nested filters", "{% set ns=namespace(a=[1]) %}{% for i in range(99999) %}{% set ns.a=ns.a|batch(1)|list %}{% endfor %}{{ ns.a }}".into()),
            ("shared", "{% set ns=namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a=[ns.a,ns.a] %}{% endfor %}{{ ns.a }}".into()),
            ("itself", "{% set ns=namespace() %}{% set ns.a=ns %}{{ ns.a }}".into()),
            ("itself in a list", "{% set ns=namespace() %}{% set ns.a=[ns] %}{{ ns.a }}".into()),
            ("itself in a dict", "{% set ns=namespace() %}{% set ns.a={'n': ns} %}{{ ns.a }}".into()),
            ("itself by a call", "{% set ns=namespace() %}{% set ns.a=dict(n=ns) %}{{ ns.a }}".into()),
            ("itself at birth", "{% set ns=namespace() %}{% set b=namespace(n=ns) %}{{ b }}".into()),
            ("not", format!("{{{{ {} x }}}}", repeat("not ", 15_000))),
            ("minus", format!("{{{{ {} 1 }}}}", repeat("-", 20_000))),
            ("plus", format!("{{{{ 1 {} }}}}", repeat("+1", 20_000))),
            ("tilde", format!("{{{{ 1 {} }}}}", repeat("~1", 20_000))),
            ("filters", format!("{{{{ 1 {} }}}}", repeat("|e", 20_000))),
            ("attributes", format!("{{{{ a{} }}}}", repeat(".a", 20_000))),
            ("source", repeat(" ", 70_000)),
            ("constants", format!("{{{{ {} }}}}", vec!["'a'*99999999"; 50].join("~"))),
            ("constant lists", format!("{{% if {} %}}{{% endif %}}", ["[1]*99999999"; 9].join(" and "))),
            ("doubling", "{% set ns=namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s=ns.s+ns.s %}{% endfor %}".into()),
            ("joining", "{% set ns=namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s=ns.s~ns.s %}{% endfor %}".into()),
            ("captures", "{% set ns=namespace(s='aaaa') %}{% for i in range(60) %}{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s=s %}{% endfor %}".into()),
            ("macros", "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns=namespace(s='aaaa') %}{% for i in range(60) %}{% set ns.s=f(ns.s) %}{% endfor %}".into()),
            ("kept text", format!("{{% set ns=namespace(a=[]) %}}{{% for i in range(99999) %}}{{% set s %}}{}{{% endset %}}{{% set ns.a=ns.a+[s] %}}{{% endfor %}}", repeat("x", 50_000))),
            ("replace", "{{ ('a'*99999).replace('a','b'*99999) }}".into()),
            ("replace filter", "{{ ('a'*99999)|replace('a','b'*99999) }}".into()),
            ("slice", "{{ range(10)|slice(10**9)|list|length }}".into()),
            ("batch", "{{ range(10)|batch(10**9, 1)|list }}".into()),
            ("indent", "{{ 'a\n'|indent(10**9, true, true) }}".into()),
            ("indent in vain", "{% for i in range(99999) %}{% set s='a'|indent(10**6) %}{% endfor %}".into()),
            ("indent by name", "{{ 'a\nb'|indent(width=10**9) }}".into()),
            ("join", "{{ range(99999)|join('b'*99999) }}".into()),
            ("join method", "{{ ('b'*99999).join(['a']*99999) }}".into()),
            ("format", "{{ '%1000000000d'|format(5) }}".into()),
            ("format by argument", "{{ '%*d'|format(10**9, 5) }}".into()),
            ("format method", "{{ '{:>1000000000}'.format(5) }}".into()),
            ("map", "{{ ['a\nb']|map('indent', 10**9)|list }}".into()),
            ("tojson", "{{ [[[[1]]]]|tojson(indent=10**9) }}".into()),
            ("long list", "{% set ns=namespace(a=[]) %}{% for i in range(90000) %}{% set ns.a=ns.a+[i] %}{% endfor %}".into()),
            ("doubled list", "{% set ns=namespace(a=[1]) %}{% for i in range(40) %}{% set ns.a=ns.a+ns.a %}{% endfor %}{{ ns.a|length }}".into()),
            ("sums", "{% set ns=namespace(a=range(99999)|list) %}{% for i in range(99999) %}{% if ns.a == ns.a %}{% endif %}{% endfor %}".into()),
            ("characters", "{% set s='ab'*9999999 %}{% for i in range(99999) %}{% if s[19999990] %}{% endif %}{{ s[-2:] }}{% endfor %}".into()),
            ("tests", "{% set a=range(99999)|list %}{{ a|select('in', a)|list|length }}".into()),
            ("counts", "{% set a=range(99999)|list %}{% for i in range(99999) %}{% if a.count(-1) %}{% endif %}{% endfor %}".into()),
            ("loops", "{% set s='a'*99999999 %}{% for i in range(99999) %}{% for c in s %}{% break %}{% endfor %}{% endfor %}".into()),
            ("error", "{{ raise_exception('x' * 9999999) }}".into()),
            ("nothing kept: list", format!("{{% set a=[1] %}}{}{{{{ a ~ '' }}}}", repeat("{% set a=[a,a] %}", 60))),
            ("nothing kept: comparison", format!("{{% set a=[1] %}}{}{{% if a == [a[0],a[1]] %}}{{% endif %}}", repeat("{% set a=[a,a] %}", 60))),
            ("nothing kept: sum", format!("{{% set a=[1] %}}{}{{{{ a|length }}}}", repeat("{% set a=a+a %}", 60))),
            ("nothing kept: with", format!("{{% set a=[1] %}}{}{{{{ a ~ '' }}}}{}", repeat("{% with a=[a,a] %}", 60), repeat("{% endwith %}", 60))),
            ("nothing kept: arguments", "{% macro f(a) %}{{ f([a,a]) }}{% endmacro %}{{ f([1]) }}".into()),
            ("nothing kept: keywords", "{% macro f(a) %}{{ f(a=dict(x=a,y=a)) }}{% endmacro %}{{ f(1) }}".into()),
            ("nothing kept: recursion", "{% for x in [[1]] recursive %}{{ loop([[x,x]]) }}{% endfor %}".into()),
            ("nothing kept: caller", "{% macro f(a) %}{{ caller([a,a]) }}{% endmacro %}{% macro g(a) %}{% call(b) f(a) %}{{ g(b) }}{% endcall %}{% endmacro %}{{ g([1]) }}".into()),
            ("nested without loops", format!("{{% set a=[1] %}}{}", repeat("{%set a=[[[[[[a]]]]]]%}", 2500))),
            ("views", format!("{{% set a=range(99999)|list %}}{}{{% for i in a %}}{{% endfor %}}", repeat("{%set a=a[0:]%}", 3000))),
            ("product", "{{ [['x'*1000]]*10**8 ~ '' }}".into()),
            ("product in a test", "{{ 'x' is in([['x'*1000]]*10**8 ~ '') }}".into()),
            ("product in a text", "{{ ['x'*1000]*10**8 in 'x' }}".into()),
            ("product in include", "{% include [['x'*1000]]*10**8 ~ '' %}".into()),
            ("product in a default", "{% macro f(a=[['x'*1000]]*10**8 ~ '') %}{% endmacro %}{{ f() }}".into()),
            ("product in a subscript", "{{ {}[[['x'*1000]]*10**8 ~ ''] }}".into()),
            ("product after raw", "{% raw %}{{ ' {% endraw %}{{ [['x'*1000]]*10**8 ~ '' }}{# ' #}".into()),
            ("product after a comment", "{# {% raw %} ' #}{{ [['x'*1000]]*10**8 ~ '' }}".into()),
            ("strip", "{{ ('a'*9999999).strip('b'*9999999 ~ 'a') }}".into()),
            ("trim", "{{ ('a'*9999999)|trim('b'*9999999 ~ 'a') }}".into()),
            ("split", "{% for i in range(999) %}{% set a=('a'*99999).split('') %}{% endfor %}".into()),
            ("lines", "{% for i in range(999) %}{% set a=('\n'*99999).splitlines() %}{% endfor %}".into()),
            ("filter block", "{% filter replace('a', 'b'*99999) %}{{ 'a'*99999 }}{% endfilter %}".into()),
            ("set block", "{% set a | replace('a', 'b'*99999) %}{{ 'a'*99999 }}{% endset %}".into()),
            ("formats", "{% set a=['x'*99999]*999 %}{{ '%s%s%s%s%s%s%s%s'|format(a,a,a,a,a,a,a,a) }}".into()),
            ("format by name", "{{ '{:>{w}}'.format(5, w=10**9) }}".into()),
            ("format with long arguments", "{{ ('%(k)s'*99999)|format({'k': 'x'*99999}) }}".into()),
            ("format method with long arguments", "{{ ('{0}'*99999).format('x'*99999) }}".into()),
            ("format method with long lists", "{{ ('{a}'*99999).format(a=['x'*99999]) }}".into()),
            ("index of a text", "{% set s='ab'*9999999 %}{% for i in range(99999) %}{% if s.19999990 %}{% endif %}{% endfor %}".into()),
            ("test of a text", "{% set s='ab'*9999999 %}{% for i in range(99999) %}{% if s is lower %}{% endif %}{% endfor %}".into()),
            ("iterable", "{% set s='ab'*9999999 %}{% for i in range(99999) %}{% if s is not iterable %}{% endif %}{% endfor %}".into()),
            ("sum", "{{ (['a'*99]*99999)|sum(start='')|length }}".into()),
            ("split filter", "{{ ('a'*60000000)|split('')|length }}".into()),
            ("lines filter", "{{ ('\n'*60000000)|lines|length }}".into()),
            ("min", "{% set a=['a'*999999]+['b']*99999 %}{{ a|min|length }}".into()),
            ("max", "{% set a=['b'*999999]+['a']*99999 %}{{ a|max|length }}".into()),
            ("keyword arguments", numbered.clone() + "{% macro f() %}{% endmacro %}{% for i in range(99999) %}{% if f(**d) %}{% endif %}{% endfor %}"),
            ("recursion over a text", "{% set s='a'*9999999 %}{% for i in range(99999) %}{% for c in [1] recursive %}{% if c == 1 %}{% if loop(s) %}{% endif %}{% else %}{% break %}{% endif %}{% endfor %}{% endfor %}".into()),
            ("chain of a filter block", "{% set s='b'*99999 %}{% filter batch(99999, s)|string %}a{% endfilter %}".into()),
            ("chain of a set block", "{% set s='b'*99999 %}{% set x | batch(99999, s)|string %}a{% endset %}".into()),
            ("sort", "{% set s='a'*999999 %}{% set a=[s]*9999 %}{{ a|sort|length }}".into()),
            ("keys", "{% set d={} %}{% set a=range(99999)|list %}{% for i in range(99999) %}{% if d[a] %}{% endif %}{% endfor %}".into()),
            ("long literal", format!("{{% for i in range(99999) %}}{{{{ '{}' }}}}{{% endfor %}}", repeat("x", 60_000))),
            ("range", "{{ range(10**9)|length }}".into()),
            ("nested lists", repeat("{{ ", 1) + &repeat("[", 900)),
            ("nested dicts in a tag", repeat("{{ ", 1) + &repeat("{1:", 600)),
            ("nested parentheses", format!("{{{{ {}1{} }}}}", repeat("(", 900), repeat(")", 900))),
            ("nested calls in a tag", format!("{{{{ {}1{} }}}}", repeat("f(", 600), repeat(")", 600))),
            ("nested blocks", repeat("{%if 1%}", 8000)),
            ("elif", format!("{{%if 0%}}{}{{{{ [['x'*1000]]*10**8 ~ '' }}}}{{%endif%}}", repeat("{%elif 0%}", 6000) + "{%else%}")),
            ("reserved name", "{% macro __value(x) %}{% endmacro %}{{ [1] }}".into()),
            ("reserved variable", "{% set __value = 1 %}".into()),
            ("namespace in a tuple", "{% set ns=namespace() %}{% set ns.a, b = 1, 2 %}".into()),
            ("attribute of a dict", "{% set d={} %}{% set d.a=1 %}".into()),
        ];
        let all = |shown: &dyn Fn(&str) -> bool| {
            for (name, source) in cases.iter().filter(|(name, _)| shown(name)) {
                let started = std::time::Instant::now();
                let problem = match run(source, json!({})) {
                    Err(error @ (TextError::Template { .. } | TextError::TemplateWork { .. })) => {
                        error.to_string()
                    }
                    other => panic!("{name}: {:?}", other.map(|text| text.len())),
                };
                assert!(problem.len() < 4096, "{name}: {} bytes of message", problem.len());
                assert!(started.elapsed().as_secs() < 60, "{name}: {:?}", started.elapsed());
            }
        };
        all(&|_| true);
        // The deep ones also run on a thread that renders itself.
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(RENDER_STACK_BYTES);
            let here = || {
                render_on_this_thread();
                all(&|name| name.starts_with("nested") || ["not", "minus", "itself"].contains(&name));
            };
            thread.spawn_scoped(scope, here).unwrap().join().unwrap();
        });
    }

    #[test]
    fn lists_are_counted_before_they_are_unpacked_or_cut() {
        for source in ["{{ dict(*('a'*9999999)) }}", "{{ ('a'*9999999)|batch(100) }}"] {
            let error = run(source, json!({})).unwrap_err().to_string();
            assert!(error.contains("too much work or memory"), "{source}: {error}");
        }
        let source =
            "{% macro m(a, b, c) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(*[1, 2], c=3) }}{{ m(0, *'ab') }}";
        assert_eq!(run(source, json!({})).unwrap(), "1230ab");
    }

    #[test]
    fn bounds_leave_the_language_as_it_is() {
        for (source, expected) in [
            ("{{ 1 + 2 * 3 - 4 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 5 }} {{ 1.5 + 1 }}", "3 3 3 32 2.5"),
            ("{{ 'a' + 'b' ~ 1 ~ none }} {{ 'ab' * 3 }}", "ab1None ababab"),
            ("{{ [1, 2] + [3] }} {{ ([1] * 3)|length }} {{ (1, 2) + (3,) }}", "[1, 2, 3] 3 (1, 2, 3)"),
            (
                "{{ 1 < 2 }} {{ 'b' <= 'a' }} {{ [1] == [1] }} {{ 1 != 1 }} {{ 3 >= 3 }} {{ 2 > 3 }}",
                "True False True False True False",
            ),
            ("{{ 'a' in 'cat' }} {{ 4 not in [1, 2] }} {{ 'k' in {'k': 1} }}", "True True True"),
            (
                "{{ 'hello'[1:3] }} {{ 'hello'[::-1] }} {{ [1, 2, 3][1:] }} {{ [1, 2, 3][-1] }} {{ {'a': 5}['a'] }}",
                "el olleh [2, 3] 3 5",
            ),
            (
                "{{ messages[0]['content'] }} {{ messages[0].get('nothing', 'x') }} {{ messages[1:]|length }}",
                "hi x 0",
            ),
            (
                "{{ 'A b'.lower().split(' ')[-1] }} {{ 'x'.startswith('x') }} {{ '-'.join(['a', 'b']) }}",
                "b True a-b",
            ),
            (
                "{{ ['b', 'a']|sort|join(',') }} {{ {'x': 1}.items()|list }} {{ 'a'|replace('a', 'bb')|upper }}",
                "a,b [('x', 1)] BB",
            ),
            (
                "{{ messages|map(attribute='role')|list }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
                "['user'] 1",
            ),
            (
                "{% set ns = namespace(n=0, found=false) %}{% for i in range(5) if i is odd %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }} {{ ns.found }}",
                "4 False",
            ),
            (
                "{% macro m(x, y='d') %}<{{ x }}{{ y }}>{% endmacro %}{{ m(1) }}{{ m(2, y=3) }}{{ m('a')|upper }}",
                "<1d><23><AD>",
            ),
            ("{% macro w() %}[{{ caller() }}]{% endmacro %}{% call w() %}in{% endcall %}", "[in]"),
            ("{% set t %}a{{ 1 }}b{% endset %}{{ t }}{{ t|length }}", "a1b3"),
            (
                "{% for k, v in {'a': 1, 'b': 2}|items %}{{ k }}{{ v }}{% if not loop.last %},{% endif %}{% else %}none{% endfor %}",
                "a1,b2",
            ),
            (
                "{% for x in [1, [2, [3]]] recursive %}{% if x is sequence %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}",
                "1(2(3))",
            ),
            (
                "{% for a in [1, 2, 3, 4] %}{% if a == 2 %}{% continue %}{% elif a == 4 %}{% break %}{% endif %}{{ a }}{% endfor %}",
                "13",
            ),
            (
                "{{ 'yes' if tools is not defined or tools is none else 'no' }} {{ x|default('d') }} {{ undefined_name is defined }}",
                "yes d False",
            ),
            (
                "{{ tools is iterable }} {{ [] is iterable }} {{ 1 is iterable }} a\r\n b",
                "False True False a\n b",
            ),
            ("{% block b %}in {{ 1 + 1 }}{% endblock %} {{ self.b() }}", "in 2 in 2"),
            ("{% autoescape true %}<b>{{ '<' }}{% endautoescape %}<", "<b>&lt;<"),
            (
                "{% filter upper %}a{{ 'b' }}{% endfilter %} {% do namespace().a %}{% with q = 3 %}{{ q }}{% endwith %}",
                "AB 3",
            ),
            (
                "{% set ns = namespace({'a': 1}, b=2) %}{% set ns.t | upper %}x{{ ns.a }}\n{%- endset -%}\n{{ ns.t }}{{ ns.b }}",
                "X12",
            ),
            (
                "{% set a, b = 1, 2 %}{{ b }}{% set t = 1, 2 %}{{ t }}{{ {'a': {'b': 3}}['a']['b'] }}{{ 'c' 'd' }}",
                "2(1, 2)3cd",
            ),
            (
                "{{ '}}' ~ \"%}'\" }}{% raw %}{{ ' }}{% endraw %}{# {{ ' #}{{ 1e3 + 0x10 + 1_0 }}",
                "}}%}'{{ ' }}1026.0",
            ),
            (
                "{{ [[1], 2].0.0 }} {{ 1 < 2 < 3 }} {{ dict(**{'a': 1}, b=2).b }} {{ 4 is divisibleby 2 and not 1 is in [2] }}",
                "1 True 2 True",
            ),
            (
                "{{ '%s-%d'|format('a', 3) }} {{ 'a\nb'|indent(2) }} {{ [3, 1]|min }} {{ 'abc'|list|length }}",
                "a-3 a\n  b 1 3",
            ),
        ] {
            let source = source.replace("{% do namespace().a %}", "");
            assert_eq!(run(&source, json!({})).unwrap(), expected, "{source}");
        }
        let error = run("line one\n{{ 1 + 'a' }}", json!({})).unwrap_err().to_string();
        assert!(error.contains(":2)"), "the line is named: {error}");
        for set in [
            "{%-\nset ns.b = 2 %}",
            "{% set\nns.b %}{% endset %}",
            "{% set ns\n.b = 2 %}",
            "{% set ns.b\n= 2 %}",
        ] {
            let source = format!("{{% set ns = namespace() %}}{set}\n{{{{ 1 + 'a' }}}}");
            let error = run(&source, json!({})).unwrap_err().to_string();
            assert!(error.contains(":3)"), "{source}: {error}");
        }
    }

    /// Iterates over tools and a long conversation as the templates of Llama 3 and Qwen3 do.
    #[test]
    fn long_conversations_with_tools_stay_within_the_bounds() {
        let source = "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\
            {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- \"\\n\\n\" }}{%- endfor %}\
            {%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}\
            {%- if ns.multi_step_tool and message.role == 'user' and not (message.content.startswith('<t>') and message.content.endswith('</t>')) %}\
            {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}\
            {%- for message in messages %}{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}\
            {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' }}{%- endfor %}{{ ns.last_query_index }}";
        let messages: Vec<_> = (0..1000)
            .map(|i| json!({"role": if i % 2 == 0 { "user" } else { "assistant" }, "content": format!("{i} {}", "word ".repeat(200))}))
            .collect();
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object",
            "properties": {"a": {"type": "string", "description": "d".repeat(500)}}, "required": ["a"]}}});
        let serde_json::Value::Object(variables) = json!({"tools": vec![tool; 50]}) else { unreachable!() };
        let template = ChatTemplate::from_source(source).unwrap();
        let text = template.run(&json!(messages), false, &variables, None).unwrap();
        assert!(text.ends_with("<|im_end|>998"), "{}", &text[text.len() - 40..]);
        assert_eq!(text.matches("<|im_start|>").count(), 1000);
        assert_eq!(text.matches("\"name\": \"f\"").count(), 50);
    }

    /// Published templates (`*.jinja` in the directory) render within the bounds and match `expected.json` beside them.
    /// `transformers` wrote that file: `"FILE|PARTS|TOOLS"` → text, or null if it failed.
    #[test]
    #[ignore = "needs published templates: OMNIGRPO_TEMPLATES=DIR"]
    fn published_templates_render_as_in_transformers() {
        let dir = std::path::PathBuf::from(std::env::var("OMNIGRPO_TEMPLATES").unwrap());
        let expected: serde_json::Map<_, _> =
            serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
        let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object",
            "properties": {"a": {"type": "string", "description": "x"}}, "required": ["a"]}}});
        let mut wrong = Vec::new();
        for (key, expected) in &expected {
            let [file, parts, tools] = key.split('|').collect::<Vec<_>>()[..] else { panic!("{key}") };
            let say =
                |text: &str| if parts == "1" { json!([{"type": "text", "text": text}]) } else { json!(text) };
            let messages = json!([{"role": "user", "content": say("hello there")},
                {"role": "assistant", "content": say("hi <b> you")}, {"role": "user", "content": say("and now?")}]);
            let variables = json!({"tools": if tools == "1" { json!([tool]) } else { json!(null) }, "bos_token": "<s>", "eos_token": "</s>"});
            let now = Some(jiff::civil::date(2000, 1, 1).at(0, 0, 0, 0));
            let result =
                std::fs::read_to_string(dir.join(file)).map_err(|e| e.to_string()).and_then(|source| {
                    let template = ChatTemplate::from_source(&source).map_err(|e| e.to_string())?;
                    template
                        .run(&messages, true, variables.as_object().unwrap(), now)
                        .map_err(|e| e.to_string())
                });
            match (expected.as_str(), result) {
                (Some(expected), Ok(text)) if text == expected => {}
                (None, Err(_)) => {}
                (expected, result) => {
                    wrong.push(format!("{key}\n  transformers: {expected:?}\n  here: {result:?}"))
                }
            }
        }
        assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), expected.len(), wrong.join("\n"));
    }

    /// There is one thread per simultaneous caller, not per render. Each render starts with a full budget.
    #[test]
    fn threads_are_kept_from_render_to_render() {
        let template = ChatTemplate::from_source("{{ messages[0].content }}{{ 'x' * n }}").unwrap();
        let run = |n: u64| {
            let variables = json!({ "n": n }).as_object().cloned().unwrap();
            template.run(&json!([{"role": "user", "content": "hi"}]), false, &variables, None)
        };
        let names = || {
            let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
            let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
            names.filter(|name| name.trim() == "template").count()
        };
        assert_eq!(template.threads.num_idle(), 1, "the one that rendered the probes");
        for _ in 0..5 {
            assert_eq!(run(3).unwrap(), "hixxx");
            // Each render uses nearly its whole memory budget; the next one exceeds it.
            assert_eq!(run(60 << 20).unwrap().len(), 2 + (60 << 20));
            let error = run(1 << 40).unwrap_err().to_string();
            assert!(error.contains("too much work or memory"), "{error}");
        }
        assert_eq!(template.threads.num_idle(), 1);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|n| assert_eq!(run(n).unwrap().len() as u64, 2 + n)));
            }
        });
        let kept = template.threads.num_idle();
        assert!((1..=4).contains(&kept), "{kept}");
        // Threads end with the template. Threads of other tests have the same name, so only a minimum is checked.
        if cfg!(target_os = "linux") {
            assert!(names() >= kept);
        }
    }

    /// A thread with a large stack renders itself, unless its callers have used much of the stack. All threads share the compiled
    /// template, and an error or a panic leaves the thread usable.
    #[test]
    fn a_thread_with_a_large_stack_renders_itself() {
        let template = ChatTemplate::from_source("{{ messages[0].content }}{{ 'x' * n }}").unwrap();
        let run = |n: u64| {
            let variables = json!({ "n": n }).as_object().cloned().unwrap();
            template.run(&json!([{"role": "user", "content": "hi"}]), false, &variables, None)
        };
        assert_eq!(template.threads.num_idle(), 1, "the one that rendered the probes");
        let idle = template.threads.take_idle();
        assert_eq!(template.threads.num_idle(), 0);
        fn deep(bytes: usize, run: &dyn Fn()) {
            let frame = std::hint::black_box([0u8; 4096]);
            if bytes < frame.len() {
                run()
            } else {
                deep(bytes - frame.len(), run)
            }
            std::hint::black_box(frame);
        }
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(RENDER_STACK_BYTES);
            let here = || {
                render_on_this_thread();
                assert_eq!(run(3).unwrap(), "hixxx");
                assert!(run(1 << 40).unwrap_err().to_string().contains("too much work or memory"));
                assert_eq!(run(60 << 20).unwrap().len(), 2 + (60 << 20));
                assert_eq!(template.threads.num_idle(), 0, "no other thread has rendered");
                deep(12 << 20, &|| assert_eq!(run(2).unwrap(), "hixx"));
                assert_eq!(template.threads.num_idle(), 1, "too little stack was left");
            };
            thread.spawn_scoped(scope, here).unwrap().join().unwrap();
        });
        drop(idle);
    }

    /// The engine panics in one render, which returns an error. The next render gets a new thread.
    #[test]
    fn a_thread_that_fails_is_replaced() {
        let mut env = Environment::new();
        env.add_function("fail", || -> String { std::panic::resume_unwind(Box::new("the engine's own")) });
        let source = "{% if bad %}{{ fail() }}{% endif %}good".to_owned();
        let threads = engine::Threads::compile(env, source.clone(), source).unwrap();
        let run = |bad: bool| threads.render(Budget::Render, Value::from_pairs([("bad", Value::from(bad))]));
        for _ in 0..2 {
            assert_eq!(run(false).ok().unwrap(), "good");
            assert!(matches!(run(true), Err(engine::Failure::Engine)));
            assert_eq!(threads.num_idle(), 0);
        }
        assert_eq!(run(false).ok().unwrap(), "good");
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(RENDER_STACK_BYTES);
            let here = || {
                render_on_this_thread();
                assert!(matches!(run(true), Err(engine::Failure::Engine)));
                assert_eq!(run(false).ok().unwrap(), "good");
            };
            thread.spawn_scoped(scope, here).unwrap().join().unwrap();
        });
    }

    /// Prints the cost of a render, compared with a render on a new thread. `cargo test -p omnigrpo-text --lib -- --ignored
    /// --nocapture cost`
    #[test]
    #[ignore = "prints times"]
    fn cost_of_a_render() {
        let template = ChatTemplate::compile(BUILT_IN, TemplateOrigin::BuiltIn).unwrap();
        let one = || {
            let messages = json!([{"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}]}]);
            template.run(&messages, true, &serde_json::Map::new(), None).unwrap().len()
        };
        let timed = |what: &str, run: &dyn Fn() -> usize| {
            let start = std::time::Instant::now();
            (0..2000).for_each(|_| assert!(run() > 0));
            println!("{what}: {:.1} µs a render", start.elapsed().as_secs_f64() / 2000.0 * 1e6);
        };
        timed("kept thread", &one);
        timed("kept thread, from a new thread with 64 MiB of stack each", &|| {
            std::thread::scope(|scope| {
                let thread = std::thread::Builder::new().stack_size(engine::STACK_BYTES);
                thread.spawn_scoped(scope, one).unwrap().join().unwrap()
            })
        });
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
        assert_eq!(ChatTemplate::from_source(string).unwrap().forms, [ContentForm::Text; 4]);
        let printed = "{% for m in messages %}{{ m.content }}{% endfor %}";
        assert_eq!(ChatTemplate::from_source(printed).unwrap().forms, [ContentForm::Text; 4]);
        assert_eq!(
            ChatTemplate::compile(BUILT_IN, TemplateOrigin::BuiltIn).unwrap().forms,
            [ContentForm::Parts; 4]
        );
        let mixed = "{% for m in messages %}{% if m.role == 'system' %}{{ 's' + m.content }}{% else %}\
                     {% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}";
        let [system, user, assistant, _] = ChatTemplate::from_source(mixed).unwrap().forms;
        assert_eq!((system, user, assistant), (ContentForm::Text, ContentForm::Parts, ContentForm::Parts));
    }
}
