//! Settings that messages name.

use crate::{ColumnNames, ReadOptions, Roots};

omnigrpo_guard::settings! {
    PROMPT = ColumnNames.prompt;
    SOLUTION = ColumnNames.solution;
    IMAGE = ColumnNames.image;
    VIDEO = ColumnNames.video;
    FETCH = ReadOptions.fetch;
    IMAGES = Roots.images;
    VIDEOS = Roots.videos;
    AUDIOS = Roots.audios;
}
