//! Settings by name: the table of all settings, and [`resolve`], which turns names and values into the plans of a run.
//!
//! The command line, `--config` files, presets and the settings of other trainers all come through [`resolve`]. It checks names,
//! kinds, bounds and contradictions, and returns the plans with the source of every value and notes for the user. [`schema`]
//! describes a file of settings as JSON Schema.
//!
//! ```
//! use omnigrpo_settings::{Environment, Layer, Origin, Verb, resolve};
//! use serde_json::json;
//!
//! let given = [("preset", json!("r1-v")), ("learning_rate", json!(1e-5)), ("max_pixels", json!(401_408))];
//! let run = resolve(Verb::Train, Layer::of(Verb::Train, given), Environment::default())?;
//! assert_eq!(run.settings.optimizer.learning_rate, 1e-5);
//! assert_eq!(run.settings.prompts.media.image.max_pixels, Some(401_408));
//! assert_eq!(run.values.lookup("num_generations").map(|(_, from)| from), Some(&Origin::Preset("r1-v".into())));
//!
//! let wrong = Layer::of(Verb::Train, [("learning_rat", json!(1e-5))]);
//! let problem = resolve(Verb::Train, wrong, Environment::default()).unwrap_err();
//! assert!(problem.to_string().contains("did you mean `learning_rate`?"));
//! # Ok::<(), omnigrpo_settings::Problem>(())
//! ```

pub mod binding;
pub mod build;
pub mod cards;
pub mod config;
pub mod deepspeed;
pub mod environment;
pub mod explain;
pub mod flags;
pub mod foreign;
pub mod layer;
pub mod names;
pub mod presets;
pub mod problem;
mod resolve;
pub mod rules;
mod run;
mod schema;
pub mod values;
pub mod wording;

pub use deepspeed::read as read_deepspeed;
pub use environment::{Environment, HubEnvironment};
pub use explain::{command, print_config};
pub use flags::{Fallback, Flag, Idle, Kind, Names, Place, Section, Verb, all, find};
pub use layer::Layer;
pub use names::{AllowUrls, BatchUnit, Bf16Products, HubStrategy, QuantizedActivations, Tracker};
pub use presets::settings as preset;
pub use problem::Problem;
pub use resolve::resolve;
pub use rules::is_reward;
pub use rules::needs;
pub use run::{
    Backend, Batch, Bench, DeviceChoice, Io, Keep, Log, ModelSource, Network, Push, REGISTRY, Rewards, Rows,
    Settings, Workload, is_on_hub, of_caller,
};
pub use schema::schema;
pub use values::{Given, Origin, Resolved, Value, Values};
pub use wording::name_flags;
