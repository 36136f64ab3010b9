//! `judge:http(s)://host/v1`: a language model behind an OpenAI-compatible endpoint gives the score.
//!
//! One request per completion, at temperature 0; the score is the first number of the reply (after its thinking, if it
//! has any). A reply without a number in the range is asked for again, then an error: a judge that does not answer must
//! not count as "wrong".

use std::sync::LazyLock;

use regex::Regex;
use serde::Deserialize;
use serde_json::json;

use super::http::Client;
use super::{ExternalOptions, Failure, attempts, excerpt, rows_name, spread};
use crate::tags::{content, tags};
use crate::{AnswerPolicy, Reward, RewardError, RewardInput, RewardOptions};

/// Asked by default.
pub(super) const TEMPLATE: &str = "You grade answers. Compare the answer with the reference.\n\n\
    Question:\n{prompt}\n\nReference:\n{solution}\n\nAnswer to grade:\n{answer}\n\n\
    Reply with one number from 0 (wrong) to 1 (right) and nothing else.";

struct Judge {
    name: String,
    url: String,
    options: ExternalOptions,
    client: Client,
}

pub(super) fn reward(
    url: &str,
    name: String,
    options: &RewardOptions,
) -> Result<Box<dyn Reward>, RewardError> {
    let options = options.external.clone();
    let client = Client::new(url, &name, &options, options.judge_api_key.as_deref())?;
    let url = format!("{}/chat/completions", url.trim_end_matches('/'));
    Ok(Box::new(Judge { name, url, options, client }))
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
        self.options.range.unwrap_or((0.0, 1.0))
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        let (low, high) = self.range();
        spread(batch, 1, self.options.pool_size, |_, range, rows| {
            let named = rows_name(&range, batch);
            let mut values = Vec::with_capacity(rows.len());
            for input in rows {
                let question = filled(&self.options.judge_template, input);
                let body = json!({
                    "model": self.options.judge_model,
                    "temperature": 0,
                    "messages": [{"role": "user", "content": question}],
                });
                let value = attempts(&self.name, &named, &self.options, self.options.backoff, || {
                    let reply: Reply = self.client.post(&self.url, &body)?;
                    let text = reply.choices.into_iter().next().and_then(|choice| choice.message.content);
                    let text = text.unwrap_or_default();
                    number(&text).filter(|value| (low..=high).contains(value)).ok_or_else(|| {
                        Failure::Passing(format!(
                            "no number in {low}..={high} in the reply `{}`",
                            excerpt(&text)
                        ))
                    })
                })?;
                values.push(Some(value));
            }
            Ok(values)
        })
    }
}

/// The template with the row's texts. Braces inside those texts stay as they are.
fn filled(template: &str, input: &RewardInput<'_>) -> String {
    let answer = content(input.completion, "answer", AnswerPolicy::Last).unwrap_or(input.completion);
    let mut out = String::with_capacity(template.len() + input.prompt.len() + input.completion.len());
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let places = [
            ("{prompt}", input.prompt),
            ("{completion}", input.completion),
            ("{answer}", answer.trim()),
            ("{solution}", input.solution.unwrap_or_default()),
        ];
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

/// The first number after the judge's own thinking.
fn number(reply: &str) -> Option<f64> {
    // A constant expression that does not compile would be found by the first test.
    static NUMBER: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"-?\d+(?:\.\d+)?").ok());
    let thought = tags(reply, &["think"]).filter(|tag| tag.close).last();
    let reply = thought.map_or(reply, |tag| &reply[tag.end..]);
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
