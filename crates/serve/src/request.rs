//! Requests of OpenAI's API, checked. A field that would change the answer and is unsupported is an error, and so is an unknown
//! field.

use std::sync::Arc;

use hyper::StatusCode;
use omnigrpo_data::{ReadOptions, RowReader, Sample};
use omnigrpo_guard::told;
use omnigrpo_models::PromptBuilder;
use omnigrpo_rollout::{Job, SamplingParams};
use omnigrpo_text::StopSet;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::error::Refusal;

/// Largest number of completions of a request.
const MAX_SAMPLES: usize = 128;
/// Largest number of stop strings of a request, and of their bytes.
const MAX_STOPS: (usize, usize) = (16, 1024);
/// Largest number of reported tokens at each place.
const MAX_TOP: usize = 20;
/// Number of bytes that the tokens of a text have at most, on average. Longer texts are refused before they are tokenised.
const MAX_TOKEN_BYTES: usize = 32;
/// Largest number of tools of a request.
const MAX_TOOLS: usize = 128;

/// Number of tokens of a continued text without `max_tokens`, as in OpenAI's API.
const DEFAULT_TEXT_TOKENS: usize = 16;

/// Fields that concern OpenAI's own service.
const OF_OPENAI: [&str; 6] =
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"];
/// Variables of a chat template that `chat_template_kwargs` cannot have, since the request determines them.
const OF_REQUEST: [&str; 7] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
];

/// Body of `/v1/chat/completions`.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatRequest {
    messages: Vec<Value>,
    max_completion_tokens: Option<usize>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    #[serde(flatten)]
    common: Common,
    // Fields that change the answer and are unsupported.
    response_format: Option<Value>,
    parallel_tool_calls: Option<bool>,
    modalities: Option<Vec<String>>,
    reasoning_effort: Option<String>,
}

/// Body of `/v1/completions`.
#[derive(Debug, Deserialize)]
pub(crate) struct TextRequest {
    prompt: Value,
    logprobs: Option<usize>,
    echo: Option<bool>,
    #[serde(flatten)]
    common: Common,
    // Fields that change the answer and are unsupported.
    best_of: Option<usize>,
    suffix: Option<String>,
}

/// Fields of both addresses.
#[derive(Debug, Deserialize)]
struct Common {
    model: Option<String>,
    n: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<Stops>,
    max_tokens: Option<usize>,
    min_tokens: Option<usize>,
    skip_special_tokens: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    // Fields that change the answer and are unsupported.
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    logit_bias: Option<Map<String, Value>>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "stop: expected a text or a list of texts")]
enum Stops {
    One(String),
    Several(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Address of a request, which determines the form of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Answer to a conversation, `/v1/chat/completions`.
    Chat,
    /// Continued text, `/v1/completions`.
    Text,
}

/// Requested form of the response.
#[derive(Debug)]
pub(crate) struct Form {
    pub(crate) kind: Kind,
    pub(crate) streams: bool,
    pub(crate) usage_in_stream: bool,
    pub(crate) logprobs: bool,
    /// Number of the most probable tokens to report at each place.
    pub(crate) top_logprobs: usize,
    /// True if calls of tools are separated from the text.
    pub(crate) tools: bool,
    /// True if control tokens are no part of the text.
    pub(crate) skip_special: bool,
    /// True if the text begins with the prompt.
    pub(crate) echo: bool,
    /// True if the prompt is all that is wanted.
    pub(crate) echo_only: bool,
}

/// Settings of a server that concern requests.
pub(crate) struct Settings {
    pub(crate) prompts: PromptBuilder,
    pub(crate) read: ReadOptions,
    /// Defaults of requests.
    pub(crate) sampling: SamplingParams,
    pub(crate) max_live: usize,
    pub(crate) max_bytes: u64,
}

impl Settings {
    fn positions(&self) -> usize {
        self.prompts.family().architecture().decoder_config().max_positions
    }
}

/// Largest size of a reported log-probability with its token, as a part of a response.
const LOGPROB_BYTES: u64 = 1024;

/// Returns the size of the keys and values of some tokens. A number has at most four bytes.
fn cache_bytes(settings: &Settings, tokens: usize) -> u64 {
    let decoder = settings.prompts.family().architecture().decoder_config();
    let numbers = 2 * decoder.layers * decoder.heads.kv_width();
    (tokens as u64).saturating_mul(4 * numbers as u64)
}

/// A request of either address.
#[derive(Debug)]
pub(crate) enum Body {
    Chat(Box<ChatRequest>),
    Text(Box<TextRequest>),
}

impl Body {
    pub(crate) fn parse(kind: Kind, body: &[u8]) -> Result<Self, Refusal> {
        let mut body: Map<String, Value> = serde_json::from_slice(body).map_err(unreadable)?;
        body.retain(|name, _| !OF_OPENAI.contains(&name.as_str()));
        let body = Value::Object(body);
        let parsed = match kind {
            Kind::Chat => Self::Chat(serde_json::from_value(body).map_err(unreadable)?),
            Kind::Text => Self::Text(serde_json::from_value(body).map_err(unreadable)?),
        };
        match parsed.common().unknown.keys().next() {
            Some(name) => {
                let why = format!("the body is not a request of this API: unknown field `{name}`");
                Err(Refusal::new(StatusCode::BAD_REQUEST, why))
            }
            None => Ok(parsed),
        }
    }

    fn common(&self) -> &Common {
        match self {
            Self::Chat(chat) => &chat.common,
            Self::Text(text) => &text.common,
        }
    }

    /// Returns the name of the model that is asked.
    pub(crate) fn model(&self) -> Option<&str> {
        self.common().model.as_deref()
    }

    /// Checks what can be known without media and prompt. `random_seed` is the seed of a request without one.
    pub(crate) fn plan(self, settings: &Settings, random_seed: u64) -> Result<Plan, Refusal> {
        match self {
            Self::Chat(chat) => chat.plan(settings, random_seed),
            Self::Text(text) => text.plan(settings, random_seed),
        }
    }
}

fn refuse(is_given: bool, name: &'static str, why: &str) -> Result<(), Refusal> {
    match is_given {
        true => Err(Refusal::of(name, format!("{name} is unsupported; {why}"))),
        false => Ok(()),
    }
}

impl ChatRequest {
    fn plan(mut self, settings: &Settings, random_seed: u64) -> Result<Plan, Refusal> {
        self.refuse_unsupported()?;
        let (num_samples, mut form) = self.common.form(Kind::Chat, settings)?;
        form.top_logprobs = self.top_logprobs.unwrap_or(0);
        form.logprobs = self.logprobs.unwrap_or(false);
        let top = form.top_logprobs;
        if top > MAX_TOP || (top > 0 && !form.logprobs) {
            let why = format!("top_logprobs is {top}; expected from 0 to {MAX_TOP}, with logprobs true");
            return Err(Refusal::of("top_logprobs", why));
        }
        form.tools = self.tools_to_call()?;
        let tools = self.tools.take().filter(|_| form.tools).unwrap_or_default();
        let messages = messages_of_row(std::mem::take(&mut self.messages), settings.positions())?;
        let variables = self.chat_template_kwargs.take().unwrap_or_default();
        if let Some(name) = OF_REQUEST.into_iter().find(|name| variables.contains_key(*name)) {
            let why = format!(
                "chat_template_kwargs has `{name}`, which follows from the request; expected variables of the model's template, \
                 such as enable_thinking"
            );
            return Err(Refusal::of("chat_template_kwargs", why));
        }
        let asked = Asked::Conversation { messages, tools, variables };
        let max_tokens = self.max_completion_tokens.or(self.common.max_tokens);
        self.common.plan(settings, random_seed, (form, num_samples), asked, max_tokens)
    }

    fn refuse_unsupported(&self) -> Result<(), Refusal> {
        let format = self.response_format.as_ref().is_some_and(|format| format["type"] != "text");
        refuse(format, "response_format", "ask for the format in a message")?;
        refuse(
            self.parallel_tool_calls == Some(false),
            "parallel_tool_calls",
            "the model decides how many tools it calls",
        )?;
        let spoken = self.modalities.as_ref().is_some_and(|list| list.iter().any(|kind| kind != "text"));
        refuse(spoken, "modalities", "the model answers with text")?;
        refuse(
            self.reasoning_effort.is_some(),
            "reasoning_effort",
            "leave it out, or give a variable of the model's template in chat_template_kwargs",
        )
    }

    /// Returns true if the model may call tools.
    fn tools_to_call(&self) -> Result<bool, Refusal> {
        let tools = self.tools.as_deref().unwrap_or_default();
        let is_tool = |tool: &Value| tool["type"] == "function" && tool["function"]["name"].is_string();
        if tools.len() > MAX_TOOLS || !tools.iter().all(is_tool) {
            let expected = r#"{"type": "function", "function": {"name": …, "parameters": {…}}}"#;
            return Err(Refusal::of(
                "tools",
                format!("tools must be a list of at most {MAX_TOOLS} objects {expected}"),
            ));
        }
        match &self.tool_choice {
            None => Ok(!tools.is_empty()),
            Some(Value::String(choice)) if choice == "none" => Ok(false),
            Some(Value::String(choice)) if choice == "auto" && !tools.is_empty() => Ok(true),
            Some(choice) => {
                let why =
                    "expected auto (with tools) or none, since the model decides whether it calls a tool";
                Err(Refusal::of("tool_choice", format!("tool_choice is {choice}; {why}")))
            }
        }
    }
}

impl TextRequest {
    fn plan(mut self, settings: &Settings, random_seed: u64) -> Result<Plan, Refusal> {
        let (num_samples, mut form) = self.common.form(Kind::Text, settings)?;
        let other = self.best_of.is_some_and(|best_of| best_of != num_samples);
        refuse(other, "best_of", "leave it out, and ask for n completions")?;
        refuse(self.suffix.is_some(), "suffix", "the model continues the prompt")?;
        form.logprobs = self.logprobs.is_some();
        form.top_logprobs = self.logprobs.unwrap_or(0);
        if form.top_logprobs > MAX_TOP {
            let why = format!("logprobs is {}; expected from 0 to {MAX_TOP}", form.top_logprobs);
            return Err(Refusal::of("logprobs", why));
        }
        form.echo = self.echo.unwrap_or(false);
        form.echo_only = form.echo && self.common.max_tokens == Some(0);
        let asked = prompt_of(self.prompt.take())?;
        let max_tokens = self.common.max_tokens.filter(|_| !form.echo_only);
        let max_tokens = max_tokens.or(form.echo_only.then_some(1));
        self.common.plan(settings, random_seed, (form, num_samples), asked, max_tokens)
    }
}

/// Reads the prompt of a text to continue: a text or its tokens, alone or as the only entry of a list.
fn prompt_of(mut prompt: Value) -> Result<Asked, Refusal> {
    let wrong = |why: &str| Refusal::of("prompt", format!("the prompt {why}"));
    if let Value::Array(entries) = &mut prompt
        && entries.first().is_some_and(|first| first.is_string() || first.is_array())
    {
        if entries.len() > 1 {
            return Err(wrong("is a list; send a request for each of them"));
        }
        prompt = entries.remove(0);
    }
    match prompt {
        Value::String(text) if !text.is_empty() => Ok(Asked::Text(text)),
        Value::Array(ids) if !ids.is_empty() => {
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
            let ids = ids.iter().map(id).collect::<Option<Vec<_>>>();
            ids.map(Asked::Tokens).ok_or_else(|| wrong("must be a text or a list of token ids"))
        }
        Value::String(_) | Value::Array(_) => Err(wrong("is empty")),
        _ => Err(wrong("must be a text or a list of token ids")),
    }
}

impl Common {
    /// Returns the number of completions, and the form of the response as far as these fields say it.
    fn form(&self, kind: Kind, settings: &Settings) -> Result<(usize, Form), Refusal> {
        let penalty = |given: Option<f64>| given.is_some_and(|given| given != 0.0);
        refuse(penalty(self.frequency_penalty), "frequency_penalty", "use repetition_penalty")?;
        refuse(penalty(self.presence_penalty), "presence_penalty", "use repetition_penalty")?;
        let biased = self.logit_bias.as_ref().is_some_and(|bias| !bias.is_empty());
        refuse(biased, "logit_bias", "leave it out")?;
        let num_samples = self.n.unwrap_or(1);
        let most = MAX_SAMPLES.min(settings.max_live);
        if !(1..=most).contains(&num_samples) {
            return Err(Refusal::of("n", format!("n is {num_samples}; expected from 1 to {most}")));
        }
        let streams = self.stream.unwrap_or(false);
        if self.stream_options.is_some() && !streams {
            return Err(Refusal::of("stream_options", "stream_options needs stream true"));
        }
        let usage = self.stream_options.as_ref().and_then(|options| options.include_usage);
        let form = Form {
            kind,
            streams,
            usage_in_stream: usage.unwrap_or(false),
            logprobs: false,
            top_logprobs: 0,
            tools: false,
            skip_special: self.skip_special_tokens.unwrap_or(true),
            echo: false,
            echo_only: false,
        };
        Ok((num_samples, form))
    }

    fn plan(
        mut self,
        settings: &Settings,
        random_seed: u64,
        (form, num_samples): (Form, usize),
        asked: Asked,
        max_tokens: Option<usize>,
    ) -> Result<Plan, Refusal> {
        let stops = self.stops(settings.prompts.stops())?;
        let mut params = self.params(&settings.sampling, random_seed)?;
        if form.kind == Kind::Text {
            params.max_completion_length = DEFAULT_TEXT_TOKENS;
        }
        params.max_completion_length = max_tokens.unwrap_or(params.max_completion_length);
        validate(&params)?;
        let (param, bytes, positions) = (asked.param(), asked.text_bytes(), settings.positions());
        if bytes > MAX_TOKEN_BYTES * positions {
            let why = format!("{param} has {bytes} bytes of text, which do not fit {positions} positions");
            return Err(Refusal::of(param, why));
        }
        Ok(Plan { form, asked, num_samples, params, max_tokens, stops })
    }

    /// Returns the model's stops with those of the request.
    fn stops(&mut self, model: &StopSet) -> Result<StopSet, Refusal> {
        let given = match self.stop.take() {
            None => Vec::new(),
            Some(Stops::One(one)) => vec![one],
            Some(Stops::Several(several)) => several,
        };
        let (count, bytes) = MAX_STOPS;
        if given.len() > count || given.iter().any(|stop| stop.is_empty() || stop.len() > bytes) {
            let why =
                format!("stop must be a text of 1 to {bytes} bytes, or a list of at most {count} such texts");
            return Err(Refusal::of("stop", why));
        }
        let mut stops = model.clone();
        for stop in given {
            if !stops.strings.contains(&stop) {
                stops.strings.push(stop);
            }
        }
        Ok(stops)
    }

    fn params(&self, defaults: &SamplingParams, random_seed: u64) -> Result<SamplingParams, Refusal> {
        // -1 means all tokens, as in vLLM.
        let top_k = match self.top_k {
            None => defaults.top_k,
            Some(-1) => 0,
            Some(given) => usize::try_from(given).map_err(|_| {
                Refusal::of(
                    "top_k",
                    format!("top_k is {given}; expected -1 or 0 for all tokens, or a number above"),
                )
            })?,
        };
        Ok(SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k,
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            min_completion_length: self.min_tokens.unwrap_or(defaults.min_completion_length),
            logprob_temperature: Some(1.0),
            seed: self.seed.map_or(random_seed, |seed| seed as u64),
            turns: None,
            max_completion_length: defaults.max_completion_length,
        })
    }
}

/// Input of the model.
enum Asked {
    /// Messages as rows of a dataset have them, with descriptions of tools and variables of the template.
    Conversation { messages: Vec<Value>, tools: Vec<Value>, variables: Map<String, Value> },
    /// Text that the model continues.
    Text(String),
    /// Tokens that the model continues.
    Tokens(Vec<u32>),
}

impl Asked {
    /// Returns the name of the field.
    fn param(&self) -> &'static str {
        match self {
            Self::Conversation { .. } => "messages",
            Self::Text(_) | Self::Tokens(_) => "prompt",
        }
    }

    /// Returns the size of the text to tokenise. Each token of a list counts as a byte.
    fn text_bytes(&self) -> usize {
        match self {
            Self::Conversation { messages, tools, variables } => {
                let variables = variables.values().map(|value| value.to_string().len());
                text_bytes(messages, tools) + variables.sum::<usize>()
            }
            Self::Text(text) => text.len(),
            Self::Tokens(ids) => ids.len(),
        }
    }
}

/// A request whose fields are checked, before its media are read.
pub(crate) struct Plan {
    pub(crate) form: Form,
    asked: Asked,
    num_samples: usize,
    params: SamplingParams,
    /// Limit of the request, in tokens.
    max_tokens: Option<usize>,
    stops: StopSet,
}

impl Plan {
    /// Returns true if a message has a picture, clip or sound.
    pub(crate) fn has_media(&self) -> bool {
        let is_medium = |part: &Value| part["type"] != "text";
        let has_medium =
            |message: &Value| message["content"].as_array().is_some_and(|parts| parts.iter().any(is_medium));
        matches!(&self.asked, Asked::Conversation { messages, .. } if messages.iter().any(has_medium))
    }

    /// Reads the media and builds the prompt. The last result is the largest number of bytes that the request may take for keys,
    /// values and log-probabilities.
    pub(crate) fn job(self, settings: &Settings) -> Result<(Job, Form, u64), Refusal> {
        let Self { form, asked, num_samples, mut params, max_tokens, stops } = self;
        let prompts = &settings.prompts;
        let prompt = match asked {
            Asked::Conversation { messages, tools, variables } => {
                let prompts = prompts.with_tools(tools).with_variables(variables);
                let sample = sample(messages, &settings.read)?;
                prompts.build(&sample.0).map_err(|error| sample.1.refusal(&error))?
            }
            Asked::Text(text) => prompts.continuing(&text).map_err(|e| Refusal::about("prompt", &e))?,
            Asked::Tokens(ids) => prompts.continuing_tokens(ids).map_err(|e| Refusal::about("prompt", &e))?,
        };
        let (tokens, positions) = (prompt.ids.len(), settings.positions());
        let left = positions.saturating_sub(tokens);
        params.max_completion_length = match max_tokens {
            None => params.max_completion_length.min(left),
            Some(max_tokens) if max_tokens <= left => max_tokens,
            Some(max_tokens) => {
                let why = format!(
                    "the prompt has {tokens} tokens and max_tokens is {max_tokens}, but the model has {positions} positions; expected \
                     at most {left} tokens"
                );
                return Err(Refusal::of("max_tokens", why));
            }
        };
        validate(&params)?;
        let own = num_samples.saturating_mul(params.max_completion_length);
        let echoed = if form.echo { num_samples.saturating_mul(tokens) } else { 0 };
        let top_logprobs = form.top_logprobs;
        let reported =
            if form.logprobs { own.saturating_add(echoed).saturating_mul(1 + top_logprobs) } else { 0 };
        let bytes = cache_bytes(settings, own.saturating_add(tokens))
            .saturating_add(LOGPROB_BYTES.saturating_mul(reported as u64));
        if bytes > settings.max_bytes {
            let why = format!(
                "the request may take {bytes} bytes for keys, values and log-probabilities of {num_samples} completions with \
                 {} tokens each; the server has {} bytes; lower max_tokens, n or top_logprobs, or shorten the messages",
                params.max_completion_length, settings.max_bytes
            );
            return Err(Refusal::of("max_tokens", why));
        }
        let skip_special = form.skip_special;
        let job = Job { prompt: Arc::new(prompt), num_samples, params, stops, top_logprobs, skip_special };
        Ok((job, form, bytes))
    }
}

/// Checks sampling parameters, under the names of the API.
fn validate(params: &SamplingParams) -> Result<(), Refusal> {
    params.validate().map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, api_name(&error.to_string())))
}

fn unreadable(error: serde_json::Error) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, format!("the body is not a request of this API: {}", told(&error)))
}

/// Replaces the names of parameters in an error by those of the API.
fn api_name(message: &str) -> String {
    message.replace("max_completion_length", "max_tokens").replace("min_completion_length", "min_tokens")
}

/// Folder of the media of a request, which is removed with it.
struct MediaFolder(tempfile::TempDir);

impl MediaFolder {
    /// Creates the reason from an error, without the path of the folder.
    fn refusal(&self, error: &(dyn std::error::Error + 'static)) -> Refusal {
        let refusal = Refusal::about("messages", error);
        let folder = format!("{}/", self.0.path().join("media").display());
        Refusal { message: refusal.message.replace(&folder, ""), ..refusal }
    }
}

/// Returns messages as rows of a dataset have them. There are at most as many as the model has positions.
fn messages_of_row(messages: Vec<Value>, positions: usize) -> Result<Vec<Value>, Refusal> {
    if messages.len() > positions {
        let why = format!("{} messages do not fit the model's {positions} positions", messages.len());
        return Err(Refusal::of("messages", why));
    }
    let ends_open =
        messages.last().is_some_and(|last| matches!(last["role"].as_str(), Some("user" | "tool")));
    if !ends_open {
        return Err(Refusal::of("messages", "the last message must be from the user or a tool"));
    }
    if messages.first().is_some_and(|first| first["role"] == "assistant") {
        return Err(Refusal::of("messages", "the first message must not be from the assistant"));
    }
    let read_message = |(at, message)| message_of_row(at, message);
    messages.into_iter().enumerate().map(read_message).collect()
}

/// Returns the size of the text to tokenise.
fn text_bytes(messages: &[Value], tools: &[Value]) -> usize {
    let part = |part: &Value| part["text"].as_str().map_or(0, str::len);
    let content = |content: &Value| match content {
        Value::Array(parts) => parts.iter().map(part).sum(),
        content => content.as_str().map_or(0, str::len),
    };
    let message = |message: &Value| content(&message["content"]) + message["tool_calls"].to_string().len();
    let tools = tools.iter().map(|tool| tool.to_string().len());
    messages.iter().map(message).chain(tools).sum()
}

/// Reads messages as a row of a dataset. Media are stored in a folder for the time of the request.
fn sample(messages: Vec<Value>, read: &ReadOptions) -> Result<(Sample, MediaFolder), Refusal> {
    let unavailable =
        |error: std::io::Error| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string());
    let folder = MediaFolder(tempfile::tempdir().map_err(unavailable)?);
    let read = ReadOptions { cache_dir: Some(folder.0.path().to_owned()), ..read.clone() };
    let row = json!({ "id": "request", "messages": messages });
    let sample = RowReader::new("request")
        .media_in(folder.0.path())
        .options(read)
        .sample(row)
        .map_err(|error| folder.refusal(&error))?;
    Ok((sample, folder))
}

/// Returns a message as rows of a dataset have it: texts are parts, so that no placeholder in them counts, and media are addresses.
fn message_of_row(at: usize, mut message: Value) -> Result<Value, Refusal> {
    let wrong = |what: String| Refusal::of("messages", format!("messages[{at}]: {what}"));
    let role = match message["role"].as_str() {
        Some("developer") => "system".to_owned(),
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role.to_owned(),
        _ => return Err(wrong("the role must be system, developer, user, assistant or tool".to_owned())),
    };
    let calls = message["tool_calls"].take();
    let content = match message["content"].take() {
        Value::String(text) if role == "assistant" => Value::String(text),
        Value::String(text) => json!([{ "type": "text", "text": text }]),
        Value::Array(parts) => {
            let part = |part| part_of_row(part).map_err(&wrong);
            let parts = parts.into_iter().map(part).collect::<Result<Vec<_>, _>>()?;
            // Calls of tools follow a text.
            match (role.as_str(), parts.iter().map(|part| part["text"].as_str()).collect::<Option<String>>())
            {
                ("assistant", Some(text)) => Value::String(text),
                _ => Value::Array(parts),
            }
        }
        Value::Null if role == "assistant" && !calls.is_null() => Value::Null,
        other => {
            return Err(wrong(format!("the content {} must be a text or a list of parts", shown(&other))));
        }
    };
    let mut out = json!({ "role": role, "content": content });
    if !calls.is_null() {
        out["tool_calls"] = calls;
    }
    Ok(out)
}

/// Options of a medium that a part may set.
const OPTIONS: [&str; 11] = [
    "fps",
    "nframes",
    "min_frames",
    "max_frames",
    "min_pixels",
    "max_pixels",
    "total_pixels",
    "resized_height",
    "resized_width",
    "video_start",
    "video_end",
];

fn part_of_row(part: Value) -> Result<Value, String> {
    let kind = part["type"].as_str().unwrap_or_default().to_owned();
    let address = |kind: &str| {
        let given = &part[format!("{kind}_url")];
        let given = if given.is_null() { &part[kind] } else { given };
        given.as_str().or_else(|| given["url"].as_str()).map(str::to_owned)
    };
    let (kind, address) = match kind.as_str() {
        "text" if part["text"].is_string() => return Ok(json!({ "type": "text", "text": part["text"] })),
        "input_audio" => {
            let sound = &part["input_audio"];
            let data = sound["data"].as_str().map(|data| {
                format!("data:audio/{};base64,{data}", sound["format"].as_str().unwrap_or("wav"))
            });
            ("audio", data)
        }
        "image_url" | "image" => ("image", address("image")),
        "video_url" | "video" => ("video", address("video")),
        "audio_url" | "audio" => ("audio", address("audio")),
        other => {
            return Err(format!(
                "a part has the type {other:?}; expected text, image_url, video_url, audio_url or input_audio with its value"
            ));
        }
    };
    // A path would let a client read files of this machine.
    let is_address =
        |text: &String| ["data:", "http://", "https://"].iter().any(|scheme| text.starts_with(scheme));
    let address = address.filter(is_address).ok_or_else(|| {
        format!("the {kind} must be an address that begins with `data:`, `http://` or `https://`; files of this machine are not read")
    })?;
    let mut out = json!({ "type": kind, kind: address });
    for name in OPTIONS {
        if let Some(value) = part.get(name) {
            out[name] = value.clone();
        }
    }
    Ok(out)
}

fn shown(value: &Value) -> String {
    value.to_string().chars().take(40).collect()
}
