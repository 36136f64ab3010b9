//! Endpoint from which Prometheus scrapes the newest numbers. With a key, requests must have it in `Authorization`.

use std::sync::{Arc, Mutex, PoisonError};

use omnigrpo_http::{Answer, Http, Limits, Place, Request};
use omnigrpo_observe::{Metric, Tracked, Tracker};

const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Server of `http://127.0.0.1:PORT/metrics`, which runs until it is dropped.
pub struct Prometheus {
    page: Arc<Mutex<String>>,
    run: String,
    /// Last value of each metric, ordered by name.
    values: std::collections::BTreeMap<String, f64>,
    http: Http,
}

impl Prometheus {
    /// Starts the server. With `key`, it answers only requests that have it as `Bearer`.
    ///
    /// # Errors
    /// Returns an error if the server cannot start, for example because the port is in use.
    pub fn start(place: &Place, key: Option<String>, run: &str) -> Result<Self, String> {
        let page = Arc::new(Mutex::new(String::new()));
        let text = Arc::clone(&page);
        let is_known = move |request: &Request| key.as_ref().is_none_or(|key| request.has_key(key));
        let work = move |request: &Request| match request.path() {
            _ if !is_known(request) => {
                Answer::new(401, KIND, "the key is missing or wrong: Authorization: Bearer KEY\n")
            }
            "/metrics" => Answer::new(200, KIND, locked(&text).clone()),
            _ => Answer::new(404, KIND, "only GET /metrics\n"),
        };
        let limits = Limits { connections: 32, handlers: 1, ..Limits::default() };
        let http = Http::start_at("prometheus", place, limits, work)
            .map_err(|error| format!("{place} cannot be served: {error}"))?;
        Ok(Self { page, run: run.to_owned(), values: Default::default(), http })
    }

    /// Returns the port of the server.
    pub fn port(&self) -> u16 {
        self.http.address().port()
    }

    fn set(&mut self, metrics: &[Metric]) {
        for (name, value) in metrics {
            match value.filter(|value| value.is_finite()) {
                Some(value) => drop(self.values.insert(name.clone(), value)),
                None => drop(self.values.remove(name)),
            }
        }
        let run = label(&self.run);
        let mut page =
            String::from("# HELP omnigrpo Last value of each metric, under its name in metrics.jsonl.\n");
        page.push_str("# TYPE omnigrpo gauge\n");
        for (name, value) in &self.values {
            page.push_str(&format!("omnigrpo{{run=\"{run}\",metric=\"{}\"}} {value}\n", label(name)));
        }
        *locked(&self.page) = page;
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Quotes the value of a label as the Prometheus format requires.
fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Tracker for Prometheus {
    fn name(&self) -> &'static str {
        "prometheus"
    }

    fn take(&mut self, event: &Tracked) -> Result<(), String> {
        if let Tracked::Metrics { step, epoch, metrics } = event {
            let place = [("step".to_owned(), Some(*step as f64)), ("epoch".to_owned(), Some(*epoch))];
            self.set(&[&place[..], metrics].concat());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_values_are_served_under_their_names() {
        let mut tracker = Prometheus::start(&Place::local(0), None, "my \"run\"").unwrap();
        let metrics =
            |reward| vec![("rewards/accuracy/mean".to_owned(), reward), ("kl".to_owned(), Some(0.5))];
        tracker.take(&Tracked::Metrics { step: 1, epoch: 0.5, metrics: metrics(Some(0.25)) }).unwrap();
        let url = format!("http://127.0.0.1:{}/metrics", tracker.port());
        let page = || ureq::get(&url).call().unwrap().body_mut().read_to_string().unwrap();
        let expected = "# HELP omnigrpo Last value of each metric, under its name in metrics.jsonl.\n\
            # TYPE omnigrpo gauge\n\
            omnigrpo{run=\"my \\\"run\\\"\",metric=\"epoch\"} 0.5\n\
            omnigrpo{run=\"my \\\"run\\\"\",metric=\"kl\"} 0.5\n\
            omnigrpo{run=\"my \\\"run\\\"\",metric=\"rewards/accuracy/mean\"} 0.25\n\
            omnigrpo{run=\"my \\\"run\\\"\",metric=\"step\"} 1\n";
        assert_eq!(page(), expected);
        tracker.take(&Tracked::Metrics { step: 2, epoch: 0.5, metrics: metrics(None) }).unwrap();
        assert!(!page().contains("accuracy"), "what was not measured is not the old value");
        let error = Prometheus::start(&Place::local(tracker.port()), None, "other").err().unwrap();
        assert!(error.contains("cannot be served"), "{error}");
    }
}
