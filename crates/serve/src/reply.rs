//! Responses: tokens become text, calls of tools and log-probabilities, whole or as a stream of chunks.

use std::time::Instant;

use omnigrpo_http::Answer;
use omnigrpo_models::Prompt;
use omnigrpo_rollout::{FinishReason, Token};
use omnigrpo_text::{StreamDecoder, Tokenizer, ToolCall, split_calls};
use serde_json::{Map, Value, json};
use tokio::sync::{mpsc::UnboundedSender, oneshot};

use crate::error::Refusal;
use crate::request::{Form, Kind};

/// Recipient of a response.
pub(crate) enum Sink {
    /// Recipient of the whole response; `None` after it was sent.
    Whole(Option<oneshot::Sender<Answer>>),
    /// Recipient of a stream of events.
    Stream(UnboundedSender<Vec<u8>>),
}

/// Response in progress.
pub(crate) struct Reply {
    pub(crate) form: Form,
    pub(crate) sink: Sink,
    pub(crate) prompt_tokens: usize,
    /// Largest number of bytes that the request may take for keys, values and log-probabilities.
    pub(crate) bytes: u64,
    /// Time of the request's arrival.
    pub(crate) since: Instant,
    /// True if the request takes much memory, with its media.
    pub(crate) is_large: bool,
    id: String,
    created: u64,
    model: String,
    /// Texts that end a completion.
    stops: Vec<String>,
    choices: Vec<Choice>,
    /// The prompt, if the text begins with it, and the log-probabilities of its tokens.
    echo: (String, Vec<Value>),
}

/// One completion.
#[derive(Default)]
struct Choice {
    decoder: StreamDecoder,
    text: String,
    /// Number of bytes of the text that were sent in a stream.
    sent: usize,
    tokens: usize,
    logprobs: Vec<Value>,
    /// Number of characters of the tokens whose log-probabilities were sent in a stream.
    reported_chars: usize,
    message: Value,
    finish_reason: Value,
}

impl Reply {
    pub(crate) fn new(
        (form, sink): (Form, Sink),
        id: String,
        (model, created): (String, u64),
        (prompt_tokens, bytes): (usize, u64),
        (num_samples, stops): (usize, Vec<String>),
    ) -> Self {
        let choice = || Choice { decoder: StreamDecoder::new(form.skip_special), ..Choice::default() };
        let choices = (0..num_samples).map(|_| choice()).collect();
        let (since, is_large) = (Instant::now(), false);
        let echo = (String::new(), Vec::new());
        Self { form, sink, prompt_tokens, bytes, since, is_large, id, created, model, stops, choices, echo }
    }

    /// Begins every text with the prompt, whose tokens after the first have these log-probabilities, each with the most probable
    /// tokens in its place.
    pub(crate) fn begin_with(
        &mut self,
        tokenizer: &Tokenizer,
        prompt: &Prompt,
        scores: &[(f32, Vec<(u32, f32)>)],
    ) {
        let mut logprobs = Vec::new();
        if self.form.logprobs {
            // Nothing comes before the first token.
            let mut first = logprob(tokenizer, prompt.ids[0], 0.0, &[]);
            (first["logprob"], first["top_logprobs"]) = (Value::Null, Value::Null);
            logprobs.push(first);
            let rest = prompt.ids[1..].iter().zip(scores);
            logprobs.extend(rest.map(|(&id, (nats, top))| logprob(tokenizer, id, *nats, top)));
        }
        self.echo = (prompt.text.clone(), logprobs);
        if self.form.streams {
            let (text, logprobs) = std::mem::take(&mut self.echo);
            for index in 0..self.choices.len() {
                let logprobs = self.form.logprobs.then(|| logprobs.clone());
                self.send_choice(index, json!({ "content": text }), logprobs, Value::Null);
            }
        }
    }

    /// Ends all completions where they are.
    pub(crate) fn end(&mut self) {
        for index in 0..self.choices.len() {
            self.choices[index].finish_reason = "length".into();
            if self.form.streams {
                self.send_choice(index, json!({}), None, "length".into());
            }
        }
    }

    /// Returns true if the client has disconnected.
    pub(crate) fn is_unwanted(&self) -> bool {
        match &self.sink {
            Sink::Whole(sender) => sender.as_ref().is_none_or(oneshot::Sender::is_closed),
            Sink::Stream(sender) => sender.is_closed(),
        }
    }

    /// Returns the number of sampled tokens.
    pub(crate) fn num_tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.tokens).sum()
    }

    /// Returns true if every completion has ended.
    pub(crate) fn is_complete(&self) -> bool {
        self.choices.iter().all(|choice| !choice.finish_reason.is_null())
    }

    /// Adds a token to its completion.
    pub(crate) fn take(&mut self, tokenizer: &Tokenizer, token: &Token, is_stop: bool) {
        let Self { form, stops, choices, .. } = self;
        let Some(choice) = choices.get_mut(token.sample) else { return };
        let is_first = choice.tokens == 0;
        choice.tokens += 1;
        // The stop token is no part of the text.
        if form.skip_special || !is_stop {
            choice.text.push_str(&choice.decoder.push(tokenizer, token.id));
        }
        let logprobs =
            (form.logprobs && !is_stop).then(|| logprob(tokenizer, token.id, token.logprob, &token.top));
        let mut delta = json!({});
        if is_first && form.kind == Kind::Chat {
            delta["role"] = "assistant".into();
            delta["content"] = "".into();
        }
        match &token.end {
            None if form.streams => {
                choice.send_to(safe_end(&choice.text, stops, form.tools), &mut delta);
            }
            None => {}
            Some((reason, text)) => {
                choice.text.clone_from(text);
                let (said, calls) = if form.tools { split_calls(text) } else { (text.as_str(), Vec::new()) };
                let end = said.len();
                choice.finish_reason = match (reason, calls.is_empty()) {
                    (_, false) => "tool_calls".into(),
                    (FinishReason::Stop, true) => "stop".into(),
                    (FinishReason::Length, true) => "length".into(),
                };
                let content =
                    if calls.is_empty() || !said.trim().is_empty() { Value::from(said) } else { Value::Null };
                choice.message = json!({ "role": "assistant", "content": content, "refusal": null });
                choice.send_to(end, &mut delta);
                if !calls.is_empty() {
                    let name = format!("{}-{}", self.id, token.sample);
                    choice.message["tool_calls"] = calls_json(&name, &calls, false);
                    delta["tool_calls"] = calls_json(&name, &calls, true);
                }
            }
        }
        let end = choice.finish_reason.clone();
        if !form.streams {
            choice.logprobs.extend(logprobs);
            return;
        }
        let has_delta = delta.as_object().is_some_and(|delta| !delta.is_empty());
        if has_delta || logprobs.is_some() {
            let logprobs = form.logprobs.then(|| Vec::from_iter(logprobs));
            self.send_choice(token.sample, delta, logprobs, Value::Null);
        }
        if !end.is_null() {
            self.send_choice(token.sample, json!({}), None, end);
        }
    }

    /// Sends the rest of a complete response.
    pub(crate) fn finish(&mut self) {
        let completion_tokens = self.num_tokens();
        let usage = json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        });
        if self.form.streams {
            if self.form.usage_in_stream {
                let mut chunk = self.body(true, Vec::new());
                chunk["usage"] = usage;
                self.send(&chunk);
            }
            return self.send_event("[DONE]");
        }
        let (kind, with_logprobs, echo) =
            (self.form.kind, self.form.logprobs, std::mem::take(&mut self.echo));
        let each = |(index, choice): (usize, &mut Choice)| {
            let mut out = json!({ "index": index, "finish_reason": choice.finish_reason.take() });
            let own = std::mem::take(&mut choice.logprobs);
            match kind {
                Kind::Chat => out["message"] = choice.message.take(),
                Kind::Text => out["text"] = format!("{}{}", echo.0, choice.text).into(),
            }
            let logprobs = echo.1.iter().cloned().chain(own).collect();
            out["logprobs"] = with_logprobs.then(|| logprobs_json(kind, logprobs, &mut 0)).into();
            out
        };
        let choices = self.choices.iter_mut().enumerate().map(each).collect();
        let mut body = self.body(false, choices);
        body["usage"] = usage;
        self.answer(Answer::new(200, "application/json", body.to_string()));
    }

    /// Reports that the completions cannot be finished.
    pub(crate) fn fail(&mut self, refusal: &Refusal) {
        match self.form.streams {
            true => self.send(&refusal.json()),
            false => self.answer(refusal.answer()),
        }
    }

    fn answer(&mut self, answer: Answer) {
        if let Sink::Whole(sender) = &mut self.sink {
            // If the client has disconnected, nobody receives the response.
            let _ = sender.take().map(|sender| sender.send(answer));
        }
    }

    fn body(&self, is_chunk: bool, choices: Vec<Value>) -> Value {
        let object = match (self.form.kind, is_chunk) {
            (Kind::Chat, true) => "chat.completion.chunk",
            (Kind::Chat, false) => "chat.completion",
            (Kind::Text, _) => "text_completion",
        };
        json!({ "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices })
    }

    fn send_choice(
        &mut self,
        index: usize,
        delta: Value,
        logprobs: Option<Vec<Value>>,
        finish_reason: Value,
    ) {
        let kind = self.form.kind;
        let chars = &mut self.choices[index].reported_chars;
        let logprobs = logprobs.map(|logprobs| logprobs_json(kind, logprobs, chars));
        let mut choice = json!({ "index": index, "logprobs": logprobs, "finish_reason": finish_reason });
        match kind {
            Kind::Chat => choice["delta"] = delta,
            Kind::Text => choice["text"] = delta["content"].as_str().unwrap_or_default().into(),
        }
        let mut chunk = self.body(true, vec![choice]);
        if self.form.usage_in_stream {
            chunk["usage"] = Value::Null;
        }
        self.send(&chunk);
    }

    fn send(&self, value: &Value) {
        self.send_event(&value.to_string());
    }

    fn send_event(&self, data: &str) {
        if let Sink::Stream(sender) = &self.sink {
            let _ = sender.send(format!("data: {data}\n\n").into_bytes());
        }
    }
}

impl Choice {
    /// Adds the text up to a byte to a chunk, without what was sent before.
    fn send_to(&mut self, end: usize, delta: &mut Value) {
        let new = self.text.get(self.sent..end).unwrap_or_default();
        if !new.is_empty() {
            delta["content"] = new.into();
            self.sent = end;
        }
    }
}

/// Returns the length of the part of a text that cannot belong to a stop string or, with `tools`, to a call.
fn safe_end(text: &str, stops: &[String], tools: bool) -> usize {
    const CALL: &str = "<tool_call>";
    let begun = if tools { text.find(CALL) } else { None };
    let open = |of: &str| {
        (1..of.len()).rev().find(|&n| of.is_char_boundary(n) && text.ends_with(&of[..n])).unwrap_or(0)
    };
    let held = stops.iter().map(String::as_str).chain(tools.then_some(CALL)).map(open).max().unwrap_or(0);
    begun.unwrap_or(text.len()).min(text.len() - held)
}

fn calls_json(name: &str, calls: &[ToolCall], is_delta: bool) -> Value {
    let call = |(index, call): (usize, &ToolCall)| {
        let arguments = Value::Object(call.arguments.clone()).to_string();
        let mut out = json!({
            "id": format!("call-{name}-{index}"),
            "type": "function",
            "function": { "name": call.name, "arguments": arguments },
        });
        if is_delta {
            out["index"] = index.into();
        }
        out
    };
    calls.iter().enumerate().map(call).collect()
}

fn logprob(tokenizer: &Tokenizer, id: u32, nats: f32, top: &[(u32, f32)]) -> Value {
    let one = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id);
        // A probability of 0 has no number in JSON.
        let logprob = if logprob.is_finite() { logprob } else { -9999.0 };
        json!({ "token": String::from_utf8_lossy(&bytes), "logprob": logprob, "bytes": bytes })
    };
    let mut out = one(id, nats);
    out["top_logprobs"] = top.iter().map(|&(id, logprob)| one(id, logprob)).collect();
    out
}

/// Returns log-probabilities in the form of an address. For texts, `chars` is the number of characters of the tokens before.
fn logprobs_json(kind: Kind, logprobs: Vec<Value>, chars: &mut usize) -> Value {
    if kind == Kind::Chat {
        return json!({ "content": logprobs, "refusal": null });
    }
    let mut out = json!({ "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [] });
    let mut push = |name: &str, value: Value| out[name].as_array_mut().map(|list| list.push(value));
    for one in logprobs {
        // The most probable one of tokens with the same text counts. The token itself is always there.
        let mut top = Map::new();
        for own in one["top_logprobs"].as_array().into_iter().flatten().chain([&one]) {
            if let Some(token) = own["token"].as_str() {
                top.entry(token).or_insert_with(|| own["logprob"].clone());
            }
        }
        push("top_logprobs", if one["logprob"].is_null() { Value::Null } else { top.into() });
        push("token_logprobs", one["logprob"].clone());
        push("text_offset", (*chars).into());
        *chars += one["token"].as_str().unwrap_or_default().chars().count();
        push("tokens", one["token"].clone());
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_dir(&omnigrpo_testkit::checkpoint("qwen2_5_vl_tied")).unwrap()
    }

    fn form() -> Form {
        Form {
            kind: Kind::Chat,
            streams: false,
            usage_in_stream: false,
            logprobs: false,
            top_logprobs: 0,
            tools: false,
            skip_special: true,
            echo: false,
            echo_only: false,
        }
    }

    fn streamed(tools: bool, stops: &[&str]) -> (Reply, UnboundedReceiver<Vec<u8>>) {
        let (sender, receiver) = unbounded_channel();
        let form = Form { streams: true, tools, ..form() };
        let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let sink = Sink::Stream(sender);
        (Reply::new((form, sink), "id".to_owned(), ("m".to_owned(), 0), (1, 0), (1, stops)), receiver)
    }

    /// Passes a completion, token by token, and returns the deltas of the stream and the last finish reason.
    fn deltas(tools: bool, stops: &[&str], said: &str, text: &str) -> (Vec<Value>, Value) {
        let tokenizer = tokenizer();
        let (mut reply, mut receiver) = streamed(tools, stops);
        let ids = tokenizer.encode_text(said).unwrap();
        for (at, &id) in ids.iter().enumerate() {
            let end = (at + 1 == ids.len()).then(|| (FinishReason::Stop, text.to_owned()));
            let token = Token { job: 0, sample: 0, id, logprob: 0.0, top: Vec::new(), end };
            reply.take(&tokenizer, &token, false);
        }
        assert!(reply.is_complete() && reply.num_tokens() == ids.len());
        drop(reply);
        let mut choices: Vec<Value> = Vec::new();
        while let Ok(event) = receiver.try_recv() {
            let event = String::from_utf8(event).unwrap();
            let data: Value = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
            choices.push(data["choices"][0].clone());
        }
        let end = choices.last().unwrap()["finish_reason"].clone();
        (choices.into_iter().map(|mut choice| choice["delta"].take()).collect(), end)
    }

    fn content(deltas: &[Value]) -> String {
        deltas.iter().filter_map(|delta| delta["content"].as_str()).collect()
    }

    #[test]
    fn calls_are_separated_from_the_text() {
        let call = "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"box\": [1, 2]}}\n</tool_call>";
        let said = format!("I look. {call}\n{call}");
        let (found, end) = deltas(true, &[], &said, &said);
        assert_eq!((content(&found), end), ("I look. ".to_owned(), json!("tool_calls")));
        let calls: Vec<&Value> =
            found.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
        assert_eq!(calls.len(), 2);
        assert_eq!((&calls[1]["index"], &calls[1]["type"]), (&json!(1), &json!("function")));
        assert_eq!(calls[0]["function"], json!({ "name": "look", "arguments": "{\"box\":[1,2]}" }));
        assert_ne!(calls[0]["id"], calls[1]["id"]);
        // Without tools in the request, the same text is text; so is a call that cannot be read.
        let (found, end) = deltas(false, &[], &said, &said);
        assert_eq!((content(&found), end), (said.clone(), json!("stop")));
        let broken = "Now <tool_call>{</tool_call>";
        let (found, end) = deltas(true, &[], broken, broken);
        assert_eq!((content(&found), end), (broken.to_owned(), json!("stop")));
    }

    #[test]
    fn no_part_of_a_stop_string_or_call_is_sent_early() {
        let (found, _) = deltas(false, &["END."], "an EN of the END.", "an EN of the ");
        assert_eq!(content(&found), "an EN of the ");
        let (found, _) = deltas(true, &[], "a < b, <tool> c", "a < b, <tool> c");
        assert_eq!(content(&found), "a < b, <tool> c");
        assert_eq!(safe_end("2 <tool", &[], true), 2);
        assert_eq!(safe_end("2 <tool", &[], false), 7);
        assert_eq!(safe_end("é", &["éa".to_owned()], false), 0);
    }

    #[test]
    fn a_whole_answer_has_the_calls_and_a_failed_one_its_reason() {
        let tokenizer = tokenizer();
        let (sender, mut receiver) = oneshot::channel();
        let form = Form { logprobs: true, tools: true, ..form() };
        let sink = Sink::Whole(Some(sender));
        let mut reply =
            Reply::new((form, sink), "id".to_owned(), ("m".to_owned(), 0), (1, 0), (1, Vec::new()));
        let text = "<tool_call>{\"name\": \"now\"}</tool_call>";
        let end = Some((FinishReason::Length, text.to_owned()));
        let token = Token { job: 0, sample: 0, id: 5, logprob: f32::NEG_INFINITY, top: vec![(6, -0.5)], end };
        reply.take(&tokenizer, &token, false);
        let message = &reply.choices[0].message;
        assert_eq!(
            (&message["content"], &message["tool_calls"][0]["function"]["name"]),
            (&Value::Null, &json!("now"))
        );
        assert_eq!(reply.choices[0].finish_reason, "tool_calls");
        assert_eq!(reply.choices[0].logprobs[0]["logprob"], -9999.0);
        assert_eq!(reply.choices[0].logprobs[0]["top_logprobs"][0]["logprob"], -0.5);
        assert!(!reply.is_unwanted());
        reply.finish();
        assert!(receiver.try_recv().is_ok() && reply.is_unwanted());
        // A stream that fails says why.
        let (mut reply, mut receiver) = streamed(false, &[]);
        reply.fail(&Refusal::new(hyper::StatusCode::INTERNAL_SERVER_ERROR, "no memory"));
        let event = String::from_utf8(receiver.try_recv().unwrap()).unwrap();
        assert!(event.starts_with("data: {\"error\":") && event.contains("no memory"), "{event}");
        drop(receiver);
        assert!(reply.is_unwanted());
    }
}
