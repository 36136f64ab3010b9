//! `judge:http(s)://host/v1`: a language model behind an OpenAI-compatible endpoint gives the score.
//!
//! Each completion is one request at temperature 0. The score is the first number of the reply, after the judge's thinking. If a
//! reply has no number in the range, the request is repeated, and then fails with an error. A judge that does not answer must not
//! count as "wrong".
//!
//! `rubric:FILE@http(s)://host/v1` and `rubric:http(s)://host/v1` ask the same judge several questions at once ([`super::rubric`]).
//!
//! If the template contains `{images}`, the row's pictures are sent in OpenAI's form, as `image_url` parts with the bytes of the
//! file: at most 16 pictures per row, each at most 8 MiB, as PNG, JPEG, GIF or WebP. A row with another medium cannot be scored.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::ops::Range;
use std::path::Path;
use std::sync::LazyLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use regex::Regex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::http::Client;
use super::rubric::{Rubric, code};
use super::{ExternalOptions, Failure, Log, attempts, excerpt, rows_name, spread};
use crate::answer::golds;
use crate::contract::{Logged, row_name};
use crate::tags::{content, tags};
use crate::{AnswerPolicy, Reward, RewardError, RewardInput, RewardOptions};

/// Placeholder for the pictures.
const IMAGES: &str = "{images}";
const MAX_IMAGES: usize = 16;
const MAX_IMAGE_BYTES: u64 = 8 << 20;
/// Largest number of questions whose mean answers are metrics of a step.
const MAX_METRICS: usize = 64;

/// Default question to the judge.
pub(super) const TEMPLATE: &str = "You grade answers. Compare the answer with the reference.\n\n\
    Question:\n{prompt}\n\nReference:\n{solution}\n\nAnswer to grade:\n{answer}\n\n\
    Reply with one number from 0 (wrong) to 1 (right) and nothing else.";

struct Judge {
    name: String,
    url: String,
    options: ExternalOptions,
    client: Client,
    /// Request to the judge, with places for texts.
    template: String,
    /// Questions to answer; `None` for one number.
    rubric: Option<Rubric>,
    log: Log,
}

/// Creates a reward that asks for one number, or for the answers to a rubric.
pub(super) fn reward(
    url: &str,
    name: String,
    rubric: Option<Rubric>,
    options: &RewardOptions,
) -> Result<Box<dyn Reward>, RewardError> {
    let options = options.external.clone();
    let client = Client::new(url, &name, &options, options.judge_api_key.as_deref())?;
    let url = format!("{}/chat/completions", url.trim_end_matches('/'));
    let template = rubric.as_ref().map_or(&options.judge_template, |rubric| &rubric.template).clone();
    Ok(Box::new(Judge { name, url, options, client, template, rubric, log: Log::default() }))
}

/// Splits what follows `rubric:` into the file, if there is one, and the address of the judge. Returns `None` without an address.
pub(super) fn rubric_parts(target: &str) -> Option<(Option<&Path>, &str)> {
    let starts = |text: &str| ["http://", "https://"].iter().any(|scheme| text.starts_with(scheme));
    if starts(target) {
        return Some((None, target));
    }
    // The address may contain a user's name, and the path any character.
    let (at, _) = target.match_indices('@').find(|(at, _)| starts(&target[at + 1..]))?;
    (at > 0).then(|| (Some(Path::new(&target[..at])), &target[at + 1..]))
}

#[derive(Deserialize)]
struct Reply {
    choices: Vec<ReplyChoice>,
}

#[derive(Deserialize)]
struct ReplyChoice {
    message: Message,
}

#[derive(Deserialize)]
struct Message {
    content: Option<String>,
}

impl Reward for Judge {
    fn name(&self) -> &str {
        &self.name
    }

    fn range(&self) -> (f64, f64) {
        let usual = || self.options.range.unwrap_or((0.0, 1.0));
        self.rubric.as_ref().map_or_else(usual, Rubric::range)
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        self.log.take();
        spread(batch, 1, self.options.pool_size, |_, range, rows| {
            let named = rows_name(&range, batch);
            rows.iter().map(|input| self.grade(input, &named, range.clone())).collect()
        })
    }

    fn take_logged(&self) -> Logged {
        let mut logged = self.log.take();
        // The rows of a column may each have names of their own.
        while logged.metrics.len() > MAX_METRICS {
            logged.metrics.pop_last();
        }
        logged
    }

    /// Checks the row's questions, and its media if they will be sent, so that an unusable row is found early.
    fn applies(&self, row: &RewardInput<'_>) -> Result<Option<bool>, RewardError> {
        if let Some(rubric) = &self.rubric
            && rubric.of_row(row).map_err(|what| self.unusable(row, what))?.is_none()
        {
            return Ok(Some(false));
        }
        if self.template.contains(IMAGES) {
            let each = |path: &std::path::PathBuf| image_type(path, &start_of(path)?);
            let all = row.media_paths.iter().map(each).collect::<Result<Vec<_>, String>>();
            all.and_then(|all| few_enough(all.len())).map_err(|what| self.unusable(row, what))?;
        }
        Ok(None)
    }

    /// Scores the first completion only, since a judge reads each of them alone.
    fn probe(&self, group: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        let mut scores = self.score(&group[..group.len().min(1)])?;
        scores.resize(group.len(), None);
        Ok(scores)
    }
}

impl Judge {
    /// Asks about one completion, which is the row `range` of the batch and has the name `named` in errors.
    fn grade(
        &self,
        input: &RewardInput<'_>,
        named: &str,
        range: Range<usize>,
    ) -> Result<Option<f64>, RewardError> {
        let code = code(input.key, input.completion);
        let questions = match &self.rubric {
            None => None,
            Some(rubric) => match rubric.of_row(input).map_err(|what| self.unusable(input, what))? {
                None => {
                    let columns = BTreeMap::from([(self.name.clone(), vec![Value::Null])]);
                    self.log.add(range, Logged { metrics: BTreeMap::new(), columns });
                    return Ok(None);
                }
                questions => questions,
            },
        };
        let asked = questions.as_ref().map(|questions| questions.asked(&code));
        let body = json!({
            "model": self.options.judge_model,
            "temperature": 0,
            "messages": [{"role": "user", "content": self.request(input, asked.as_deref().map(|asked| (asked, &*code)))?}],
        });
        let (low, high) = self.range();
        attempts(&self.name, named, &self.options, self.options.backoff, || {
            let reply: Reply = self.client.post(&self.url, &body)?;
            let text = reply.choices.into_iter().next().and_then(|choice| choice.message.content);
            let text = text.unwrap_or_default();
            let said = after_thinking(&text);
            let wrong = |what: String| Failure::Passing(format!("{what} `{}`", excerpt(&text)));
            let Some(questions) = &questions else {
                let value = number(said).filter(|value| (low..=high).contains(value));
                return value
                    .map(Some)
                    .ok_or_else(|| wrong(format!("no number in {low}..={high} in the reply")));
            };
            let verdict = questions.read(said, &code).map_err(wrong)?;
            let columns = BTreeMap::from([(self.name.clone(), vec![verdict.record.into()])]);
            self.log.add(range.clone(), Logged { metrics: verdict.numbers.into_iter().collect(), columns });
            Ok(Some(verdict.reward))
        })
    }

    fn unusable(&self, input: &RewardInput<'_>, what: String) -> RewardError {
        RewardError::Row { reward: self.name.clone(), row: row_name(0, input), what }
    }

    /// Returns the content of the message: a text, or a list of parts if the template has pictures. `asked` are the questions of a
    /// rubric and the completion's code.
    fn request(&self, input: &RewardInput<'_>, asked: Option<(&str, &str)>) -> Result<Value, RewardError> {
        let Some((before, after)) = self.template.split_once(IMAGES) else {
            return Ok(filled(&self.template, input, asked).into());
        };
        few_enough(input.media_paths.len()).map_err(|what| self.unusable(input, what))?;
        let mut parts = vec![json!({"type": "text", "text": filled(before, input, asked)})];
        for path in input.media_paths {
            let url = data_url(path).map_err(|what| self.unusable(input, what))?;
            parts.push(json!({"type": "image_url", "image_url": {"url": url}}));
        }
        parts.push(json!({"type": "text", "text": filled(after, input, asked)}));
        parts.retain(|part| part["text"].as_str().is_none_or(|text| !text.trim().is_empty()));
        Ok(parts.into())
    }
}

fn few_enough(num_images: usize) -> Result<(), String> {
    let few = num_images <= MAX_IMAGES;
    few.then_some(())
        .ok_or_else(|| format!("the row has {num_images} pictures; a judge accepts at most {MAX_IMAGES}"))
}

fn data_url(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let read =
        std::fs::File::open(path).and_then(|file| file.take(MAX_IMAGE_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|error| format!("{}: {error}", path.display()))?;
    let kind = image_type(path, &bytes)?;
    if bytes.len() as u64 > MAX_IMAGE_BYTES {
        return Err(format!(
            "{}: more than {MAX_IMAGE_BYTES} bytes; make the picture smaller",
            path.display()
        ));
    }
    Ok(format!("data:{kind};base64,{}", BASE64.encode(bytes)))
}

fn start_of(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(16).read_to_end(&mut bytes));
    read.map(|_| bytes).map_err(|error| format!("{}: {error}", path.display()))
}

fn image_type(path: &Path, bytes: &[u8]) -> Result<&'static str, String> {
    match bytes {
        [0x89, b'P', b'N', b'G', ..] => Ok("image/png"),
        [0xff, 0xd8, 0xff, ..] => Ok("image/jpeg"),
        [b'G', b'I', b'F', b'8', ..] => Ok("image/gif"),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Ok("image/webp"),
        _ => Err(format!(
            "{}: a judge can be sent PNG, JPEG, GIF and WebP pictures, which this is not",
            path.display()
        )),
    }
}

/// Fills the template with the row's texts. Braces in these texts are not placeholders.
fn filled(template: &str, input: &RewardInput<'_>, asked: Option<(&str, &str)>) -> String {
    let answer = content(input.completion, "answer", AnswerPolicy::Last).unwrap_or(input.completion);
    let solution = input.solution.unwrap_or_default();
    let accepted = golds(solution, AnswerPolicy::Last).map(|all| all.join(" or "));
    let solution = accepted.as_deref().unwrap_or(solution);
    let reference = if solution.is_empty() { String::new() } else { format!("Reference:\n{solution}\n\n") };
    let mut places = vec![
        ("{prompt}", input.prompt),
        ("{completion}", input.completion),
        ("{answer}", answer.trim()),
        ("{solution}", solution),
    ];
    if let Some((questions, code)) = asked {
        places.extend([("{questions}", questions), ("{code}", code), ("{reference}", &*reference)]);
    }
    let mut out = String::with_capacity(template.len() + input.prompt.len() + input.completion.len());
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some((place, text)) = places.iter().find(|(place, _)| rest.starts_with(place)) {
            out.push_str(text);
            rest = &rest[place.len()..];
        } else {
            out.push('{');
            rest = &rest[1..];
        }
    }
    out.push_str(rest);
    out
}

/// Returns what a reply says after the judge's thinking.
fn after_thinking(reply: &str) -> &str {
    let thought = tags(reply, &["think"]).filter(|tag| tag.close).last();
    thought.map_or(reply, |tag| &reply[tag.end..])
}

/// Returns the first number of a text.
fn number(reply: &str) -> Option<f64> {
    // The expression is constant. If it did not compile, the first test would fail.
    static NUMBER: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"-?\d+(?:\.\d+)?").ok());
    NUMBER.as_ref()?.find(reply)?.as_str().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::Value;

    use super::*;
    use crate::build;
    use crate::external::http::tests::server;
    use crate::testing::Row;

    #[test]
    fn asks_and_reads_the_score() {
        let address = server(|number, headers, body| {
            assert!(headers.starts_with("POST /v1/chat/completions"), "{headers}");
            assert!(headers.to_lowercase().contains("authorization: bearer key"), "{headers}");
            assert_eq!(body["model"], "grader");
            assert_eq!(body["temperature"], 0);
            let asked = body["messages"][0]["content"].as_str().unwrap();
            assert_eq!(asked, "Q: what {solution}? A: red / red ball");
            let reply = ["I cannot say", "<think>maybe 0.1</think> Score: 0.75"][number.min(1)];
            let reply: Value = json!({"choices": [{"message": {"role": "assistant", "content": reply}}]});
            Some((200, reply.to_string()))
        });
        let mut options = RewardOptions::default();
        options.external.backoff = Duration::from_millis(1);
        options.external.judge_model = "grader".to_owned();
        options.external.judge_api_key = Some("key".to_owned());
        options.external.judge_template = "Q: {prompt} A: {answer} / {solution}".to_owned();
        let set = build(&[format!("judge:http://{address}/v1/")], &options).unwrap();
        assert_eq!(set.names(), ["judge"]);
        let row = Row::new("what {solution}?", "<think>x</think><answer> red </answer>", "red ball");
        assert_eq!(set.score(&[row.input()]).unwrap().total, vec![Some(0.75)]);
    }

    #[test]
    fn pictures_are_sent_where_the_template_shows_them() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            std::fs::write(dir.path().join(name), bytes).unwrap();
            dir.path().join(name)
        };
        let png = write("a.bin", b"\x89PNG....");
        let address = server(|_, _, body| {
            let content = &body["messages"][0]["content"];
            let expected = json!([
                {"type": "text", "text": "Look: "},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORy4uLi4="}},
                {"type": "text", "text": " Is `red {images}` right?"},
            ]);
            assert_eq!(content, &expected);
            Some((200, json!({"choices": [{"message": {"content": "1"}}]}).to_string()))
        });
        let mut options = RewardOptions::default();
        options.external.retries = 0;
        options.external.judge_template = "Look: {images} Is `{answer}` right?".to_owned();
        let set = build(&[format!("judge:http://{address}")], &options).unwrap();
        let row = Row::new("q", "red {images}", "red");
        let with = |paths: &[std::path::PathBuf]| {
            let input = RewardInput { media_paths: paths, ..row.input() };
            let applies = set.applies(&input).map_err(|error| error.to_string());
            let scored = set.score(&[input]).map(|matrix| matrix.total).map_err(|error| error.to_string());
            (applies, scored)
        };
        assert_eq!(with(std::slice::from_ref(&png)), (Ok(vec![None]), Ok(vec![Some(1.0)])));
        let clip = write("clip.mp4", b"....ftypisom....");
        for (paths, part) in [
            (vec![clip], "PNG, JPEG, GIF and WebP"),
            (vec![dir.path().join("none.png")], "none.png"),
            (vec![png; 17], "17 pictures"),
        ] {
            let (applies, scored) = with(&paths);
            for error in [applies.unwrap_err(), scored.unwrap_err()] {
                assert!(error.contains(part) && error.contains("`judge`"), "{part}: {error}");
            }
        }
        let large = write("large.jpg", &[&[0xff, 0xd8, 0xff][..], &vec![0; 8 << 20]].concat());
        assert!(with(&[large]).1.unwrap_err().contains("make the picture smaller"));
    }

    #[test]
    fn no_score_is_an_error() {
        let address = server(|_, _, _| {
            let reply = json!({"choices": [{"message": {"content": "7"}}]});
            Some((200, reply.to_string()))
        });
        let mut options = RewardOptions::default();
        options.external.backoff = Duration::from_millis(1);
        options.external.retries = 1;
        let set = build(&[format!("judge:http://{address}")], &options).unwrap();
        let error = set.score(&[Row::new("q", "c", "s").input()]).unwrap_err().to_string();
        assert!(error.contains("no number in 0..=1") && error.contains("2 time(s)"), "{error}");
    }
}
