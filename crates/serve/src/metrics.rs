//! Numbers of a server, in the text format of Prometheus.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Counts and sums since the start.
#[derive(Default)]
pub(crate) struct Metrics {
    pub(crate) running: AtomicU64,
    pub(crate) waiting: AtomicU64,
    pub(crate) in_flight: AtomicU64,
    pub(crate) finished: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) disconnected: AtomicU64,
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) completion_tokens: AtomicU64,
    first_token_micros: AtomicU64,
    first_tokens: AtomicU64,
    request_micros: AtomicU64,
}

impl Metrics {
    pub(crate) const KIND: &str = "text/plain; version=0.0.4; charset=utf-8";

    pub(crate) fn first_token(&self, after: Duration) {
        self.first_tokens.fetch_add(1, Relaxed);
        self.first_token_micros.fetch_add(after.as_micros() as u64, Relaxed);
    }

    pub(crate) fn finish(&self, after: Duration) {
        self.finished.fetch_add(1, Relaxed);
        self.request_micros.fetch_add(after.as_micros() as u64, Relaxed);
    }

    /// Returns the numbers as a page for Prometheus.
    pub(crate) fn page(&self) -> String {
        let mut page = String::new();
        let mut add = |kind: &str, name: &str, help: &str, rows: &[(&str, f64)]| {
            page.push_str(&format!(
                "# HELP omnigrpo_serve_{name} {help}\n# TYPE omnigrpo_serve_{name} {kind}\n"
            ));
            rows.iter()
                .for_each(|(label, value)| page.push_str(&format!("omnigrpo_serve_{name}{label} {value}\n")));
        };
        let count = |of: &AtomicU64| of.load(Relaxed) as f64;
        let seconds = |of: &AtomicU64| of.load(Relaxed) as f64 / 1e6;
        add("gauge", "requests_running", "Requests whose completions decode.", &[("", count(&self.running))]);
        add(
            "gauge",
            "requests_waiting",
            "Requests that wait for their prefill.",
            &[("", count(&self.waiting))],
        );
        add("gauge", "completions_running", "Completions that decode.", &[("", count(&self.in_flight))]);
        let outcomes = [
            (r#"{outcome="finished"}"#, count(&self.finished)),
            (r#"{outcome="refused"}"#, count(&self.refused)),
            (r#"{outcome="failed"}"#, count(&self.failed)),
            (r#"{outcome="disconnected"}"#, count(&self.disconnected)),
        ];
        add("counter", "requests_total", "Requests for completions by outcome.", &outcomes);
        add("counter", "prompt_tokens_total", "Tokens of prompts.", &[("", count(&self.prompt_tokens))]);
        add("counter", "completion_tokens_total", "Sampled tokens.", &[("", count(&self.completion_tokens))]);
        let first = [("_sum", seconds(&self.first_token_micros)), ("_count", count(&self.first_tokens))];
        add("summary", "time_to_first_token_seconds", "Time from a request to its first token.", &first);
        let whole = [("_sum", seconds(&self.request_micros)), ("_count", count(&self.finished))];
        add("summary", "request_seconds", "Time from a request to its last token.", &whole);
        page
    }
}
