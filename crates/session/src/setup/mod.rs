//! Conversion of settings to plans, shared by several commands.

mod device;
mod hub;
mod model;
mod prompts;
mod rewards;
mod rows;

pub use device::{card_of, has_nvidia_gpu, is_at, no_cards, open_device};
pub(crate) use hub::token;
pub use hub::{hub, named_dir, progress};
pub use model::{
    arithmetic, checkpoint, checkpoint_dir, model, model_plan, model_to_change, reference_plan, selection,
};
pub use prompts::{environment, media_bytes, prompts};
pub use rewards::{Functions, corpus, reward_files, rewards, text_rewards};
pub use rows::{eval_data, input_rows, read_options, train_data};
