//! Settings to plans: what several commands build alike.

mod hub;
mod model;
mod prompts;
mod rewards;
mod rows;

pub use hub::{cached, named_dir};
pub use model::{checkpoint, checkpoint_dir, lora, model, selection, trained_model, weight_dtype};
pub use prompts::{limits, prompts, sampling, shuffled_prompts};
pub use rewards::{Corpus, measures, probe_rewards, rewards, text_rewards};
pub use rows::{eval_data, input_rows, names_training_rows, read_options, train_data};
