//! Dataset files become [`Sample`]s, in a reproducible [`Order`].

mod order;
mod sample;

pub use omnigrpo_text::{MediumKind, Part, Role, Turn};
pub use order::{Order, OrderError, OrderState, split};
pub use sample::{
    MediumOptions, MediumRef, MediumSource, Origin, RecordedCompletion, RecordedRewards, Sample, Segments,
    ThinkMode,
};
