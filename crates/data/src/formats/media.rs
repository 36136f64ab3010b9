//! Media of a row: their columns, their places in the conversation, and their options.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use omnigrpo_text::{MediumKind, Part, PerKind, Role, Turn, split_conversation};
use serde_json::{Map, Value};

use super::{Content, Context, RawPart, RawTurn, column, inside, looks, present, spoken_medium};
use crate::dataset::ColumnNames;
use crate::error::{PathProblem, RowProblem, describe, shorten};
use crate::roots::Resolver;
use crate::sample::{MediumOptions, MediumRef, MediumSource, Segments};

#[derive(Clone)]
struct Item {
    kind: MediumKind,
    source: MediumSource,
    options: MediumOptions,
}

/// Returns the turns with their media in place, and the media of each kind in the order of their mention. A row that mentions
/// sound but lists none uses the sound of its videos. With `use_audio_in_video`, a row that does not mention sound uses it too.
pub(super) fn place(
    mut raw: Vec<RawTurn>,
    columns: &Map<String, Value>,
    context: &Context,
) -> Result<(Vec<Turn>, Vec<MediumRef>), RowProblem> {
    let (resolver, hear_videos) = (context.resolver, context.use_audio_in_video);
    let mut listed = PerKind::<Vec<Item>>::default();
    for kind in MediumKind::ALL {
        listed[kind] = listed_media(kind, columns, context)?;
    }
    if listed[MediumKind::Audio].is_empty() && mentions_sound(&raw) {
        listed[MediumKind::Audio] = sounds(&videos(&raw, &listed[MediumKind::Video], resolver)?);
    }
    let calls: Vec<_> = raw.iter_mut().map(|turn| std::mem::take(&mut turn.calls)).collect();

    let (mut turns, mut items) = if raw.iter().any(|turn| matches!(turn.content, Content::Typed(_))) {
        place_typed(raw, listed, resolver)?
    } else {
        let texts: Vec<_> = raw
            .into_iter()
            .map(|turn| match turn.content {
                Content::Text(text) => (turn.role, text),
                Content::Typed(_) => (turn.role, String::new()),
            })
            .collect();
        let turns = split_conversation(&texts, listed.each(Vec::len))?;
        (turns, listed.into_iter().flat_map(|(_, items)| items).collect())
    };
    for (turn, calls) in turns.iter_mut().zip(calls) {
        turn.parts.extend(calls.into_iter().map(Part::Call));
    }

    if hear_videos && items.iter().all(|item| item.kind != MediumKind::Audio) {
        hear(&mut turns, &mut items);
    }
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

/// Returns turns after the prompt with their media. Every medium has its own file, and `<image>` in a text is text.
pub(super) fn place_own(
    mut raw: Vec<RawTurn>,
    context: &Context,
) -> Result<(Vec<Turn>, Vec<MediumRef>), RowProblem> {
    let calls: Vec<_> = raw.iter_mut().map(|turn| std::mem::take(&mut turn.calls)).collect();
    let (mut turns, items) = place_typed(raw, PerKind::default(), context.resolver)?;
    for (turn, calls) in turns.iter_mut().zip(calls) {
        turn.parts.extend(calls.into_iter().map(Part::Call));
        let shown = turn.parts.iter().find_map(|part| match part {
            Part::Medium { kind, .. } => Some(*kind),
            Part::Text(_) | Part::Call(_) => None,
        });
        if let Some(kind) = shown.filter(|_| turn.role == Role::Assistant) {
            return Err(spoken_medium(turn.role, kind));
        }
    }
    let media =
        items.into_iter().map(|Item { kind, source, options }| MediumRef { kind, source, options }).collect();
    Ok((turns, media))
}

/// Makes the file paths of a row's media absolute, both in media columns and in typed parts of turns.
pub(crate) fn make_absolute(columns: &mut Map<String, Value>, resolver: &Resolver, names: &ColumnNames) {
    let named = |name: Option<&str>, key: &str| name.and_then(|name| name.split('.').next()) == Some(key);
    let typed = columns.get("data_type").and_then(Value::as_str).and_then(kind_of_key);
    for (key, value) in columns.iter_mut() {
        let kind = kind_of_key(key)
            .or_else(|| MediumKind::ALL.into_iter().find(|kind| named(names.of(*kind), key)))
            .or(typed.filter(|_| key == "path"));
        let turns = super::FORMATS.iter().any(|format| format.columns.contains(&key.as_str()))
            || named(names.prompt.as_deref(), key);
        if kind.is_none() && !turns {
            continue;
        }
        // Paths in a text of JSON would stay relative.
        let own = match kind {
            Some(_) => nested(value),
            None => super::unfolded(value, key, super::SPEAKERS).unwrap_or(Cow::Borrowed(value)),
        };
        if let Cow::Owned(own) = own {
            *value = own;
        }
        absolute(value, kind, resolver);
    }
}

/// Returns the kind of media that a key names: `image`, `images`, `image_url`, …
fn kind_of_key(key: &str) -> Option<MediumKind> {
    let one = key.strip_suffix("_url").unwrap_or(key);
    MediumKind::ALL.into_iter().find(|kind| [kind.as_str(), kind.plural()].contains(&one))
}

fn absolute(value: &mut Value, kind: Option<MediumKind>, resolver: &Resolver) {
    match (value, kind) {
        (Value::Array(list), _) => list.iter_mut().for_each(|value| absolute(value, kind, resolver)),
        (Value::Object(map), _) => {
            let part = map.get("type").and_then(Value::as_str).and_then(kind_of_key).or(kind);
            for (key, value) in map.iter_mut() {
                match key.as_str() {
                    // Text is never a path.
                    "text" | "role" | "from" | "type" => {}
                    "content" | "value" => {
                        if let Ok(Cow::Owned(own)) = super::unfolded(value, key, super::PARTS) {
                            *value = own;
                        }
                        if value.is_array() {
                            absolute(value, None, resolver);
                        }
                    }
                    "path" | "url" => absolute(value, part, resolver),
                    key => absolute(value, kind_of_key(key).or(kind), resolver),
                }
            }
        }
        (Value::String(text), Some(kind)) if Path::new(text).is_relative() => {
            if let Some(path) =
                resolver.path(kind, text).ok().and_then(|path| path.into_os_string().into_string().ok())
            {
                *text = path;
            }
        }
        _ => {}
    }
}

/// Reports whether a turn of a user or tool has a placeholder for sound without a file of its own.
fn mentions_sound(raw: &[RawTurn]) -> bool {
    raw.iter().filter(|turn| matches!(turn.role, Role::User | Role::Tool)).any(|turn| match &turn.content {
        Content::Text(text) => text.contains(MediumKind::Audio.placeholder()),
        Content::Typed(parts) => {
            parts.iter().any(|part| matches!(part, RawPart::Medium { kind: MediumKind::Audio, own: None }))
        }
    })
}

/// Returns the videos of a row in the order of the conversation: those of typed parts with their own files, and those of the
/// columns.
fn videos(raw: &[RawTurn], listed: &[Item], resolver: &Resolver) -> Result<Vec<Item>, RowProblem> {
    let mut waiting = listed.iter();
    let mut videos = Vec::new();
    for (number, turn) in raw.iter().enumerate() {
        let Content::Typed(parts) = &turn.content else { continue };
        for part in parts {
            match part {
                RawPart::Medium { kind: MediumKind::Video, own: Some(map) } => {
                    let place = format!("turn {number}, video part");
                    videos.push(item(MediumKind::Video, &Value::Object(map.clone()), &place, resolver)?);
                }
                RawPart::Medium { kind: MediumKind::Video, own: None } => {
                    videos.extend(waiting.next().cloned())
                }
                _ => {}
            }
        }
    }
    if videos.is_empty() { Ok(listed.to_vec()) } else { Ok(videos) }
}

/// Returns the sound of the videos that are files. Clips given as frames have no sound.
fn sounds(videos: &[Item]) -> Vec<Item> {
    let files = videos.iter().filter(|video| has_sound(video));
    files.map(|video| Item { kind: MediumKind::Audio, ..video.clone() }).collect()
}

fn has_sound(video: &Item) -> bool {
    matches!(&video.source, MediumSource::Path(path) if !path.is_dir())
}

/// Inserts the sound of every video file after the video, on a separate line.
fn hear(turns: &mut [Turn], items: &mut Vec<Item>) {
    let videos: Vec<Item> = items.iter().filter(|item| item.kind == MediumKind::Video).cloned().collect();
    let mut next = 0;
    for turn in turns {
        let mut parts = Vec::with_capacity(turn.parts.len());
        for part in std::mem::take(&mut turn.parts) {
            let heard = match part {
                Part::Medium { kind: MediumKind::Video, index } => videos.get(index).is_some_and(has_sound),
                _ => false,
            };
            parts.push(part);
            if heard {
                parts.push(Part::Text("\n".to_owned()));
                parts.push(Part::Medium { kind: MediumKind::Audio, index: next });
                next += 1;
            }
        }
        turn.parts = parts;
    }
    for (index, video) in videos.iter().enumerate().filter(|(_, video)| has_sound(video)) {
        let options = MediumOptions { of_clip: Some(index), ..video.options.clone() };
        items.push(Item { kind: MediumKind::Audio, options, ..video.clone() });
    }
}

/// Returns the media of one kind that the row's columns list.
fn listed_media(
    kind: MediumKind,
    columns: &Map<String, Value>,
    context: &Context,
) -> Result<Vec<Item>, RowProblem> {
    let resolver = context.resolver;
    let (name, value) = match &columns_of(kind, columns, context)[..] {
        [] => return Ok(Vec::new()),
        [(name, value)] => (name.clone(), nested(value)),
        [(one, _), (many, value), ..] => {
            return Err(RowProblem::Column {
                column: many.clone(),
                got: format!("{} beside column `{one}`", describe(value)),
                expected: "only one of the two",
            });
        }
    };
    let is_shared =
        MediumKind::ALL.into_iter().any(|other| other != kind && context.names.of(other) == Some(&*name));
    let value = match &*value {
        value if !is_shared => Cow::Borrowed(value),
        // The extension of each entry tells its kind.
        Value::Array(list) => Cow::Owned(list.iter().filter(|value| is_of(kind, value)).cloned().collect()),
        value if is_of(kind, value) => Cow::Borrowed(value),
        _ => return Ok(Vec::new()),
    };
    match &*value {
        // Some lists use an empty string for a row without media.
        Value::String(text) if text.is_empty() => Ok(Vec::new()),
        Value::Array(list) if !(kind == MediumKind::Video && is_frames(list, resolver)) => list
            .iter()
            .enumerate()
            .map(|(index, value)| item(kind, value, &format!("{name}[{index}]"), resolver))
            .collect(),
        value => Ok(vec![item(kind, value, &name, resolver)?]),
    }
}

/// Returns the columns that list media of a kind: the one that the user names, else those with the name of the kind, else `path`
/// beside a `data_type` that names the kind.
pub(super) fn columns_of<'a>(
    kind: MediumKind,
    columns: &'a Map<String, Value>,
    context: &Context,
) -> Vec<(String, &'a Value)> {
    let found = |name: &str| Some((name.to_owned(), present(columns, name)?));
    if let Some(name) = context.names.of(kind) {
        return inside(columns, name).map(|value| (name.to_owned(), value)).into_iter().collect();
    }
    let usual: Vec<_> = [kind.as_str(), kind.plural()].into_iter().filter_map(found).collect();
    let typed = || columns.get("data_type").and_then(Value::as_str).and_then(kind_of_key) == Some(kind);
    match usual.is_empty() && typed() {
        true => found("path").into_iter().collect(),
        false => usual,
    }
}

/// Returns a list or an object that is stored as JSON text, and any other value unchanged.
fn nested(value: &Value) -> Cow<'_, Value> {
    let text = value.as_str().map(str::trim).filter(|text| text.starts_with(['[', '{']));
    match text.and_then(|text| serde_json::from_str(text).ok()) {
        Some(value @ (Value::Array(_) | Value::Object(_))) => Cow::Owned(value),
        _ => Cow::Borrowed(value),
    }
}

fn is_of(kind: MediumKind, value: &Value) -> bool {
    looks::medium(value).is_some_and(|look| look.kind == kind)
}

/// Reports whether a video list names the frames of one clip and not several clips. A WebP file may be either a frame or a clip,
/// so the first entry decides.
fn is_frames(list: &[Value], resolver: &Resolver) -> bool {
    const STILL: [&str; 7] = ["png", "jpg", "jpeg", "bmp", "tif", "tiff", "webp"];
    let still = |value: &Value| {
        let extension =
            value.as_str().and_then(|text| Path::new(text).extension()?.to_str().map(str::to_lowercase));
        extension.is_some_and(|extension| STILL.contains(&extension.as_str()))
    };
    list.iter().all(still) && list.first().is_some_and(|first| !is_animated_webp(first, resolver))
}

/// Reports whether a path names an animated WebP, judged by its header. An unreadable file is reported when it is used.
fn is_animated_webp(value: &Value, resolver: &Resolver) -> bool {
    let read = || {
        let path = resolver.path(MediumKind::Video, value.as_str()?).ok()?;
        let mut header = [0; 21];
        // Opening a pipe would block, and a pipe is not a medium.
        if !path.is_file() {
            return None;
        }
        File::open(path).ok()?.read_exact(&mut header).ok()?;
        Some(header)
    };
    // RIFF container: "RIFF", size, "WEBP", then the extended header. The second bit of its flags marks an animation.
    read()
        .is_some_and(|header| &header[..4] == b"RIFF" && &header[8..16] == b"WEBPVP8X" && header[20] & 2 != 0)
}

/// Returns the file of a part or list entry. Its key is the name of the kind, `<kind>_url` (OpenAI), `path`, `url` or `bytes`.
pub(super) fn own_source(map: &Map<String, Value>, kind: MediumKind) -> Option<&Value> {
    let names = [kind.as_str().to_owned(), format!("{kind}_url"), "path".to_owned(), "url".to_owned()];
    match names.iter().find_map(|name| present(map, name)).or_else(|| present(map, "bytes"))? {
        Value::Object(inner) => present(inner, "url").or_else(|| present(inner, "path")),
        value => Some(value),
    }
}

/// Reports whether a text is a `data:` address with several frames, as vLLM takes them: `data:video/jpeg;base64,F1,F2`.
fn is_frames_in_one(text: &str) -> bool {
    text.strip_prefix("data:")
        .is_some_and(|data| data.starts_with("video/jpeg;") || data.split(',').count() > 2)
}

fn item(kind: MediumKind, value: &Value, place: &str, resolver: &Resolver) -> Result<Item, RowProblem> {
    const EXPECTED: &str = "a path, an object with `path`, or (video) a list of frame paths";
    let medium = |path: &str, problem| RowProblem::Medium { kind, path: shorten(path), problem };
    match value {
        Value::String(text) if kind == MediumKind::Video && is_frames_in_one(text) => {
            let frames = resolver.frames(text).map_err(|problem| medium(text, problem))?;
            Ok(Item { kind, source: MediumSource::Frames(frames), options: MediumOptions::default() })
        }
        Value::String(text) => {
            let path = resolver.path(kind, text).map_err(|problem| medium(text, problem))?;
            Ok(Item { kind, source: MediumSource::Path(path), options: MediumOptions::default() })
        }
        Value::Array(list)
            if kind == MediumKind::Video && list.len() == 1 && is_animated_webp(&list[0], resolver) =>
        {
            item(kind, &list[0], place, resolver)
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
    listed: PerKind<Vec<Item>>,
    resolver: &Resolver,
) -> Result<(Vec<Turn>, Vec<Item>), RowProblem> {
    let mut open = PerKind::<usize>::default();
    for turn in &raw {
        if let Content::Typed(parts) = &turn.content {
            for part in parts {
                if let RawPart::Medium { kind, own: None } = part {
                    open[*kind] += 1;
                }
            }
        }
    }
    let mut unmentioned = Vec::new();
    let mut waiting = PerKind::<std::vec::IntoIter<Item>>::default();
    for (kind, items) in listed {
        if open[kind] == 0 {
            unmentioned.extend(items);
        } else if open[kind] == items.len() {
            waiting[kind] = items.into_iter();
        } else {
            return Err(RowProblem::MediaParts { kind, got: open[kind], expected: items.len() });
        }
    }

    let mut items: Vec<Item> = Vec::new();
    let mut next = PerKind::<usize>::default();
    let mut add = |item: Item| {
        let (kind, index) = (item.kind, next[item.kind]);
        next[kind] += 1;
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
                            // The counts match: a medium is waiting for every such part.
                            parts.extend(waiting[kind].next().map(&mut add));
                        }
                    }
                }
            }
        }
        turns.push(Turn { role: turn.role, parts });
    }
    Ok((turns, items))
}

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
        of_clip: None,
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

/// Reads a whole number, which may also be written as `15.0`.
fn count(value: &Value, least: u64) -> Option<u64> {
    let number = value.as_u64().or_else(|| {
        let float = value.as_f64()?;
        // Above 2^53, a float cannot represent every whole number.
        (float.fract() == 0.0 && (0.0..=9e15).contains(&float)).then_some(float as u64)
    })?;
    (number >= least).then_some(number)
}

/// Returns the segments of each clip whose `meta` lists them.
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
        other => return Err(column("meta.frame_cnts", other, "a list of frame counts, one per segment")),
    };
    // The dataset's documentation limits both values by the shortest segment, and by 4 and 8.
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
