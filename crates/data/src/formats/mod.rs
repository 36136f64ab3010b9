//! Parser of one JSON row, in any supported format, into a [`Sample`].
//!
//! The columns of a row determine its format, in the order of [`FORMATS`]; a file may mix formats. Every format accepts the same
//! additional columns, unless [`ColumnNames`] gives other names:
//!
//! | columns | meaning |
//! | --- | --- |
//! | `image`, `images`, `video`, `videos`, `audio`, `audios` | a path, or a list of paths, one per placeholder; an entry may be an object with `path` (or the kind's name) and its own options |
//! | `video` as a list of lists, or as a list of still images | clips given as frames |
//! | `fps`, `nframes`, `min_frames`, `max_frames`, `min_pixels`, `max_pixels`, `total_pixels`, `resized_height`, `resized_width`, `video_start`, `video_end` | options for every medium of the row; `video_start` and `video_end` (seconds) select the same part of the sound |
//! | `meta` with `frame_cnts`, `min_frames`, `max_frames`, `dynamic_sample` | the clip's segments (a list of such objects for several clips) |
//! | `solution`, else `answer`, `ground_truth`, `reward_model.ground_truth` (verl), `answers`, the final assistant turn, `label` (OpenRLHF, slime) | the ground truth, verbatim; of a list of texts, any is right |
//! | `completions` (texts, or objects with `text`, `completion_ids`, `logprobs`), or `completion_ids` and `logprobs`; `rewards` | recorded completions |
//! | `completion` | the target of `sft`, a text or messages; it takes precedence over a final assistant turn |
//! | `tools` | the tools that the prompt describes: a list of objects in the format of OpenAI, or the same as JSON in a text |
//! | `row` beside `completions` | the original row of the completions, as written by evaluations and rollout logs |
//! | `options`, `choices`, or `A`, `B`, … | choices, which become part of the question if it does not contain them ([`choices`]) |
//! | `system` | system turn of a conversation that has none |
//! | `path` beside `data_type` | a medium of the kind that `data_type` names: Video-R1 |
//!
//! A conversation, a list of media or of choices may also be a text with the same in JSON, as tables without nested columns
//! store it. Columns that no reader uses are compared with media ([`unread`]).
//!
//! In plain text of user turns, `<image>`, `<video>` and `<audio>` mark the positions of media. In a conversation with typed
//! parts, text is literal, and a part without a path takes the next medium of the columns. Media without a placeholder go before
//! the text of the first user turn. If sound is mentioned but not listed, the sound of the videos is used. Assistant turns before
//! the first user turn are dropped, as in the original loaders.

mod choices;
mod looks;
mod media;
pub(crate) mod outputs;
mod recorded;

pub(crate) use looks::{is_base64, kind_of_extension};
pub(crate) use media::make_absolute;

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use omnigrpo_guard::Setting;
use omnigrpo_text::{MediumKind, Part, Role, ToolCall, Turn};
use serde_json::{Map, Value, json};

use crate::accepted::of_answers;
use crate::dataset::ColumnNames;
use crate::error::{DataError, PROMPT, QUESTION, RowProblem, describe, shorten};
use crate::question::QuestionTemplate;
use crate::roots::Resolver;
use crate::sample::{MediumRef, Origin, Reference, Sample, Think, renumbered};
use crate::tables;

/// Entry of the table of row formats.
#[derive(Debug)]
pub struct Format {
    /// Name for the `format` key of a registry.
    pub name: &'static str,
    /// Columns that identify the format; one of them is enough.
    pub columns: &'static [&'static str],
    /// Content of the column and programs that write such files.
    pub doc: &'static str,
    turns: fn(&Value, &str) -> Result<Vec<RawTurn>, RowProblem>,
}

/// All row formats, in the order in which they are tried.
pub const FORMATS: &[Format] = &[
    Format {
        name: "conversations",
        columns: &["conversations"],
        doc: "list of {from: human|gpt|system, value} or {role, content}: LLaVA, qwen-vl-finetune, R1-Omni, VLM-R1",
        turns: conversation,
    },
    Format {
        name: "messages",
        columns: &["messages"],
        doc: "list of {role, content}, content a text or typed parts [{type: image, image: path}, {type: text, text}]: OpenAI, TRL",
        turns: conversation,
    },
    Format {
        name: "prompt",
        columns: &["prompt"],
        doc: "a text, or a list of messages without the answer: TRL; an answer for sft may be in `completion`",
        turns: text_or_conversation,
    },
    Format {
        name: "question",
        columns: &["question", "problem"],
        doc: "a text: R1-V and VQA lists",
        turns: text_or_conversation,
    },
];

impl Format {
    /// Returns the format with this name.
    ///
    /// # Errors
    /// Returns [`DataError::UnknownName`] if the format is unknown.
    pub fn named(name: &str) -> Result<&'static Self, DataError> {
        let names = FORMATS.iter().map(|format| format.name);
        FORMATS
            .iter()
            .find(|format| format.name == name)
            .ok_or_else(|| DataError::unknown_name("dataset format", name, names))
    }
}

/// Values shared by all rows of an annotation file.
pub(crate) struct Context<'a> {
    pub(crate) dataset: &'a Arc<str>,
    pub(crate) file: &'a Arc<Path>,
    pub(crate) resolver: &'a Resolver,
    pub(crate) format: Option<&'static Format>,
    pub(crate) template: &'static QuestionTemplate,
    pub(crate) think: Think,
    pub(crate) columns: &'a Map<String, Value>,
    pub(crate) names: &'a ColumnNames,
    /// Question of a row that has none.
    pub(crate) question: Option<&'a str>,
    pub(crate) use_audio_in_video: bool,
    pub(crate) empty_questions: bool,
    pub(crate) continue_text_prompts: bool,
}

/// Turn as it appears in the row.
struct RawTurn {
    role: Role,
    content: Content,
    calls: Vec<ToolCall>,
}

impl RawTurn {
    fn text(role: Role, text: &str) -> Self {
        Self { role, content: Content::Text(text.to_owned()), calls: Vec::new() }
    }
}

enum Content {
    Text(String),
    Typed(Vec<RawPart>),
}

enum RawPart {
    Text(String),
    /// Medium with its own file and options, or with `None` for the next medium of the row's columns.
    Medium {
        kind: MediumKind,
        own: Option<Map<String, Value>>,
    },
}

/// Returns the columns of a row, with those that the context adds.
fn columns_of(value: Value, context: &Context) -> Result<Map<String, Value>, RowProblem> {
    let Value::Object(columns) = value else { return Err(column("(the row)", &value, "an object")) };
    let mut columns = outputs::unfold(columns);
    if tables::is_metadata(context.file) {
        columns = tables::rename_files(columns);
    }
    for (name, value) in context.columns {
        if !columns.contains_key(name) {
            columns.insert(name.clone(), value.clone());
        }
    }
    Ok(columns)
}

/// Returns the system turn of the column `system`, unless the conversation has one.
fn system(columns: &Map<String, Value>, raw: &[RawTurn]) -> Result<Option<RawTurn>, RowProblem> {
    let Some(system) = present(columns, "system") else { return Ok(None) };
    // Many tables have an empty text where the model's own system turn is meant.
    let is_empty = system.as_str().is_some_and(|text| text.trim().is_empty());
    if is_empty || raw.iter().any(|turn| turn.role == Role::System) {
        return Ok(None);
    }
    let text = system.as_str().ok_or_else(|| column("system", system, "a text"))?;
    Ok(Some(RawTurn::text(Role::System, text)))
}

fn roles(of: impl Iterator<Item = Role>) -> String {
    of.map(|role| role.as_str()).collect::<Vec<_>>().join(", ")
}

/// Parses one row.
pub(crate) fn sample(value: Value, row: u64, line: u64, context: &Context) -> Result<Sample, RowProblem> {
    let columns = columns_of(value, context)?;
    let mut raw = raw_turns(&columns, context)?;
    let first = raw.iter().position(|turn| turn.role != Role::Assistant).unwrap_or(0);
    raw.drain(..first);
    let mut joined = Vec::new();
    if let Some(system) = system(&columns, &raw)? {
        raw.insert(0, system);
        joined.push("system");
    }
    let final_turn = match raw.last() {
        Some(turn) if turn.role == Role::Assistant => raw.pop().map(spoken).transpose()?,
        _ => None,
    };
    let completion = completion(&columns, context)?;
    if raw.last().is_none_or(|turn| !matches!(turn.role, Role::User | Role::Tool)) {
        return Err(RowProblem::NoPrompt {
            missing: "question",
            roles: roles(raw.iter().map(|turn| turn.role)),
        });
    }

    let is_text = is_text(&raw, &columns, context.names);
    let (mut turns, media) = media::place(raw, &columns, context)?;
    let said = turns.last().into_iter().flat_map(|turn| &turn.parts).any(|part| match part {
        Part::Text(text) => !text.trim().is_empty(),
        Part::Medium { .. } | Part::Call(_) => true,
    });
    if !said && !context.empty_questions {
        let roles = roles(turns.iter().map(|turn| turn.role));
        return Err(RowProblem::NoPrompt { missing: "text or medium in its last turn", roles });
    }
    if let Some(question) = turns.iter_mut().rfind(|turn| turn.role == Role::User)
        && let Some(choices) = choices::missing(&columns, || question.written())
    {
        append(question, &choices);
        joined.push("choices");
    }
    if let Some(last) = turns.last_mut() {
        context.template.apply(last);
    }

    // If a completion was chosen for a row that already has an answer, the answer stays the ground truth.
    let (completion, later_media) = completion;
    let truth = final_turn.as_ref().or(completion.last()).map(Turn::written);
    let (solution, solution_from) = ground_truth(&columns, context.names, truth.as_deref());
    let reference = match final_turn {
        Some(last) if completion.is_empty() => Reference { from: 0, later: vec![last], media: Vec::new() },
        _ => Reference {
            from: turns.len(),
            later: completion.iter().map(|turn| renumbered(turn, &media)).collect(),
            media: later_media,
        },
    };
    let tools = tools(&columns)?;
    let is_text = context.continue_text_prompts && is_text && media.is_empty() && tools.is_none();
    let id = id(&columns).unwrap_or_else(|| format!("{}:{line}", context.dataset));
    let completions = recorded::completions(&columns, context)?;
    let rewards = completions.as_ref().map_or(Ok(None), |all| recorded::rewards(&columns, all.len()))?;
    Ok(Sample {
        id,
        row,
        dataset: context.dataset.clone(),
        origin: Origin { file: context.file.clone(), line },
        turns,
        media,
        solution,
        solution_from,
        reference,
        joined,
        is_text,
        tools,
        columns,
        think: context.think,
        completions,
        rewards,
    })
}

/// Returns true if the whole conversation is the text of the column `prompt`.
fn is_text(raw: &[RawTurn], columns: &Map<String, Value>, names: &ColumnNames) -> bool {
    let name = names.prompt.as_deref().unwrap_or("prompt");
    let text = inside(columns, name).and_then(Value::as_str);
    matches!(raw, [RawTurn { role: Role::User, content: Content::Text(own), .. }] if Some(own.as_str()) == text)
}

/// Name of the source of a ground truth that is the final assistant turn.
const FINAL_TURN: &str = "(the final turn)";

/// Returns the ground truth and its source. Explicit columns take precedence over the final assistant turn, which may be a whole
/// worked answer. `label` comes last, because in rows with an answer it often has another meaning.
fn ground_truth(
    columns: &Map<String, Value>,
    names: &ColumnNames,
    final_turn: Option<&str>,
) -> (Option<String>, Option<Arc<str>>) {
    const BEFORE: [&str; 4] = ["solution", "answer", "ground_truth", "reward_model.ground_truth"];
    const ACCEPTED: &str = "answers";
    let of_column = |name: &str| inside(columns, name).map(|value| (verbatim(value), Arc::from(name)));
    let accepted = || Some((of_answers(present(columns, ACCEPTED)?)?, Arc::from(ACCEPTED)));
    let found = match &names.solution {
        Some(name) if name == ACCEPTED => accepted(),
        Some(name) => of_column(name),
        None => BEFORE
            .into_iter()
            .find_map(of_column)
            .or_else(accepted)
            .or_else(|| final_turn.map(|text| (text.to_owned(), Arc::from(FINAL_TURN))))
            .or_else(|| of_column("label")),
    };
    found.unzip()
}

/// Returns the value of a column, or of `a.b` inside an object; `None` if it is missing or null.
pub(crate) fn inside<'a>(columns: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    present(columns, name).or_else(|| {
        let (first, rest) = name.split_once('.')?;
        inside(columns.get(first)?.as_object()?, rest)
    })
}

/// Returns the id column of the row.
pub(crate) fn id(columns: &Map<String, Value>) -> Option<String> {
    ["id", "question_id"].iter().find_map(|name| {
        columns.get(*name).filter(|value| value.is_string() || value.is_number()).map(verbatim)
    })
}

fn column(name: impl Into<String>, got: &Value, expected: &'static str) -> RowProblem {
    RowProblem::Column { column: name.into(), got: describe(got), expected }
}

/// Returns text unchanged and any other value as JSON.
fn verbatim(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn present<'a>(columns: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    columns.get(name).filter(|value| !value.is_null())
}

fn raw_turns(columns: &Map<String, Value>, context: &Context) -> Result<Vec<RawTurn>, RowProblem> {
    if let Some(name) = &context.names.prompt {
        let value = inside(columns, name).ok_or_else(|| RowProblem::UnknownFormat {
            columns: shorten(&columns.keys().cloned().collect::<Vec<_>>().join(", ")),
            expected: format!("{name} ({PROMPT})"),
        })?;
        return text_or_conversation(value, name);
    }
    match prompt_of(columns, context) {
        Some((format, name, value)) => (format.turns)(value, name),
        None if context.question.is_some() => {
            text_or_conversation(&context.question.unwrap_or_default().into(), "question")
        }
        None => Err(RowProblem::UnknownFormat {
            columns: shorten(&columns.keys().cloned().collect::<Vec<_>>().join(", ")),
            expected: format!(
                "{}; {QUESTION} asks one question of all rows that have none",
                formats(context)
                    .iter()
                    .flat_map(|format| format.columns)
                    .copied()
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        }),
    }
}

/// Returns the formats that a row may have.
fn formats(context: &Context) -> &'static [Format] {
    context.format.map_or(FORMATS, std::slice::from_ref)
}

/// Returns the format of a row, with the name and the value of its prompt.
fn prompt_of<'a>(
    columns: &'a Map<String, Value>,
    context: &Context,
) -> Option<(&'static Format, &'static str, &'a Value)> {
    let names =
        formats(context).iter().flat_map(|format| format.columns.iter().map(move |name| (format, *name)));
    names.into_iter().find_map(|(format, name)| Some((format, name, present(columns, name)?)))
}

/// Columns that have a meaning of their own and contain no medium of the prompt.
const PLAIN: [&str; 10] = [
    "id",
    "question_id",
    "data_type",
    "system",
    "tools",
    "solution",
    "answer",
    "ground_truth",
    "reward_model",
    "completion",
];

/// A column that no reader uses and that looks like media.
pub(crate) struct Unread {
    /// Name of the column, with dots into objects.
    pub(crate) column: String,
    pub(crate) kind: MediumKind,
    /// Setting that would read it.
    pub(crate) setting: Setting,
}

/// Returns the columns of a row that no reader uses and that look like media.
pub(crate) fn unread(row: Value, context: &Context) -> Vec<Unread> {
    let Ok(columns) = columns_of(row, context) else { return Vec::new() };
    let (names, root) = (context.names, |name: &str| name.split('.').next().unwrap_or(name).to_owned());
    let mut read: Vec<String> = PLAIN.into_iter().chain(outputs::RECORDED).map(str::to_owned).collect();
    read.extend(names.solution.as_deref().map(root));
    match &names.prompt {
        Some(name) => read.push(root(name)),
        None => read.extend(prompt_of(&columns, context).map(|(_, name, _)| name.to_owned())),
    }
    for kind in MediumKind::ALL {
        let found = media::columns_of(kind, &columns, context);
        read.extend(found.into_iter().map(|(name, _)| root(&name)));
    }
    let unread = columns.iter().filter(|(name, _)| !read.contains(name));
    unread
        .filter_map(|(name, value)| {
            let look = looks::medium(value)?;
            let setting = if look.in_message { PROMPT } else { ColumnNames::setting(look.kind) };
            let keys = look.keys.iter().map(String::as_str);
            let column = std::iter::once(name.as_str()).chain(keys).collect::<Vec<_>>().join(".");
            Some(Unread { column, kind: look.kind, setting })
        })
        .collect()
}

/// Appends text to a turn, after its last part.
fn append(turn: &mut Turn, text: &str) {
    match turn.parts.last_mut() {
        Some(Part::Text(last)) => last.push_str(text),
        _ => turn.parts.push(Part::Text(text.trim_start().to_owned())),
    }
}

/// Returns a list of objects that is stored as JSON text, and any other value unchanged. An object of the list has one of `keys`. A
/// text that begins and ends like such a list must be JSON.
fn unfolded<'a>(value: &'a Value, name: &str, keys: [&str; 2]) -> Result<Cow<'a, Value>, RowProblem> {
    let unchanged = Ok(Cow::Borrowed(value));
    let Value::String(text) = value else { return unchanged };
    let text = text.trim();
    let Some(first) = text.strip_prefix('[').and_then(|rest| rest.trim_start().strip_prefix('{')) else {
        return unchanged;
    };
    match serde_json::from_str::<Value>(text) {
        Ok(list)
            if list
                .as_array()
                .is_some_and(|list| list.iter().all(|one| keys.iter().any(|key| one.get(key).is_some()))) =>
        {
            Ok(Cow::Owned(list))
        }
        Err(_) if text.ends_with(']') => {
            let first = first.trim_start().trim_start_matches(['"', '\'']);
            match keys
                .iter()
                .any(|key| first.strip_prefix(key).is_some_and(|rest| rest.starts_with(['"', '\''])))
            {
                true => Err(column(
                    name,
                    value,
                    "a list of messages, or the same as JSON in a text (`json.dumps` of Python writes it, `str` does not)",
                )),
                false => unchanged,
            }
        }
        _ => unchanged,
    }
}

/// Keys of a message that tell who speaks.
const SPEAKERS: [&str; 2] = ["role", "from"];

/// Keys of a typed part of a message.
const PARTS: [&str; 2] = ["type", "text"];

fn text_or_conversation(value: &Value, name: &str) -> Result<Vec<RawTurn>, RowProblem> {
    match &*unfolded(value, name, SPEAKERS)? {
        Value::String(text) => Ok(vec![RawTurn::text(Role::User, text)]),
        value @ Value::Array(_) => conversation(value, name),
        other => Err(column(name, other, "a text or a list of messages")),
    }
}

fn conversation(value: &Value, name: &str) -> Result<Vec<RawTurn>, RowProblem> {
    let value = &*unfolded(value, name, SPEAKERS)?;
    let Value::Array(list) = value else { return Err(column(name, value, "a list of turns")) };
    list.iter().enumerate().map(|(index, value)| turn(value, &format!("{name}[{index}]"))).collect()
}

fn turn(value: &Value, place: &str) -> Result<RawTurn, RowProblem> {
    const EXPECTED: &str = "an object with `from` and `value`, or with `role` and `content`";
    let Value::Object(map) = value else { return Err(column(place, value, EXPECTED)) };
    let (who, what) = match (map.get("from"), map.get("value"), map.get("role"), map.get("content")) {
        (Some(who), Some(what), ..) | (_, _, Some(who), Some(what)) => (who, what),
        // A message that only calls tools may have no content.
        (_, _, Some(who), None) if map.contains_key("tool_calls") => (who, &Value::Null),
        _ => return Err(column(place, value, EXPECTED)),
    };
    let role = match who.as_str() {
        Some("human" | "user") => Role::User,
        Some("gpt" | "assistant" | "model") => Role::Assistant,
        Some("system") => Role::System,
        Some("tool" | "observation") => Role::Tool,
        _ => {
            let expected = "human, user, gpt, assistant, model, system, tool or observation";
            return Err(column(format!("{place}.role"), who, expected));
        }
    };
    let given = map.get("tool_calls").filter(|calls| role == Role::Assistant && !calls.is_null());
    let calls = given.map_or(Ok(Vec::new()), |calls| tool_calls(calls, &format!("{place}.tool_calls")))?;
    let parts = match role {
        Role::Assistant => Cow::Borrowed(what),
        _ => unfolded(what, &format!("{place}.content"), PARTS)?,
    };
    let content = match &*parts {
        Value::String(text) => Content::Text(text.clone()),
        Value::Null if !calls.is_empty() => Content::Text(String::new()),
        // VLM-R1 stores boxes and numbers in answers as JSON.
        other if role == Role::Assistant && !is_parts(other) => Content::Text(other.to_string()),
        Value::Array(list) => {
            let part = |(index, value)| part(value, &format!("{place}.content[{index}]"));
            Content::Typed(list.iter().enumerate().map(part).collect::<Result<_, _>>()?)
        }
        other => return Err(column(format!("{place}.content"), other, "a text or a list of parts")),
    };
    Ok(RawTurn { role, content, calls })
}

/// Returns the calls of tools in a message.
fn tool_calls(calls: &Value, place: &str) -> Result<Vec<ToolCall>, RowProblem> {
    const EXPECTED: &str = "a list of {function: {name, arguments}}";
    let wrong = || column(place, calls, EXPECTED);
    let call = |call: &Value| {
        let call = call.get("function").unwrap_or(call);
        let name = call.get("name").and_then(Value::as_str).ok_or_else(wrong)?.to_owned();
        let arguments = match call.get("arguments") {
            // OpenAI writes the arguments as a string of JSON.
            Some(Value::String(inner)) => serde_json::from_str(inner).map_err(|_| wrong())?,
            Some(Value::Object(arguments)) => arguments.clone(),
            None | Some(Value::Null) => Map::new(),
            Some(_) => return Err(wrong()),
        };
        Ok(ToolCall { name, arguments })
    };
    calls.as_array().ok_or_else(wrong)?.iter().map(call).collect()
}

/// Returns the column `tools`: a list of tools, each an object or its JSON, or the JSON of the list (TRL, ms-swift). A tool without
/// `function` is the description of a function.
fn tools(columns: &Map<String, Value>) -> Result<Option<Vec<Value>>, RowProblem> {
    const EXPECTED: &str = "a list of {type: function, function: {name, description, parameters}}";
    let Some(given) = present(columns, "tools") else { return Ok(None) };
    let wrong = || column("tools", given, EXPECTED);
    let read = |value: &Value| match value {
        Value::String(text) => serde_json::from_str(text).map_err(|_| wrong()),
        other => Ok(other.clone()),
    };
    let tool = |value: &Value| {
        let tool = read(value)?;
        let function = tool.get("function").unwrap_or(&tool);
        function.get("name").filter(|name| name.is_string()).ok_or_else(wrong)?;
        Ok(match tool.get("function") {
            Some(_) => tool,
            None => json!({ "type": "function", "function": tool }),
        })
    };
    read(given)?.as_array().ok_or_else(wrong)?.iter().map(tool).collect::<Result<_, _>>().map(Some)
}

fn is_parts(value: &Value) -> bool {
    value
        .as_array()
        .is_some_and(|list| list.iter().any(|part| part.get("type").is_some() || part.get("text").is_some()))
}

fn part(value: &Value, place: &str) -> Result<RawPart, RowProblem> {
    const EXPECTED: &str = "a text, {type: text, text} or {type: image|video|audio, …}";
    let map = match value {
        Value::String(text) => return Ok(RawPart::Text(text.clone())),
        Value::Object(map) => map,
        other => return Err(column(place, other, EXPECTED)),
    };
    let named = map.get("type").and_then(Value::as_str);
    let kind = MediumKind::ALL.into_iter().find(|kind| match named {
        Some(named) => named.strip_suffix("_url").unwrap_or(named) == kind.as_str(),
        None => map.contains_key(kind.as_str()) || map.contains_key(&format!("{kind}_url")),
    });
    match (kind, map.get("text")) {
        (Some(kind), _) => {
            let own = media::own_source(map, kind).is_some().then(|| map.clone());
            Ok(RawPart::Medium { kind, own })
        }
        (None, Some(Value::String(text))) if matches!(named, None | Some("text")) => {
            Ok(RawPart::Text(text.clone()))
        }
        _ => Err(column(place, value, EXPECTED)),
    }
}

/// Returns a turn that must not contain media.
fn spoken(turn: RawTurn) -> Result<Turn, RowProblem> {
    let RawTurn { role, content, calls } = turn;
    let raw = match content {
        Content::Text(text) => vec![RawPart::Text(text)],
        Content::Typed(parts) => parts,
    };
    let part = |part| match part {
        RawPart::Text(text) => Ok(Part::Text(text)),
        RawPart::Medium { kind, .. } => Err(spoken_medium(role, kind)),
    };
    let calls = calls.into_iter().map(|call| Ok(Part::Call(call)));
    Ok(Turn { role, parts: raw.into_iter().map(part).chain(calls).collect::<Result<_, _>>()? })
}

fn spoken_medium(role: Role, kind: MediumKind) -> RowProblem {
    RowProblem::Column {
        column: format!("(the {} turn of an answer)", role.as_str()),
        got: format!("{kind} part"),
        expected: "text",
    }
}

/// Returns the column `completion`, in which TRL stores what answers a prompt, and its media. It may contain turns of a tool.
fn completion(
    columns: &Map<String, Value>,
    context: &Context,
) -> Result<(Vec<Turn>, Vec<MediumRef>), RowProblem> {
    let found =
        present(columns, "completion").map(|value| unfolded(value, "completion", SPEAKERS)).transpose()?;
    match found.as_deref() {
        None => Ok((Vec::new(), Vec::new())),
        Some(Value::String(text)) => Ok((vec![Turn::text(Role::Assistant, text.clone())], Vec::new())),
        Some(value) => {
            let raw = conversation(value, "completion")?;
            match [raw.first(), raw.last()].map(|turn| turn.map(|turn| turn.role)) {
                [Some(Role::Assistant), Some(Role::Assistant)] => media::place_own(raw, context),
                _ => Err(column(
                    "completion",
                    value,
                    "a text, or messages that begin and end with an assistant turn",
                )),
            }
        }
    }
}
