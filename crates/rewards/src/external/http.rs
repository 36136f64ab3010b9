//! `http://…`, `https://…`: an endpoint that receives a request as a POST with a JSON body and answers with JSON.
//!
//! After connection errors, time-outs and the statuses 408, 429 and 5xx, the request is sent again after a wait that doubles.
//! Other statuses are final. Redirects are not followed, so rows go only to the given address. `https` needs this crate's feature
//! of that name.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{
    Answer, ExternalOptions, Failure, Log, Request, answer_of, attempts, excerpt, redacted, rows_name,
    same_id, spread, values,
};
use crate::contract::Logged;
use crate::{Reward, RewardError, RewardInput, RewardOptions};

const MAX_ANSWER_BYTES: u64 = 64 << 20;

struct HttpReward {
    name: String,
    url: String,
    options: ExternalOptions,
    client: Client,
    next_id: AtomicU64,
    log: Log,
}

pub(super) fn reward(
    url: &str,
    name: String,
    options: &RewardOptions,
) -> Result<Box<dyn Reward>, RewardError> {
    let options = options.external.clone();
    let client = Client::new(url, &name, &options, None)?;
    let (url, next_id, log) = (url.to_owned(), AtomicU64::new(0), Log::default());
    Ok(Box::new(HttpReward { name, url, options, client, next_id, log }))
}

impl Reward for HttpReward {
    fn name(&self) -> &str {
        &self.name
    }

    fn range(&self) -> (f64, f64) {
        self.options.range.unwrap_or((f64::NEG_INFINITY, f64::INFINITY))
    }

    fn score(&self, batch: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        self.log.take();
        spread(batch, self.options.batch_size, self.options.pool_size, |_, range, rows| {
            let (values, logged) = self.ask(&rows_name(&range, batch), rows, false)?;
            self.log.add(range, logged);
            Ok(values)
        })
    }

    fn take_logged(&self) -> Logged {
        self.log.take()
    }

    fn probe(&self, group: &[RewardInput<'_>]) -> Result<Vec<Option<f64>>, RewardError> {
        Ok(self.ask(&rows_name(&(0..group.len()), group), group, true)?.0)
    }
}

impl HttpReward {
    fn ask(
        &self,
        named: &str,
        rows: &[RewardInput<'_>],
        probe: bool,
    ) -> Result<(Vec<Option<f64>>, Logged), RewardError> {
        attempts(&self.name, named, &self.options, self.options.backoff, || {
            let id = self.next_id.fetch_add(1, Ordering::Relaxed);
            let answer: Answer =
                self.client.post(&self.url, &Request::new(id, rows, &self.options, probe))?;
            answer.id.map_or(Ok(()), |got| same_id(Some(got), id))?;
            values(answer, rows.len())
        })
    }
}

/// An HTTP client that classifies failures for this crate.
pub(super) struct Client {
    agent: ureq::Agent,
    api_key: Option<String>,
}

impl Client {
    pub fn new(
        url: &str,
        reward: &str,
        options: &ExternalOptions,
        api_key: Option<&str>,
    ) -> Result<Self, RewardError> {
        if url.starts_with("https://") && !cfg!(feature = "https") {
            return Err(RewardError::Setting {
                reward: reward.to_owned(),
                what: format!(
                    "{}: this build supports only http; build with the feature `https`",
                    redacted(url)
                ),
            });
        }
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(options.timeout))
            .http_status_as_error(false)
            .max_redirects(0)
            .build()
            .into();
        Ok(Self { agent, api_key: api_key.map(str::to_owned) })
    }

    pub fn post<T: DeserializeOwned>(&self, address: &str, body: &impl Serialize) -> Result<T, Failure> {
        let url = redacted(address);
        let failure = |error: ureq::Error| match error {
            ureq::Error::Timeout(_) => Failure::TimedOut,
            // Another attempt cannot repair a malformed URL.
            ureq::Error::BadUri(what) => Failure::Final(format!("{url} is not a usable address: {what}")),
            ureq::Error::BodyExceedsLimit(bytes) => {
                Failure::TooLarge(format!("{url}: an answer of more than {bytes} bytes"))
            }
            error => Failure::Passing(format!("{url}: {error}")),
        };
        let mut request = self.agent.post(address);
        if let Some(key) = &self.api_key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let mut response = request.send_json(body).map_err(failure)?;
        let status = response.status().as_u16();
        if (300..=399).contains(&status) {
            let to = response.headers().get("location").and_then(|to| to.to_str().ok());
            return Err(Failure::Final(format!(
                "{url}: status {status}, a redirect to {}, which is not followed; give the address that answers",
                to.map_or_else(|| "nowhere".to_owned(), |to| excerpt(&redacted(to)))
            )));
        }
        let text =
            response.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_string().map_err(failure)?;
        match status {
            200..=299 => {
                answer_of(&text, |error| format!("{url}: not an answer ({error}): `{}`", excerpt(&text)))
            }
            408 | 429 | 500.. => {
                Err(Failure::Passing(format!("{url}: status {status}: `{}`", excerpt(&text))))
            }
            _ => Err(Failure::Final(format!("{url}: status {status}: `{}`", excerpt(&text)))),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;
    use crate::build;
    use crate::testing::Row;

    /// Prefix of the text for an answer that redirects.
    const REDIRECT: &str = "redirect to ";

    /// Starts a server that answers request n with the result of `answer(n, headers, body)`: a status and a text, or no answer.
    /// The server ends with the test process.
    pub fn server(
        answer: impl Fn(usize, &str, &Value) -> Option<(u16, String)> + Send + 'static,
    ) -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for (number, stream) in listener.incoming().enumerate() {
                let mut reader = BufReader::new(stream.unwrap());
                let (mut headers, mut length) = (String::new(), 0);
                loop {
                    let mut line = String::new();
                    reader.read_line(&mut line).unwrap();
                    if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                        length = value.trim().parse().unwrap();
                    }
                    if line.trim().is_empty() {
                        break;
                    }
                    headers.push_str(&line);
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body).unwrap();
                let Some((status, text)) = answer(number, &headers, &serde_json::from_slice(&body).unwrap())
                else {
                    continue;
                };
                let (location, text) = match text.strip_prefix(REDIRECT) {
                    Some(to) => (format!("Location: {to}\r\n"), String::new()),
                    None => (String::new(), text),
                };
                let head = format!(
                    "HTTP/1.1 {status} X\r\n{location}Connection: close\r\nContent-Length: {}\r\n\r\n",
                    text.len()
                );
                reader.into_inner().write_all(format!("{head}{text}").as_bytes()).unwrap();
            }
        });
        address
    }

    fn quick() -> RewardOptions {
        let mut options = RewardOptions::default();
        options.external.backoff = Duration::from_millis(1);
        options.external.timeout = Duration::from_secs(10);
        options.external.batch_size = 2;
        options
    }

    fn scores(
        url: &str,
        completions: &[&str],
        options: &RewardOptions,
    ) -> Result<Vec<Option<f64>>, RewardError> {
        let rows: Vec<Row> = completions.iter().map(|text| Row::new("q", text, "s")).collect();
        let batch: Vec<_> = rows.iter().map(Row::input).collect();
        Ok(build(&[format!("mine={url}")], options)?.score(&batch)?.values.remove(0))
    }

    fn lengths(body: &Value) -> String {
        let rows = body["rows"].as_array().unwrap();
        let rewards: Vec<usize> = rows.iter().map(|row| row["completion"].as_str().unwrap().len()).collect();
        json!({"id": body["id"], "rewards": rewards}).to_string()
    }

    #[test]
    fn batches_come_back_in_order() {
        let address = server(|_, _, body| Some((200, lengths(body))));
        let got =
            scores(&format!("http://{address}/score"), &["a", "bb", "ccc", "", "eeeee"], &quick()).unwrap();
        assert_eq!(got, vec![Some(1.0), Some(2.0), Some(3.0), Some(0.0), Some(5.0)]);
    }

    #[test]
    fn busy_and_broken_connections_are_tried_again() {
        let address = server(|number, _, body| match number {
            0 => Some((503, "busy".to_owned())),
            1 => None,
            2 => Some((429, "slow down".to_owned())),
            _ => Some((200, lengths(body))),
        });
        assert_eq!(scores(&format!("http://{address}"), &["abc"], &quick()).unwrap(), vec![Some(3.0)]);
    }

    #[test]
    fn redirects_are_not_followed() {
        let other = server(|_, _, body| Some((200, lengths(body))));
        for status in [301, 302, 303, 307, 308] {
            let address =
                server(move |_, _, _| Some((status, format!("{REDIRECT}http://a:b@{other}/secret"))));
            let error = scores(&format!("http://{address}"), &["a"], &quick()).unwrap_err().to_string();
            for part in [&format!("status {status}, a redirect to http://***@{other}/secret"), "1 time(s)"] {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
    }

    #[test]
    fn passwords_stay_out_of_messages() {
        let address = server(|_, _, _| Some((400, "what?".to_owned())));
        let error =
            scores(&format!("http://me:hidden@{address}/"), &["a"], &quick()).unwrap_err().to_string();
        assert!(error.contains(&format!("http://***@{address}/: status 400")), "{error}");
    }

    #[test]
    fn a_trial_is_marked() {
        let address = server(|_, _, body| {
            assert_eq!((&body["probe"], body["rows"].as_array().unwrap().len()), (&json!(true), 2));
            Some((200, lengths(body)))
        });
        let set = build(&[format!("mine=http://{address}")], &quick()).unwrap();
        let row = Row::new("q", "c", "s");
        set.probe(&[row.input(), row.input()]).unwrap();
    }

    #[test]
    fn failures_name_the_reward_the_rows_and_the_status() {
        let answers =
            [(400u16, "what?", "status 400"), (200, "hello", "not an answer"), (503, "busy", "status 503")];
        for (status, text, part) in answers {
            let address = server(move |_, _, _| Some((status, text.to_owned())));
            let mut options = quick();
            options.external.retries = 1;
            let error = scores(&format!("http://{address}"), &["a", "b"], &options).unwrap_err().to_string();
            let attempts = if status == 503 { "2 time(s)" } else { "1 time(s)" };
            for part in ["`mine`", "sample 0", part, attempts] {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
    }

    #[test]
    fn no_answer_in_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let mut options = quick();
        options.external.retries = 1;
        options.external.timeout = Duration::from_millis(100);
        let error = scores(&url, &["a"], &options).unwrap_err();
        assert!(matches!(error, RewardError::TimedOut { .. }), "{error}");
    }

    #[cfg(not(feature = "https"))]
    #[test]
    fn https_without_the_feature_is_refused_at_once() {
        let error = build(&["https://example.org/score".to_owned()], &quick()).unwrap_err().to_string();
        assert!(error.contains("feature `https`"), "{error}");
    }
}
