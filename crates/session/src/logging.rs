//! Panics and warnings of the libraries, as a command shows them.

use std::fmt::{Debug, Write as _};

use omnigrpo_observe::Console;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// Silences panics that a guard catches and reports as an error of a file. Other panics are printed as usual, and so are all
/// panics if `RUST_BACKTRACE` is set.
pub fn quiet_guarded_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !omnigrpo_guard::is_guarded()
            || std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0")
        {
            usual(panic);
        }
    }));
}

/// Returns the subscriber that sends warnings of the libraries (for instance, that a request to a reward program is repeated) to
/// the console and so to the run's log. `RUST_LOG` shows more. Omits warnings of `symphonia`'s probe, which calls the first four bytes of every MP4 and MOV
/// file junk.
pub fn warnings(console: &Console) -> impl tracing::Subscriber + Send + Sync + use<> {
    use tracing_subscriber::EnvFilter;
    let shown = "warn,symphonia_core::formats::probe=error";
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(shown));
    tracing_subscriber::registry().with(Warnings(console.clone()).with_filter(filter))
}

struct Warnings(Console);

impl<S: tracing::Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut line = Line::default();
        event.record(&mut line);
        let metadata = event.metadata();
        let text = format!("{}{}", line.message, line.fields);
        match *metadata.level() {
            tracing::Level::ERROR => self.0.error(&format!("error: {text}")),
            tracing::Level::WARN => self.0.warning(&text),
            level => self.0.line(&format!("{level} {}: {text}", metadata.target())),
        }
    }
}

/// Message of an event, followed by its fields as `(name value)`.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl tracing::field::Visit for Line {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " ({name} {value:?})"),
        };
    }
}
