//! Rewards outside this process: programs that speak JSON lines, HTTP endpoints, judges.

use std::time::Duration;

/// How programs and endpoints are called.
#[derive(Debug, Clone)]
pub struct ExternalOptions {
    /// Time limit of one request.
    pub timeout: Duration,
    /// Processes per program, and requests in flight per endpoint.
    pub pool_size: usize,
    /// Attempts beyond the first before a request counts as failed.
    pub retries: u32,
    /// Completions per request.
    pub batch_size: usize,
    /// Declared range of what comes back.
    pub range: (f64, f64),
    /// Model name sent to a judge.
    pub judge_model: String,
    /// What a judge is asked; `{prompt}`, `{completion}`, `{answer}` and `{solution}` are filled in.
    pub judge_template: String,
}

impl Default for ExternalOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            pool_size: 1,
            retries: 3,
            batch_size: 64,
            range: (f64::NEG_INFINITY, f64::INFINITY),
            judge_model: String::new(),
            judge_template: String::new(),
        }
    }
}
