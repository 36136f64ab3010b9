//! From settings to a run: opens what a run, an evaluation, a generation or a plan needs, and returns values.
//!
//! A [`Session`] has the resources: console, device, checkpoint, environment, ranks. [`train()`], [`evaluate()`], [`plan()`] and [`Loaded`]
//! run a command in the process of another program, such as an interpreter of Python, with the settings, checks and records of the
//! command line, and functions of that program as rewards and observers. They handle no signals, read no
//! arguments and end no process, except [`connect`] and [`leave`]: ranks end together.
//!
//! ```
//! use omnigrpo_session::{Caller, checked, given, train};
//! use omnigrpo_settings::Verb;
//! use serde_json::json;
//!
//! # let place = tempfile::tempdir()?;
//! # let place = place.path().display();
//! omnigrpo_demo::write_model(format!("{place}/model").as_ref())?;
//! std::fs::write(format!("{place}/rows.jsonl"), r#"{"prompt": "What is 1 + 1?", "solution": "2"}"#)?;
//! let settings = json!({
//!     "model_name_or_path": format!("{place}/model"), "train_file": format!("{place}/rows.jsonl"),
//!     "output_dir": format!("{place}/run"), "reward_funcs": ["caller:brief"], "per_device_train_batch_size": 1,
//!     "num_generations": 2, "max_completion_length": 4, "max_steps": 1, "allow_text_only": true,
//! });
//! let caller = Caller::new(|name| {
//!     let score = |row: &omnigrpo_rewards::RewardInput<'_>| -(row.completion.len() as f64);
//!     (name == "brief").then(|| omnigrpo_rewards::reward(name, (f64::NEG_INFINITY, 0.0), score))
//! });
//! let (summary, model) = train(given(Verb::Train, settings)?, caller)?;
//! assert_eq!((summary.steps, summary.interrupted), (1, false));
//! let (settings, row) = (json!({ "max_completion_length": 4 }), json!({ "prompt": "What is 1 + 2?" }));
//! let answers = model.generate(checked(Verb::Generate, settings)?, vec![row], ".".as_ref())?;
//! assert_eq!((answers.len(), answers[0].len()), (1, 1));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![warn(missing_docs)]

mod calls;
pub mod evaluation;
pub mod family;
pub mod files;
pub mod follow;
pub mod forecast;
pub mod heap;
pub mod logging;
mod notify;
mod options;
pub mod profile;
pub mod push;
pub mod ranks;
pub mod resume;
mod session;
pub mod setup;
pub mod training;

pub use calls::{Caller, Loaded, checked, connect, evaluate, given, leave, plan, read, train};
pub use session::{Host, Session, of_rank, ready};
pub use setup::Functions;
