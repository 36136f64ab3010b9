//! Reader of dataset files: rows become [`Sample`]s, in a reproducible [`Order`].
//!
//! - [`DatasetSpec`], [`Registry`]: the files, the folders of their media, and the selection of rows.
//! - [`Dataset`]: an index over the files; [`Dataset::get`] reads one row of any format in [`FORMATS`].
//! - [`Order`]: the order of the rows, which is the same after a resume.
//! - [`check`]: a check of the whole dataset and every medium's header before training.
//! - [`convert_vivqa_x`], and `convert_parquet` with the feature `parquet`: converters of published datasets into rows.
//!
//! An unusable row is reported as a [`RowError`] and does not affect other rows. Paths never leave their [`Roots`].

mod accepted;
mod check;
mod dataset;
mod error;
mod formats;
mod order;
mod output;
#[cfg(feature = "parquet")]
mod parquet;
mod question;
mod registry;
mod roots;
mod rows;
mod sample;
mod sampling;
mod store;
mod tables;
mod vivqa_x;

pub use accepted::accepted_answers;
pub use check::{
    Cause, CheckOptions, Counts, Estimate, LongPrompt, Measure, MediumInfo, Probe, Problem, Report, check,
};
pub use dataset::{ColumnNames, Dataset, Fetch, ReadOptions, RowReader, UnreadMedia};
pub use error::{DataError, PathProblem, RowError, RowProblem, SETTINGS};
pub use formats::{FORMATS, Format};
pub use omnigrpo_text::{MediumKind, Part, Role, Turn};
pub use order::{Curriculum, Lessons, Order, OrderError, OrderState, split};
#[cfg(feature = "parquet")]
pub use parquet::convert_parquet;
pub use question::{QUESTION_TEMPLATES, QuestionTemplate};
pub use registry::{DatasetSpec, Registry};
pub use roots::{Roots, turn_folder};
pub use sample::{
    MediumOptions, MediumRef, MediumSource, Origin, RecordedCompletion, RecordedRewards, RecordedTurn,
    Reference, Sample, Segments, Think, content, renumbered,
};
pub use sampling::{Amount, Sampling};
pub use store::{medium_extension, store as store_medium};
pub use tables::{MediaFolder, media_folder};
pub use vivqa_x::{Conversion, convert_vivqa_x};
