//! Errors, and their form in responses.

use hyper::StatusCode;
use omnigrpo_guard::{Fault, fault, told};
use omnigrpo_http::Answer;
use serde_json::json;

/// Error of a server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Address that cannot be served.
    #[error("{place} cannot be served: {source}; choose another port, or 0 for a free one")]
    Listen {
        /// Requested address.
        place: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// Thread that the system does not provide.
    #[error("a thread that prepares requests cannot be started")]
    Thread(#[source] std::io::Error),
    /// Random numbers that the system does not provide.
    #[error("no random number is available: {0}")]
    Random(std::io::Error),
}

/// Reason why a request is refused or fails, as OpenAI's clients read it.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// Field of the request.
    pub(crate) param: Option<&'static str>,
}

impl Refusal {
    /// Creates the reason for a field of the request that cannot be used.
    pub(crate) fn of(param: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(param), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None }
    }

    /// Creates the reason from an error about a row or its media. A failure of the machine is not the client's fault.
    pub(crate) fn about(param: &'static str, error: &(dyn std::error::Error + 'static)) -> Self {
        match fault(error, Fault::Row) {
            Fault::Machine => Self::new(StatusCode::SERVICE_UNAVAILABLE, told(error)),
            _ => Self::of(param, told(error)),
        }
    }

    /// Returns the body of the response.
    pub(crate) fn json(&self) -> serde_json::Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let code = match self.status {
            StatusCode::UNAUTHORIZED => Some("invalid_api_key"),
            StatusCode::NOT_FOUND if self.param == Some("model") => Some("model_not_found"),
            _ => None,
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": code } })
    }

    pub(crate) fn answer(&self) -> Answer {
        Answer::new(self.status.as_u16(), "application/json", self.json().to_string())
    }

    /// Creates the response to a request that the HTTP server refuses.
    pub(crate) fn of_server(status: StatusCode, why: &str) -> Answer {
        Self::new(status, why).answer()
    }
}
