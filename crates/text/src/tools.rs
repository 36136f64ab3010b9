//! Tools in a conversation: how a system turn describes them, and how the calls in a completion are read.
//!
//! A checkpoint whose template writes `tools` describes them in its own words. For any other checkpoint, the system turn does, in
//! the format of Hermes and Qwen2.5, and an answer is a user turn between `<tool_response>` tags.
//!
//! Two formats of calls are read: JSON (Hermes, Qwen2.5, Qwen3, Qwen3-VL) and tags (Qwen3-Coder, Qwen3.5). The text between the
//! tags of a call shows which one it is.

use std::fmt;

use serde_json::{Map, Value};

use crate::template::python_json;

/// Call of a tool in a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// Arguments by name.
    pub arguments: Map<String, Value>,
}

impl fmt::Display for ToolCall {
    /// Formats the call as Hermes and Qwen2.5 write it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, arguments) = (&self.name, Value::Object(self.arguments.clone()));
        let [open, close] = CALL;
        write!(f, "{open}\n{{\"name\": \"{name}\", \"arguments\": {}}}\n{close}", python_json(&arguments))
    }
}

const CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];
/// Maximum number of characters of a text that an error repeats.
const SHOWN: usize = 80;

/// Returns the calls in a turn of the model, in order. A call that cannot be read is replaced by a description of the problem, for
/// the model to read. Calls in a thinking part, which ends with `</think>`, do not count.
pub fn tool_calls(text: &str) -> Vec<Result<ToolCall, String>> {
    let said = text.rsplit_once("</think>").map_or(text, |(_, said)| said);
    let mut calls = Vec::new();
    let mut rest = said;
    while let Some((_, after)) = rest.split_once(CALL[0]) {
        let Some((call, after)) = after.split_once(CALL[1]) else {
            calls.push(Err(format!("the call {} has no {}", shown(after), CALL[1])));
            break;
        };
        calls.push(one_call(call.trim()));
        rest = after;
    }
    calls
}

/// Splits a turn of the model into the text before its calls, and the calls. If there are none, or one of them cannot be read, the
/// text is the whole turn.
pub fn split_calls(text: &str) -> (&str, Vec<ToolCall>) {
    let calls: Result<Vec<_>, _> = tool_calls(text).into_iter().collect();
    let calls = calls.unwrap_or_default();
    let thought = text.rfind("</think>").unwrap_or(0);
    match text[thought..].find(CALL[0]) {
        Some(at) if !calls.is_empty() => (&text[..thought + at], calls),
        _ => (text, Vec::new()),
    }
}

fn one_call(text: &str) -> Result<ToolCall, String> {
    if text.starts_with("<function") { tagged_call(text) } else { json_call(text) }
}

fn json_call(text: &str) -> Result<ToolCall, String> {
    const EXPECTED: &str = "expected {\"name\": …, \"arguments\": {…}}";
    let call: Value = serde_json::from_str(text)
        .map_err(|e| format!("the call {} is not JSON ({e}); {EXPECTED}", shown(text)))?;
    let Some(name) = call["name"].as_str() else {
        return Err(format!("the call {} has no name; {EXPECTED}", shown(text)));
    };
    let arguments = match &call["arguments"] {
        Value::Object(arguments) => arguments.clone(),
        Value::Null => Map::new(),
        // Some models write the arguments as a string of JSON.
        Value::String(inner) => serde_json::from_str(inner)
            .map_err(|e| format!("the arguments {} are not a JSON object ({e}); {EXPECTED}", shown(inner)))?,
        other => {
            return Err(format!("the arguments {} are not an object; {EXPECTED}", shown(&other.to_string())));
        }
    };
    Ok(ToolCall { name: name.to_owned(), arguments })
}

/// Reads `<function=NAME><parameter=KEY>value</parameter>…</function>`. A value that is JSON is read as such, and any other as text.
fn tagged_call(text: &str) -> Result<ToolCall, String> {
    let wrong = || {
        format!(
            "the call {} cannot be read; expected <function=NAME><parameter=KEY>value</parameter></function>",
            shown(text)
        )
    };
    let (name, mut rest) = text
        .strip_prefix("<function=")
        .and_then(|text| text.strip_suffix("</function>"))
        .and_then(|text| text.split_once('>'))
        .ok_or_else(wrong)?;
    let mut arguments = Map::new();
    while !rest.trim().is_empty() {
        let (key, value, after) = rest
            .trim_start()
            .strip_prefix("<parameter=")
            .and_then(|rest| rest.split_once('>'))
            .and_then(|(key, rest)| rest.split_once("</parameter>").map(|(value, after)| (key, value, after)))
            .ok_or_else(wrong)?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
        arguments.insert(key.trim().to_owned(), value);
        rest = after;
    }
    Ok(ToolCall { name: name.trim().to_owned(), arguments })
}

fn shown(text: &str) -> String {
    let text = text.trim();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("`{}…`", &text[..end]),
        None => format!("`{text}`"),
    }
}

/// Text that a system turn begins with if the conversation has none.
pub(crate) const DEFAULT_SYSTEM: &str = "You are a helpful assistant.";

/// Tags around an answer that is written as a user turn.
pub(crate) const RESPONSE: [&str; 2] = ["<tool_response>\n", "\n</tool_response>"];

/// Returns the description of tools at the end of a system turn, in the words on which Qwen2.5 was trained.
pub(crate) fn described(tools: &[Value]) -> String {
    let tools: String = tools.iter().map(|tool| python_json(tool) + "\n").collect();
    let [open, close] = CALL;
    format!(
        "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n\
         You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}</tools>\n\n\
         For each function call, return a json object with function name and arguments within {open}{close} XML tags:\n\
         {open}\n{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n{close}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn call(name: &str, arguments: &Value) -> Result<ToolCall, String> {
        Ok(ToolCall { name: name.to_owned(), arguments: arguments.as_object().cloned().unwrap_or_default() })
    }

    #[test]
    fn calls_of_every_format() {
        let zoom = json!({ "bbox_2d": [1, 2, 30, 40], "label": "a sign" });
        let json = format!("<tool_call>\n{}\n</tool_call>", json!({ "name": "zoom", "arguments": zoom }));
        let tags = "<tool_call>\n<function=zoom>\n<parameter=bbox_2d>\n[1, 2, 30, 40]\n</parameter>\n<parameter=label>\na \
                    sign\n</parameter>\n</function>\n</tool_call>";
        assert_eq!(tool_calls(&json), [call("zoom", &zoom)]);
        assert_eq!(tool_calls(tags), [call("zoom", &zoom)]);
        let both = format!("First.{json} Then {tags}.");
        assert_eq!(tool_calls(&both), [call("zoom", &zoom), call("zoom", &zoom)]);
        // Arguments as a string, and none.
        let string = json!({ "name": "zoom", "arguments": zoom.to_string() });
        assert_eq!(tool_calls(&format!("<tool_call>{string}</tool_call>")), [call("zoom", &zoom)]);
        assert_eq!(tool_calls("<tool_call>{\"name\": \"now\"}</tool_call>"), [call("now", &json!({}))]);
        assert_eq!(tool_calls("<tool_call><function=now></function></tool_call>"), [call("now", &json!({}))]);
        // A call that the model only thinks about.
        assert_eq!(tool_calls(&format!("<think>{json}</think>It is 3.")), []);
        assert_eq!(tool_calls("It is 3."), []);
    }

    #[test]
    fn calls_are_split_from_the_text_before_them() {
        let call = "<tool_call>{\"name\": \"now\"}</tool_call>";
        let split = |text: &str| {
            let (said, calls) = split_calls(text);
            (said.to_owned(), calls.len())
        };
        assert_eq!(
            split(&format!("<think>{call}</think>Let me see. {call}{call}")),
            (format!("<think>{call}</think>Let me see. "), 2)
        );
        assert_eq!(split("It is 3."), ("It is 3.".to_owned(), 0));
        let broken = format!("{call}<tool_call>{{</tool_call>");
        assert_eq!(split(&broken), (broken.clone(), 0));
    }

    #[test]
    fn a_call_that_cannot_be_read_says_why() {
        let problem =
            |inner: &str| tool_calls(&format!("<tool_call>{inner}</tool_call>")).remove(0).unwrap_err();
        assert!(problem("{\"name\": \"zoom\"").contains("is not JSON"));
        assert!(problem("[1]").contains("has no name"));
        assert!(problem("{\"name\": \"zoom\", \"arguments\": [1]}").contains("`[1]` are not an object"));
        assert!(problem("<function=zoom>").contains("cannot be read"));
        assert!(problem("<function=zoom><parameter=a>1</function>").contains("cannot be read"));
        let open = tool_calls("<tool_call>{\"name\": \"zoom\"}");
        assert_eq!(open, [Err("the call `{\"name\": \"zoom\"}` has no </tool_call>".to_owned())]);
        // A long text is cut between characters.
        assert!(problem(&"ü".repeat(1000)).len() < 400);
    }
}
