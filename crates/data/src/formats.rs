//! One JSON row → [`Sample`], whatever the dialect.
//!
//! The format of a row is told by its columns, in the order of [`FORMATS`]; a file may mix formats. Around every format
//! the same columns are understood:
//!
//! | columns | meaning |
//! | --- | --- |
//! | `image`, `images`, `video`, `videos`, `audio`, `audios` | a path, or a list of paths, one per placeholder; an entry may be an object with `path` (or the kind's name) and options of its own |
//! | `video` as a list of lists, or as a list of still images | clips given as frames |
//! | `fps`, `nframes`, `min_frames`, `max_frames`, `min_pixels`, `max_pixels`, `total_pixels`, `resized_height`, `resized_width`, `video_start`, `video_end` | options for every medium of the row |
//! | `meta` with `frame_cnts`, `min_frames`, `max_frames`, `dynamic_sample` | the clip's segments (a list of such objects for several clips) |
//! | `solution`, else `answer`, else the final assistant turn | the ground truth, verbatim |
//! | `completions` (texts, or objects with `text`, `completion_ids`, `logprobs`), or `completion_ids` and `logprobs`; `rewards` | recorded completions |
//!
//! In plain text of user turns `<image>`, `<video>`, `<audio>` mark where media go. In a conversation with typed parts
//! text is literal, and parts without a path of their own take the next medium of the columns. Media that nothing mentions go before the text
//! of the first user turn. Assistant turns before the first user turn are dropped, as the source loaders do.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_text::{MediaCounts, MediumKind, Part, Role, Turn, split_conversation};
use serde_json::{Map, Value};

use crate::error::{DataError, PathProblem, RowProblem, describe, shorten};
use crate::question::QuestionTemplate;
use crate::roots::Resolver;
use crate::sample::{
    MediumOptions, MediumRef, MediumSource, Origin, RecordedCompletion, RecordedRewards, Sample, Segments,
    ThinkMode,
};

/// A row of the table of formats.
#[derive(Debug)]
pub struct Format {
    /// What a registry's `format` key calls it.
    pub name: &'static str,
    /// Columns of which one tells the format.
    pub columns: &'static [&'static str],
    /// What the column holds and who writes such files.
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
        doc: "a text, or a list of messages without the answer: TRL; an answer for sft may stand in `completion`",
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
    /// The format of that name.
    ///
    /// # Errors
    /// [`DataError::UnknownName`].
    pub fn named(name: &str) -> Result<&'static Self, DataError> {
        let names = FORMATS.iter().map(|format| format.name);
        FORMATS
            .iter()
            .find(|format| format.name == name)
            .ok_or_else(|| DataError::unknown_name("dataset format", name, names))
    }
}

/// What the rows of one annotation file have in common.
pub(crate) struct Context<'a> {
    pub(crate) dataset: &'a Arc<str>,
    pub(crate) file: &'a Arc<Path>,
    pub(crate) resolver: &'a Resolver,
    pub(crate) format: Option<&'static Format>,
    pub(crate) template: &'static QuestionTemplate,
    pub(crate) think: ThinkMode,
    pub(crate) columns: &'a Map<String, Value>,
}

/// A turn as it stands in the row.
struct RawTurn {
    role: Role,
    content: Content,
}

enum Content {
    Text(String),
    Typed(Vec<RawPart>),
}

enum RawPart {
    Text(String),
    /// With its own file and options, or (`None`) the next one of the row's columns.
    Medium {
        kind: MediumKind,
        own: Option<Map<String, Value>>,
    },
}

const KINDS: [MediumKind; 3] = [MediumKind::Image, MediumKind::Video, MediumKind::Audio];

/// Position in [`KINDS`].
fn slot(kind: MediumKind) -> usize {
    match kind {
        MediumKind::Image => 0,
        MediumKind::Video => 1,
        MediumKind::Audio => 2,
    }
}

/// Parses one row.
pub(crate) fn sample(value: Value, row: u64, line: u64, context: &Context) -> Result<Sample, RowProblem> {
    let mut columns = match value {
        Value::Object(columns) => columns,
        other => return Err(column("(the row)", &other, "an object")),
    };
    for (name, value) in context.columns {
        if !columns.contains_key(name) {
            columns.insert(name.clone(), value.clone());
        }
    }

    let mut raw = raw_turns(&columns, context.format)?;
    let first = raw.iter().position(|turn| turn.role != Role::Assistant).unwrap_or(0);
    raw.drain(..first);
    let reference_answer = match raw.last() {
        Some(turn) if turn.role == Role::Assistant => raw.pop().map(answer).transpose()?,
        _ => completion(&columns)?,
    };
    let roles = || raw.iter().map(|turn| turn.role.as_str()).collect::<Vec<_>>().join(", ");
    if raw.last().is_none_or(|turn| turn.role != Role::User) {
        return Err(RowProblem::NoPrompt { missing: "question", roles: roles() });
    }

    let (mut turns, media) = place_media(raw, &columns, context.resolver)?;
    let said = turns.last().into_iter().flat_map(|turn| &turn.parts).any(|part| match part {
        Part::Text(text) => !text.trim().is_empty(),
        Part::Medium { .. } => true,
    });
    if !said {
        let roles = turns.iter().map(|turn| turn.role.as_str()).collect::<Vec<_>>().join(", ");
        return Err(RowProblem::NoPrompt { missing: "text and no medium in its last turn", roles });
    }
    if let Some(last) = turns.last_mut() {
        context.template.apply(last);
    }

    let solution = ["solution", "answer"]
        .iter()
        .find_map(|name| columns.get(*name).filter(|value| !value.is_null()).map(verbatim))
        .or_else(|| reference_answer.clone());
    let id = ["id", "question_id"]
        .iter()
        .find_map(|name| {
            columns.get(*name).filter(|value| value.is_string() || value.is_number()).map(verbatim)
        })
        .unwrap_or_else(|| format!("{}:{line}", context.dataset));
    let completions = completions(&columns)?;
    let rewards = match &completions {
        Some(completions) => rewards(&columns, completions.len())?,
        None => None,
    };
    Ok(Sample {
        id,
        row,
        dataset: context.dataset.clone(),
        origin: Origin { file: context.file.clone(), line },
        turns,
        media,
        solution,
        reference_answer,
        columns,
        think: context.think,
        completions,
        rewards,
    })
}

fn column(name: impl Into<String>, got: &Value, expected: &'static str) -> RowProblem {
    RowProblem::Column { column: name.into(), got: describe(got), expected }
}

/// Text as it is, anything else as JSON.
fn verbatim(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn present<'a>(columns: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    columns.get(name).filter(|value| !value.is_null())
}

// ---- turns ----

fn raw_turns(
    columns: &Map<String, Value>,
    forced: Option<&'static Format>,
) -> Result<Vec<RawTurn>, RowProblem> {
    let formats = match forced {
        Some(format) => std::slice::from_ref(format),
        None => FORMATS,
    };
    let found = formats
        .iter()
        .flat_map(|format| format.columns.iter().map(move |name| (format, *name)))
        .find_map(|(format, name)| Some((format, name, present(columns, name)?)));
    match found {
        Some((format, name, value)) => (format.turns)(value, name),
        None => Err(RowProblem::UnknownFormat {
            columns: shorten(&columns.keys().cloned().collect::<Vec<_>>().join(", ")),
            expected: formats
                .iter()
                .flat_map(|format| format.columns)
                .copied()
                .collect::<Vec<_>>()
                .join(", "),
        }),
    }
}

fn text_or_conversation(value: &Value, name: &str) -> Result<Vec<RawTurn>, RowProblem> {
    match value {
        Value::String(text) => Ok(vec![RawTurn { role: Role::User, content: Content::Text(text.clone()) }]),
        Value::Array(_) => conversation(value, name),
        other => Err(column(name, other, "a text or a list of messages")),
    }
}

fn conversation(value: &Value, name: &str) -> Result<Vec<RawTurn>, RowProblem> {
    let Value::Array(list) = value else { return Err(column(name, value, "a list of turns")) };
    list.iter().enumerate().map(|(index, value)| turn(value, &format!("{name}[{index}]"))).collect()
}

fn turn(value: &Value, place: &str) -> Result<RawTurn, RowProblem> {
    const EXPECTED: &str = "an object with `from` and `value`, or with `role` and `content`";
    let Value::Object(map) = value else { return Err(column(place, value, EXPECTED)) };
    let (who, what) = match (map.get("from"), map.get("value"), map.get("role"), map.get("content")) {
        (Some(who), Some(what), ..) | (_, _, Some(who), Some(what)) => (who, what),
        _ => return Err(column(place, value, EXPECTED)),
    };
    let role = match who.as_str() {
        Some("human" | "user") => Role::User,
        Some("gpt" | "assistant" | "model") => Role::Assistant,
        Some("system") => Role::System,
        _ => {
            return Err(column(format!("{place}.role"), who, "human, user, gpt, assistant, model or system"));
        }
    };
    let content = match what {
        Value::String(text) => Content::Text(text.clone()),
        // VLM-R1 keeps boxes and numbers of an answer as JSON.
        other if role == Role::Assistant && !is_parts(other) => Content::Text(other.to_string()),
        Value::Array(list) => {
            let part = |(index, value)| part(value, &format!("{place}.content[{index}]"));
            Content::Typed(list.iter().enumerate().map(part).collect::<Result<_, _>>()?)
        }
        other => return Err(column(format!("{place}.content"), other, "a text or a list of parts")),
    };
    Ok(RawTurn { role, content })
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
    let kind = KINDS.into_iter().find(|kind| match named {
        Some(named) => named.strip_suffix("_url").unwrap_or(named) == kind.as_str(),
        None => map.contains_key(kind.as_str()) || map.contains_key(&format!("{kind}_url")),
    });
    match (kind, map.get("text")) {
        (Some(kind), _) => {
            let own = own_source(map, kind).is_some().then(|| map.clone());
            Ok(RawPart::Medium { kind, own })
        }
        (None, Some(Value::String(text))) if matches!(named, None | Some("text")) => {
            Ok(RawPart::Text(text.clone()))
        }
        _ => Err(column(place, value, EXPECTED)),
    }
}

/// An answer without media.
fn answer(turn: RawTurn) -> Result<String, RowProblem> {
    match turn.content {
        Content::Text(text) => Ok(text),
        Content::Typed(parts) => parts
            .into_iter()
            .map(|part| match part {
                RawPart::Text(text) => Ok(text),
                RawPart::Medium { kind, .. } => Err(RowProblem::Column {
                    column: "(the final assistant turn)".to_owned(),
                    got: format!("{kind} part"),
                    expected: "text",
                }),
            })
            .collect(),
    }
}

/// TRL keeps the answer of a prompt in a column of its own.
fn completion(columns: &Map<String, Value>) -> Result<Option<String>, RowProblem> {
    match present(columns, "completion") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(value) => match conversation(value, "completion")?.pop() {
            Some(turn) if turn.role == Role::Assistant => answer(turn).map(Some),
            _ => Err(column("completion", value, "a text, or messages that end with an assistant turn")),
        },
    }
}

// ---- media ----

struct Item {
    kind: MediumKind,
    source: MediumSource,
    options: MediumOptions,
}

fn place_media(
    raw: Vec<RawTurn>,
    columns: &Map<String, Value>,
    resolver: &Resolver,
) -> Result<(Vec<Turn>, Vec<MediumRef>), RowProblem> {
    let mut listed = Vec::new();
    for kind in KINDS {
        listed.push(listed_media(kind, columns, resolver)?);
    }
    let counts = MediaCounts { images: listed[0].len(), videos: listed[1].len(), audios: listed[2].len() };

    let (turns, mut items) = if raw.iter().any(|turn| matches!(turn.content, Content::Typed(_))) {
        place_typed(raw, listed, resolver)?
    } else {
        let texts: Vec<_> = raw
            .into_iter()
            .map(|turn| match turn.content {
                Content::Text(text) => (turn.role, text),
                Content::Typed(_) => (turn.role, String::new()),
            })
            .collect();
        (split_conversation(&texts, counts)?, listed.into_iter().flatten().collect())
    };

    if !items.is_empty() {
        let row_options = options(columns, "")?;
        for item in &mut items {
            item.options = item.options.or(&row_options);
        }
    }
    let mut clips: Vec<_> = items.iter_mut().filter(|item| item.kind == MediumKind::Video).collect();
    for (index, segments) in segments(columns, clips.len())? {
        clips[index].options.segments = Some(segments);
    }
    let media =
        items.into_iter().map(|Item { kind, source, options }| MediumRef { kind, source, options }).collect();
    Ok((turns, media))
}

/// The media of a kind that the row's columns list.
fn listed_media(
    kind: MediumKind,
    columns: &Map<String, Value>,
    resolver: &Resolver,
) -> Result<Vec<Item>, RowProblem> {
    let (one, many) = (kind.as_str().to_owned(), format!("{kind}s"));
    let (name, value) = match (present(columns, &one), present(columns, &many)) {
        (Some(_), Some(value)) => {
            return Err(RowProblem::Column {
                column: many,
                got: format!("{} beside column `{one}`", describe(value)),
                expected: "only one of the two",
            });
        }
        (Some(value), None) => (one, value),
        (None, Some(value)) => (many, value),
        (None, None) => return Ok(Vec::new()),
    };
    match value {
        // How some lists say that a row has none.
        Value::String(text) if text.is_empty() => Ok(Vec::new()),
        Value::Array(list) if !(kind == MediumKind::Video && is_frames(list)) => list
            .iter()
            .enumerate()
            .map(|(index, value)| item(kind, value, &format!("{name}[{index}]"), resolver))
            .collect(),
        value => Ok(vec![item(kind, value, &name, resolver)?]),
    }
}

/// Whether a list of a clip names its frames and not several clips.
fn is_frames(list: &[Value]) -> bool {
    const STILL: [&str; 7] = ["png", "jpg", "jpeg", "bmp", "tif", "tiff", "webp"];
    let still = |value: &Value| {
        let extension =
            value.as_str().and_then(|text| Path::new(text).extension()?.to_str().map(str::to_lowercase));
        extension.is_some_and(|extension| STILL.contains(&extension.as_str()))
    };
    !list.is_empty() && list.iter().all(still)
}

/// Where a part or an entry of a list keeps its file: under its kind's name, OpenAI's `image_url`, or plainly.
fn own_source(map: &Map<String, Value>, kind: MediumKind) -> Option<&Value> {
    let names = [kind.as_str().to_owned(), format!("{kind}_url"), "path".to_owned(), "url".to_owned()];
    match names.iter().find_map(|name| present(map, name)).or_else(|| present(map, "bytes"))? {
        Value::Object(inner) => present(inner, "url").or_else(|| present(inner, "path")),
        value => Some(value),
    }
}

fn item(kind: MediumKind, value: &Value, place: &str, resolver: &Resolver) -> Result<Item, RowProblem> {
    const EXPECTED: &str = "a path, an object with `path`, or (video) a list of frame paths";
    let medium = |path: &str, problem| RowProblem::Medium { kind, path: shorten(path), problem };
    match value {
        Value::String(text) => {
            let source = resolver.source(kind, text).map_err(|problem| medium(text, problem))?;
            Ok(Item { kind, source, options: MediumOptions::default() })
        }
        Value::Array(list) if kind == MediumKind::Video && !list.is_empty() => {
            let frames = list
                .iter()
                .map(|value| match value {
                    Value::String(text) => resolver.path(kind, text).map_err(|problem| medium(text, problem)),
                    other => Err(column(place, other, EXPECTED)),
                })
                .collect::<Result<_, _>>()?;
            Ok(Item { kind, source: MediumSource::Frames(frames), options: MediumOptions::default() })
        }
        Value::Object(map) if present(map, "bytes").is_some() => {
            Err(medium(place, PathProblem::Unsupported { got: "bytes inside the row".to_owned() }))
        }
        Value::Object(map) => match own_source(map, kind) {
            Some(source @ (Value::String(_) | Value::Array(_))) => {
                let inner = item(kind, source, place, resolver)?;
                Ok(Item { options: options(map, place)?, ..inner })
            }
            _ => Err(column(place, value, EXPECTED)),
        },
        other => Err(column(place, other, EXPECTED)),
    }
}

fn place_typed(
    raw: Vec<RawTurn>,
    listed: Vec<Vec<Item>>,
    resolver: &Resolver,
) -> Result<(Vec<Turn>, Vec<Item>), RowProblem> {
    let mut open = [0usize; 3];
    for turn in &raw {
        if let Content::Typed(parts) = &turn.content {
            for part in parts {
                if let RawPart::Medium { kind, own: None } = part {
                    open[slot(*kind)] += 1;
                }
            }
        }
    }
    let mut unmentioned = Vec::new();
    let mut waiting: Vec<std::vec::IntoIter<Item>> = Vec::new();
    for ((items, kind), open) in listed.into_iter().zip(KINDS).zip(open) {
        if open == 0 {
            unmentioned.extend(items);
            waiting.push(Vec::new().into_iter());
        } else if open == items.len() {
            waiting.push(items.into_iter());
        } else {
            return Err(RowProblem::MediaParts { kind, got: open, expected: items.len() });
        }
    }

    let mut items: Vec<Item> = Vec::new();
    let mut next = [0usize; 3];
    let mut add = |item: Item| {
        let (kind, index) = (item.kind, next[slot(item.kind)]);
        next[slot(kind)] += 1;
        items.push(item);
        Part::Medium { kind, index }
    };
    let mut turns = Vec::with_capacity(raw.len());
    for (number, turn) in raw.into_iter().enumerate() {
        let mut parts = Vec::new();
        if turn.role == Role::User {
            parts.extend(std::mem::take(&mut unmentioned).into_iter().map(&mut add));
        }
        match turn.content {
            Content::Text(text) => parts.push(Part::Text(text)),
            Content::Typed(raw_parts) => {
                for part in raw_parts {
                    match part {
                        RawPart::Text(text) => parts.push(Part::Text(text)),
                        RawPart::Medium { kind, own: Some(map) } => {
                            let place = format!("turn {number}, {kind} part");
                            parts.push(add(item(kind, &Value::Object(map), &place, resolver)?));
                        }
                        RawPart::Medium { kind, own: None } => {
                            // Counted above: as many are waiting as there are such parts.
                            parts.extend(waiting[slot(kind)].next().map(&mut add));
                        }
                    }
                }
            }
        }
        turns.push(Turn { role: turn.role, parts });
    }
    Ok((turns, items))
}

// ---- options ----

fn options(map: &Map<String, Value>, place: &str) -> Result<MediumOptions, RowProblem> {
    let name = |key: &str| if place.is_empty() { key.to_owned() } else { format!("{place}.{key}") };
    let seconds = |key: &str| {
        present(map, key)
            .map(|value| match value.as_f64() {
                Some(number) if number.is_finite() && number >= 0.0 => Ok(number),
                _ => Err(column(name(key), value, "a number of seconds ≥ 0")),
            })
            .transpose()
    };
    let whole = |key: &str| {
        present(map, key)
            .map(|value| count(value, 1).ok_or_else(|| column(name(key), value, "a whole number ≥ 1")))
            .transpose()
    };
    let small = |key: &str| {
        whole(key)?
            .map(|number| {
                u32::try_from(number).map_err(|_| column(name(key), &map[key], "at most 4294967295"))
            })
            .transpose()
    };
    let fps = present(map, "fps")
        .map(|value| match value.as_f64() {
            Some(number) if number.is_finite() && number > 0.0 => Ok(number),
            _ => Err(column(name("fps"), value, "a number > 0")),
        })
        .transpose()?;
    let options = MediumOptions {
        fps,
        nframes: small("nframes")?,
        min_frames: small("min_frames")?,
        max_frames: small("max_frames")?,
        min_pixels: whole("min_pixels")?,
        max_pixels: whole("max_pixels")?,
        total_pixels: whole("total_pixels")?,
        resized_height: small("resized_height")?,
        resized_width: small("resized_width")?,
        video_start: seconds("video_start")?,
        video_end: seconds("video_end")?,
        segments: None,
    };
    let conflict = |key: &str, expected| Err(column(name(key), &map[key], expected));
    if options.fps.is_some() && options.nframes.is_some() {
        return conflict("nframes", "either `fps` or `nframes`");
    }
    if options.min_frames.zip(options.max_frames).is_some_and(|(min, max)| min > max) {
        return conflict("min_frames", "at most `max_frames`");
    }
    if options.min_pixels.zip(options.max_pixels).is_some_and(|(min, max)| min > max) {
        return conflict("min_pixels", "at most `max_pixels`");
    }
    if options.video_start.zip(options.video_end).is_some_and(|(start, end)| start >= end) {
        return conflict("video_start", "less than `video_end`");
    }
    match (options.resized_height, options.resized_width) {
        (Some(_), None) => conflict("resized_height", "together with `resized_width`"),
        (None, Some(_)) => conflict("resized_width", "together with `resized_height`"),
        _ => Ok(options),
    }
}

/// A whole number, also one written as `15.0`.
fn count(value: &Value, least: u64) -> Option<u64> {
    let number = value.as_u64().or_else(|| {
        let float = value.as_f64()?;
        // Beyond 2^53 a float is no longer every whole number.
        (float.fract() == 0.0 && (0.0..=9e15).contains(&float)).then_some(float as u64)
    })?;
    (number >= least).then_some(number)
}

/// Segments per clip, for those rows whose `meta` has them.
fn segments(columns: &Map<String, Value>, num_clips: usize) -> Result<Vec<(usize, Segments)>, RowProblem> {
    let has_counts = |value: &Value| value.get("frame_cnts").is_some_and(|counts| !counts.is_null());
    let metas = match columns.get("meta") {
        Some(value) if num_clips > 0 && has_counts(value) => std::slice::from_ref(value),
        Some(Value::Array(list)) if num_clips > 0 && list.iter().any(has_counts) => list.as_slice(),
        _ => return Ok(Vec::new()),
    };
    if metas.len() != num_clips {
        return Err(RowProblem::Column {
            column: "meta".to_owned(),
            got: format!("{} for {num_clips} clips", metas.len()),
            expected: "one object per clip",
        });
    }
    let with_counts = metas.iter().enumerate().filter(|(_, meta)| has_counts(meta));
    with_counts.map(|(index, meta)| Ok((index, segments_of(meta)?))).collect()
}

fn segments_of(meta: &Value) -> Result<Segments, RowProblem> {
    let frames = |key: &str, value: &Value| {
        count(value, 1)
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| column(format!("meta.{key}"), value, "a whole number of frames ≥ 1"))
    };
    let bound = |key: &str| match meta.get(key) {
        Some(value) if !value.is_null() => frames(key, value).map(Some),
        _ => Ok(None),
    };
    let counts = &meta["frame_cnts"];
    let frame_counts = match counts {
        Value::Array(list) if !list.is_empty() => {
            list.iter().map(|value| frames("frame_cnts", value)).collect::<Result<Vec<_>, _>>()?
        }
        other => return Err(column("meta.frame_cnts", other, "a list of frame numbers, one per segment")),
    };
    // The documented data bounds both by the shortest segment, and by 4 and 8.
    let shortest = frame_counts.iter().copied().min().unwrap_or(1);
    let max_frames = bound("max_frames")?.unwrap_or(8).min(shortest);
    let min_frames = bound("min_frames")?.unwrap_or(4).min(shortest);
    if min_frames > max_frames {
        return Err(column("meta.min_frames", &meta["min_frames"], "at most `max_frames`"));
    }
    let dynamic_sample = match meta.get("dynamic_sample") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(flag)) => *flag,
        Some(other) => return Err(column("meta.dynamic_sample", other, "true or false")),
    };
    Ok(Segments { frame_counts, min_frames, max_frames, dynamic_sample })
}

// ---- recorded completions ----

fn completions(columns: &Map<String, Value>) -> Result<Option<Vec<RecordedCompletion>>, RowProblem> {
    let list = |name: &str| match present(columns, name) {
        None => Ok(None),
        Some(Value::Array(list)) => Ok(Some(list)),
        Some(other) => Err(column(name, other, "a list, one entry per completion")),
    };
    let (texts, ids, logprobs) = (list("completions")?, list("completion_ids")?, list("logprobs")?);
    let Some(num) = texts.or(ids).map(Vec::len) else { return Ok(None) };
    for (name, other) in [("completion_ids", ids), ("logprobs", logprobs)] {
        if let Some(other) = other.filter(|other| other.len() != num) {
            return Err(RowProblem::Column {
                column: name.to_owned(),
                got: format!("a list of {} beside {num} completions", other.len()),
                expected: "one entry per completion",
            });
        }
    }
    let at = |list: Option<&'_ Vec<Value>>, index: usize| list.and_then(|list| list.get(index)).cloned();
    (0..num)
        .map(|index| {
            let place = format!("completions[{index}]");
            let mut recorded = match at(texts, index) {
                Some(value) => recorded(&value, &place)?,
                None => RecordedCompletion::default(),
            };
            if let Some(value) = at(ids, index) {
                recorded.completion_ids = Some(token_ids(&value, &format!("completion_ids[{index}]"))?);
            }
            if let Some(value) = at(logprobs, index) {
                recorded.logprobs = Some(numbers(&value, &format!("logprobs[{index}]"))?);
            }
            if recorded.text.is_none() && recorded.completion_ids.is_none() {
                let got = at(texts, index).unwrap_or_default();
                return Err(column(place, &got, "a text, or an object with `text` or `completion_ids`"));
            }
            match (&recorded.completion_ids, &recorded.logprobs) {
                (Some(ids), Some(logprobs)) if ids.len() != logprobs.len() => Err(RowProblem::Column {
                    column: format!("{place}.logprobs"),
                    got: format!("{} numbers for {} tokens", logprobs.len(), ids.len()),
                    expected: "one number per token",
                }),
                _ => Ok(recorded),
            }
        })
        .collect::<Result<_, _>>()
        .map(Some)
}

fn recorded(value: &Value, place: &str) -> Result<RecordedCompletion, RowProblem> {
    let text = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        other => Err(column(format!("{place}.text"), other, "a text")),
    };
    match value {
        Value::String(text) => Ok(RecordedCompletion { text: Some(text.clone()), ..Default::default() }),
        // TRL's conversational completions: one assistant message each.
        Value::Array(_) => match conversation(value, place)?.pop() {
            Some(turn) if turn.role == Role::Assistant => {
                Ok(RecordedCompletion { text: Some(answer(turn)?), ..Default::default() })
            }
            _ => Err(column(place, value, "messages that end with an assistant turn")),
        },
        Value::Object(map) => Ok(RecordedCompletion {
            text: present(map, "text").or_else(|| present(map, "content")).map(text).transpose()?,
            completion_ids: present(map, "completion_ids")
                .map(|value| token_ids(value, &format!("{place}.completion_ids")))
                .transpose()?,
            logprobs: present(map, "logprobs")
                .map(|value| numbers(value, &format!("{place}.logprobs")))
                .transpose()?,
            finish_reason: present(map, "finish_reason").map(verbatim),
        }),
        other => Err(column(place, other, "a text, or an object with `text` or `completion_ids`")),
    }
}

fn token_ids(value: &Value, place: &str) -> Result<Vec<u32>, RowProblem> {
    let ids =
        value.as_array().map(|list| list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())));
    ids.and_then(Iterator::collect).ok_or_else(|| column(place, value, "a list of token ids"))
}

fn numbers(value: &Value, place: &str) -> Result<Vec<f64>, RowProblem> {
    let numbers = value.as_array().map(|list| list.iter().map(Value::as_f64));
    numbers.and_then(Iterator::collect).ok_or_else(|| column(place, value, "a list of numbers"))
}

fn rewards(
    columns: &Map<String, Value>,
    num_completions: usize,
) -> Result<Option<RecordedRewards>, RowProblem> {
    let rewards = match present(columns, "rewards") {
        None => return Ok(None),
        Some(value @ Value::Array(_)) => RecordedRewards::Total(numbers(value, "rewards")?),
        Some(Value::Object(map)) => {
            let named = map.iter().map(|(name, value)| {
                let place = format!("rewards.{name}");
                let list =
                    value.as_array().ok_or_else(|| column(&place, value, "a list of numbers or nulls"))?;
                let number = |value: &Value| match value {
                    Value::Null => Ok(None),
                    value => {
                        value.as_f64().map(Some).ok_or_else(|| column(&place, value, "a number or null"))
                    }
                };
                Ok((name.clone(), list.iter().map(number).collect::<Result<Vec<_>, RowProblem>>()?))
            });
            RecordedRewards::Named(named.collect::<Result<_, RowProblem>>()?)
        }
        Some(other) => return Err(column("rewards", other, "a list, or an object of lists by reward name")),
    };
    let wrong = match &rewards {
        RecordedRewards::Total(values) => (values.len() != num_completions).then_some(values.len()),
        RecordedRewards::Named(named) => {
            named.iter().map(|(_, values)| values.len()).find(|&len| len != num_completions)
        }
    };
    match wrong {
        Some(len) => Err(RowProblem::Column {
            column: "rewards".to_owned(),
            got: format!("{len} numbers for {num_completions} completions"),
            expected: "one number per completion",
        }),
        None => Ok(Some(rewards)),
    }
}
