//! Records of completions: the prompts of a step, one prompt with its completions, and a search.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use omnigrpo_observe::{EnvironmentTurn, FinishReason, Rollout};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::Error;
use crate::index::{Index, Indices, Lines, line_at};
use crate::media::{self, Medium, Preview, Previews};
use crate::run::{Run, unquoted};

/// Largest number of characters of a text in a response. The page requests longer texts separately.
const SHOWN_CHARS: usize = 20_000;
/// Largest number of characters of a prompt in a list.
const EXCERPT_CHARS: usize = 160;
/// Largest number of completions of one prompt in a response.
const MAX_SAMPLES: usize = 1024;
/// Largest number of list entries in a response.
const MAX_LINES: usize = 200;
/// Time limit of a search request. The response contains the position from which the next request continues.
const SEARCH_TIME: Duration = Duration::from_millis(250);

/// Row columns that are used as the category if `category_column` is not set.
const CATEGORIES: [&str; 7] =
    ["category", "type", "task", "problem_type", "question_type", "data_type", "subject"];

/// Summary of a completion that is available without reading its record again.
#[derive(Debug)]
pub(crate) struct Brief {
    group: usize,
    sample: usize,
    id: String,
    reward: Option<f64>,
    rewards: BTreeMap<String, Option<f64>>,
    length: usize,
    cut: bool,
    parsed: bool,
    category: Option<String>,
    excerpt: String,
    /// Index of the first picture or clip among the media. Only the first completion of a prompt has it.
    picture: Option<usize>,
}

/// Position of a completion's per-token numbers: a line of `tokens/`.
#[derive(Debug, Deserialize)]
struct Place {
    group: usize,
    sample: usize,
}

/// Records of all runs.
#[derive(Debug, Default)]
pub(crate) struct Records {
    rollouts: Indices<Brief>,
    tokens: Indices<Place>,
    previews: Previews,
}

/// Conditions of a search. A completion must meet all conditions that are set.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Filter {
    /// Text in the completion, the prompt, the solution or the row id, ignoring case.
    text: Option<String>,
    min: Option<f64>,
    max: Option<f64>,
    /// Restricts the search to completions that hit the length limit.
    cut: bool,
    /// Restricts the search to completions without an answer between the answer tags.
    unparsed: bool,
    category: Option<String>,
    /// Position from which to continue: a step and a byte offset in its file.
    step: u64,
    byte: u64,
    limit: usize,
}

/// List entry for a prompt of a step.
#[derive(Debug, Serialize)]
struct GroupLine<'a> {
    step: u64,
    group: usize,
    id: &'a str,
    category: Option<&'a str>,
    excerpt: &'a str,
    completions: usize,
    /// Total reward of each completion, and the unweighted values by name.
    reward: Vec<Option<f64>>,
    rewards: BTreeMap<&'a str, Vec<Option<f64>>>,
    length: Vec<usize>,
    cut: usize,
    unparsed: usize,
    picture: Option<usize>,
}

impl<'a> GroupLine<'a> {
    /// Summarises the completions of a prompt; `None` without completions.
    fn of(step: u64, briefs: &[&'a Brief]) -> Option<Self> {
        let first = briefs.iter().min_by_key(|brief| brief.sample)?;
        let shown = || briefs.iter().take(MAX_SAMPLES);
        let names = first.rewards.keys();
        let value = |brief: &&Brief, name: &String| brief.rewards.get(name).copied().flatten();
        Some(Self {
            step,
            group: first.group,
            id: &first.id,
            category: briefs.iter().find_map(|brief| brief.category.as_deref()),
            excerpt: &first.excerpt,
            completions: briefs.len(),
            reward: shown().map(|brief| brief.reward).collect(),
            rewards: names
                .map(|name| (name.as_str(), shown().map(|own| value(own, name)).collect()))
                .collect(),
            length: shown().map(|brief| brief.length).collect(),
            cut: briefs.iter().filter(|brief| brief.cut).count(),
            unparsed: briefs.iter().filter(|brief| !brief.parsed).count(),
            picture: first.picture,
        })
    }
}

impl Records {
    fn index(&self, run: &Run, step: u64) -> Result<(PathBuf, Index<Brief>), Error> {
        let path = run.step_file("rollouts", step);
        let column = category_column(run);
        let index = self.rollouts.of(run, &path, |line| {
            let record = parsed(line).ok()?;
            let picture = if record.sample == 0 { media::first_picture(&record.media) } else { None };
            Some(Brief { picture, ..brief(&record, column.as_deref()) })
        })?;
        Ok((path, index))
    }

    /// Returns up to `limit` prompts of a step, starting at index `from`.
    pub(crate) fn groups(&self, run: &Run, step: u64, from: usize, limit: usize) -> Result<Value, Error> {
        let (_, index) = self.index(run, step)?;
        let mut groups: BTreeMap<usize, Vec<&Brief>> = BTreeMap::new();
        for entry in index.iter() {
            groups.entry(entry.brief.group).or_default().push(&entry.brief);
        }
        let lines = groups.values().skip(from).take(limit).filter_map(|own| GroupLine::of(step, own));
        Ok(json!({ "step": step, "all": groups.len(), "groups": lines.collect::<Vec<_>>() }))
    }

    /// Returns the list entries of some prompts, given as `STEP-GROUP,STEP-GROUP,…`. Prompts that do not exist are left out.
    pub(crate) fn lines(&self, run: &Run, places: &str) -> Result<Value, Error> {
        let number = |text: &str| text.parse::<u64>().ok();
        let place = |text: &str| text.split_once('-').and_then(|(a, b)| Some((number(a)?, number(b)?)));
        let mut lines = Vec::new();
        for (step, group) in places.split(',').filter_map(place).take(MAX_LINES) {
            let Ok((_, index)) = self.index(run, step) else { continue };
            let own = index.iter().map(|entry| &entry.brief).filter(|own| own.group as u64 == group);
            let own: Vec<&Brief> = own.collect();
            lines.extend(GroupLine::of(step, &own).map(|line| json!(line)));
        }
        Ok(json!({ "groups": lines }))
    }

    /// Returns the number and the question of each prompt of a step. The prompt whose rewards differ most is the first.
    pub(crate) fn prompts(&self, run: &Run, step: u64) -> Result<Vec<(usize, String)>, Error> {
        let (_, index) = self.index(run, step)?;
        let mut prompts: BTreeMap<usize, (String, f64, f64)> = BTreeMap::new();
        for brief in index.iter().map(|entry| &entry.brief) {
            let none = || (brief.excerpt.clone(), f64::INFINITY, f64::NEG_INFINITY);
            let (_, low, high) = prompts.entry(brief.group).or_insert_with(none);
            (*low, *high) = brief.reward.map_or((*low, *high), |reward| (low.min(reward), high.max(reward)));
        }
        let mut prompts: Vec<_> = prompts.into_iter().collect();
        prompts.sort_by(|(_, (_, low, high)), (_, (_, low2, high2))| (high2 - low2).total_cmp(&(high - low)));
        Ok(prompts.into_iter().map(|(group, (question, ..))| (group, question)).collect())
    }

    /// Reads the records of one prompt, ordered by sample.
    pub(crate) fn group_records(&self, run: &Run, step: u64, group: usize) -> Result<Vec<Rollout>, Error> {
        let (path, index) = self.index(run, step)?;
        let mut records = Vec::new();
        for entry in index.iter().filter(|entry| entry.brief.group == group).take(MAX_SAMPLES) {
            let line = line_at(run, &path, entry)?;
            let damaged = |source| Error::Damaged { path: path.clone(), offset: entry.offset, source };
            records.push(parsed(&line).map_err(|error| damaged(error.into()))?);
        }
        if records.is_empty() {
            return Err(Error::missing(format!("step {step} has no prompt {group}")));
        }
        records.sort_by_key(|record| record.sample);
        Ok(records)
    }

    /// Returns one prompt with its media and completions. Long texts are shortened.
    pub(crate) fn group(&self, run: &Run, step: u64, group: usize) -> Result<Value, Error> {
        let records = self.group_records(run, step, group)?;
        let with_tokens: Vec<usize> = self
            .token_lines(run, step)
            .iter()
            .filter(|(_, place)| place.group == group)
            .map(|(_, place)| place.sample)
            .collect();
        let first = &records[0];
        let mut row = records.iter().find_map(|record| record.row.clone()).unwrap_or_default();
        let column = category_column(run);
        let category = category(&row, column.as_deref());
        row.values_mut().for_each(shorten);
        let all = all_media(&records);
        let turn = |turn: &EnvironmentTurn| {
            let media = turn
                .media
                .iter()
                .take(MAX_MEDIA)
                .filter_map(|path| all.iter().position(|other| other == path));
            json!({
                "model": cut_text(&turn.model),
                "text": cut_text(&turn.text),
                "media": media.collect::<Vec<_>>(),
            })
        };
        let samples: Vec<Value> = records
            .iter()
            .map(|record| {
                json!({
                    "sample": record.sample,
                    "completion": cut_text(&record.completion),
                    "turns": record.turns.iter().map(turn).collect::<Vec<_>>(),
                    "reward": record.reward,
                    "rewards": record.rewards,
                    "advantage": record.advantage,
                    "length": record.length,
                    "cut": record.finish_reason == FinishReason::Length,
                    "parsed": has_answer(&record.completion),
                    "columns": record.columns,
                    "tokens": with_tokens.contains(&record.sample),
                })
            })
            .collect();
        Ok(json!({
            "step": step,
            "group": group,
            "id": first.id,
            "epoch": first.epoch,
            "prompt": cut_text(&first.prompt),
            "solution": first.solution,
            "category": category,
            "media": media::listed(&first.media, &first.frame_times_secs, run.orientation()),
            "row": row,
            "samples": samples,
        }))
    }

    /// Opens a media file of a prompt.
    pub(crate) fn medium(&self, run: &Run, step: u64, group: usize, at: usize) -> Result<Medium, Error> {
        media::open(&all_media(&self.group_records(run, step, group)?), at, run.orientation())
    }

    /// Returns a small copy of a picture of a prompt, or the sampled frames of a clip.
    pub(crate) fn preview(
        &self,
        run: &Run,
        (step, group, at): (u64, usize, usize),
        frames: usize,
        side_px: u32,
    ) -> Result<Arc<Preview>, Error> {
        let records = self.group_records(run, step, group)?;
        let medium = media::open(&all_media(&records), at, run.orientation())?;
        let times = records[0].frame_times_secs.get(at).map(Vec::as_slice).unwrap_or_default();
        self.previews.of(&medium, times, frames, side_px)
    }

    /// Returns the full text of a completion or of the prompt.
    pub(crate) fn text(
        &self,
        run: &Run,
        step: u64,
        group: usize,
        sample: Option<usize>,
    ) -> Result<String, Error> {
        let records = self.group_records(run, step, group)?;
        let record = records.into_iter().find(|record| sample.is_none_or(|own| own == record.sample));
        let record = record.ok_or_else(|| Error::missing("this completion does not exist"))?;
        Ok(if sample.is_some() { record.completion } else { record.prompt })
    }

    fn token_lines(&self, run: &Run, step: u64) -> Vec<(u64, Place)> {
        let path = run.step_file("tokens", step);
        let index = self.tokens.of(run, &path, |line| serde_json::from_slice(line).ok());
        index.map_or_else(
            |_| Vec::new(),
            |index| {
                let place = |p: &Place| Place { group: p.group, sample: p.sample };
                index.iter().map(|entry| (entry.offset, place(&entry.brief))).collect()
            },
        )
    }

    /// Returns the per-token numbers of a completion, verbatim as the update of this step recorded them.
    pub(crate) fn tokens(&self, run: &Run, step: u64, group: usize, sample: usize) -> Result<Vec<u8>, Error> {
        let path = run.step_file("tokens", step);
        let index = self.tokens.of(run, &path, |line| serde_json::from_slice(line).ok())?;
        let entry = index.iter().find(|entry| (entry.brief.group, entry.brief.sample) == (group, sample));
        let entry = entry
            .ok_or_else(|| Error::missing("the run did not record per-token numbers (log_token_stats)"))?;
        line_at(run, &path, entry)
    }

    /// Returns the completions that match a filter, starting at its position, and the position at which the next search
    /// continues.
    pub(crate) fn find(&self, run: &Run, filter: &Filter) -> Result<Value, Error> {
        let started = Instant::now();
        let steps = run.steps("rollouts")?;
        let column = category_column(run);
        let text = filter.text.as_deref().map(str::to_lowercase).filter(|text| !text.is_empty());
        let limit = filter.limit.clamp(1, 500);
        let mut found = Vec::new();
        for &step in steps.iter().filter(|&&step| step >= filter.step) {
            let path = run.step_file("rollouts", step);
            let file = run.open(&path)?;
            let from = if step == filter.step { filter.byte } else { 0 };
            let mut lines = Lines::from(file, from).map_err(Error::io("read", &path))?;
            // The row is stored with the first completion of its prompt, which may precede this position.
            let before = if from > 0 { Some(self.index(run, step)?.1) } else { None };
            let mut of_group: Option<(usize, Option<String>)> = None;
            while let Some((offset, line)) = lines.next().map_err(Error::io("read", &path))? {
                // Each search makes progress, however long its first line takes.
                let is_first = (step, offset) == (filter.step, filter.byte);
                if !is_first && (found.len() == limit || started.elapsed() > SEARCH_TIME) {
                    let next = json!({ "step": step, "byte": offset });
                    return Ok(json!({ "found": found, "next": next, "steps": steps.len() }));
                }
                let Ok(record) = parsed(line) else { continue };
                let brief = brief(&record, column.as_deref());
                if of_group.as_ref().is_none_or(|(group, _)| *group != brief.group) {
                    let mut own = before.iter().flat_map(|index| index.iter());
                    let first = own.find(|entry| entry.brief.group == brief.group);
                    let category = first.and_then(|entry| entry.brief.category.clone());
                    of_group = Some((brief.group, category.or_else(|| brief.category.clone())));
                }
                let category = of_group.as_ref().and_then(|(_, category)| category.as_deref());
                if filter.lets_through(&record, &brief, category, text.as_deref()) {
                    found.push(json!({
                        "step": step,
                        "group": brief.group,
                        "sample": brief.sample,
                        "id": brief.id,
                        "reward": brief.reward,
                        "cut": brief.cut,
                        "parsed": brief.parsed,
                        "category": category,
                        "excerpt": excerpt(&record.completion, text.as_deref()),
                    }));
                }
            }
        }
        Ok(json!({ "found": found, "next": null, "steps": steps.len() }))
    }
}

impl Filter {
    fn lets_through(
        &self,
        record: &Rollout,
        brief: &Brief,
        category: Option<&str>,
        text: Option<&str>,
    ) -> bool {
        let within = |bound: Option<f64>, holds: fn(f64, f64) -> bool| {
            bound.is_none_or(|bound| brief.reward.is_some_and(|reward| holds(reward, bound)))
        };
        let named = self.category.as_deref().filter(|name| !name.is_empty());
        within(self.min, |reward, bound| reward >= bound)
            && within(self.max, |reward, bound| reward <= bound)
            && (!self.cut || brief.cut)
            && (!self.unparsed || !brief.parsed)
            && named.is_none_or(|name| category == Some(name))
            && text.is_none_or(|text| {
                let has = |own: &str| own.to_lowercase().contains(text);
                let solution = || record.solution.as_ref().is_some_and(|own| has(&own.to_string()));
                has(&record.completion) || has(&record.id) || has(&record.prompt) || solution()
            })
    }
}

/// Largest number of media of a group, and of a turn. Others are ignored.
const MAX_MEDIA: usize = 4096;

/// Returns the paths of the media of a prompt, followed by those that environments added to its completions, each once.
fn all_media(records: &[Rollout]) -> Vec<String> {
    let mut all = records.first().map(|first| first.media.clone()).unwrap_or_default();
    all.truncate(MAX_MEDIA);
    let turns = records.iter().flat_map(|record| &record.turns);
    for path in turns.flat_map(|turn| &turn.media).take(MAX_MEDIA) {
        if !all.contains(path) {
            all.push(path.clone());
        }
    }
    all
}

/// Parses a record. Bytes that are not UTF-8 become U+FFFD, so that a single bad byte does not hide the record.
fn parsed(line: &[u8]) -> Result<Rollout, serde_json::Error> {
    serde_json::from_str(&String::from_utf8_lossy(line))
}

fn brief(record: &Rollout, column: Option<&str>) -> Brief {
    Brief {
        group: record.group,
        sample: record.sample,
        id: record.id.chars().take(EXCERPT_CHARS).collect(),
        reward: record.reward,
        rewards: record.rewards.clone(),
        length: record.length,
        cut: record.finish_reason == FinishReason::Length,
        parsed: has_answer(&record.completion),
        category: record.row.as_ref().and_then(|row| category(row, column)),
        excerpt: question(record),
        picture: None,
    }
}

/// Returns the end of a prompt without the markers of the chat template.
pub(crate) fn question(record: &Rollout) -> String {
    let mut plain = String::new();
    let mut rest = record.prompt.as_str();
    while let Some((before, (_, after))) =
        rest.split_once("<|").and_then(|(a, b)| Some((a, b.split_once("|>")?)))
    {
        plain.push_str(before);
        rest = after;
    }
    plain.push_str(rest);
    let said =
        plain.lines().map(str::trim).filter(|line| !["", "system", "user", "assistant"].contains(line));
    let all = said.collect::<Vec<_>>().join(" ");
    let skipped = all.chars().count().saturating_sub(EXCERPT_CHARS);
    all.chars().skip(skipped).collect()
}

/// Returns the beginning of a text, or the part around the searched text.
fn excerpt(text: &str, sought: Option<&str>) -> String {
    let at = sought.and_then(|sought| text.to_lowercase().find(sought)).unwrap_or(0);
    // Lower-casing can change the length of a text, so this position is only approximate.
    let before = text.char_indices().take_while(|(byte, _)| *byte < at).count();
    text.chars().skip(before.saturating_sub(EXCERPT_CHARS / 3)).take(EXCERPT_CHARS).collect()
}

/// Returns true if there is text between the answer tags.
pub(crate) fn has_answer(completion: &str) -> bool {
    let inside = completion.split_once("<answer>").and_then(|(_, rest)| rest.split_once("</answer>"));
    inside.is_some_and(|(answer, _)| !answer.trim().is_empty())
}

pub(crate) fn category_column(run: &Run) -> Option<String> {
    let settings = run.settings();
    let column = settings.iter().find(|setting| setting.name == "category_column")?;
    Some(unquoted(&column.value).to_owned())
}

pub(crate) fn category(row: &Map<String, Value>, column: Option<&str>) -> Option<String> {
    let named = column.into_iter().chain(CATEGORIES);
    let value = named.filter_map(|name| row.get(name)).find(|value| !value.is_null())?;
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    Some(text.chars().take(EXCERPT_CHARS).collect())
}

/// Returns the beginning of a text and its length in characters.
fn cut_text(text: &str) -> Value {
    let chars = text.chars().count();
    let shown: String = text.chars().take(SHOWN_CHARS).collect();
    json!({ "text": shown, "chars": chars })
}

/// Shortens the texts in a value of a row.
fn shorten(value: &mut Value) {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    if text.len() > EXCERPT_CHARS * 8 {
        *value = Value::String(text.chars().take(EXCERPT_CHARS * 8).chain(['…']).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_is_shown_without_its_template() {
        let line = r#"{"epoch":0,"id":"a","group":0,"sample":0,"completion":"","solution":null,"rewards":{},"reward":null,
            "advantage":0,"length":0,"finish_reason":"stop","media":[],
            "prompt":"<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n<|image_pad|>\nWhich 2 <| 3?<|im_end|>\n"}"#;
        assert_eq!(question(&parsed(line.replace('\n', "").as_bytes()).unwrap()), "Be brief Which 2");
    }

    #[test]
    fn answers_are_what_stands_between_their_tags() {
        for (text, has) in
            [("<answer>B</answer>", true), ("<answer> </answer>", false), ("<answer>B", false), ("B", false)]
        {
            assert_eq!(has_answer(text), has, "{text}");
        }
    }

    #[test]
    fn an_excerpt_shows_the_place_that_was_sought() {
        let text = format!("{}Needle{}", "ä".repeat(500), "b".repeat(500));
        let shown = excerpt(&text, Some("needle"));
        assert!(shown.contains("Needle") && shown.chars().count() == EXCERPT_CHARS, "{shown}");
        assert_eq!(excerpt("short", None), "short");
    }
}
