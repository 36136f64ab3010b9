//! Directories and lists of pictures as videos.
//!
//! Each picture is resized once, to the size given by the video's budget. In contrast, qwen-vl-utils resizes each picture twice:
//! as a picture (with a factor of 56 in version 0.0.14), and then as a frame.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::{LISTED_FPS, Plan, VideoFrames, VideoInfo, VideoRequest};
use crate::{Limits, MediaError, Rgb8Image, load_image, probe_image};

const EXTENSIONS: [&str; 8] = ["png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff"];

/// Returns the pictures of a directory, sorted by name. Subdirectories, hidden files and other kinds of files are ignored.
pub(super) fn list(dir: &Path, limits: &Limits) -> Result<Vec<PathBuf>, MediaError> {
    let read = |source| MediaError::Read { path: dir.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read)? {
        let name = entry.map_err(read)?.file_name().to_string_lossy().into_owned();
        let extension = Path::new(&name).extension().map(|e| e.to_string_lossy().to_ascii_lowercase());
        if !name.starts_with('.') && extension.is_some_and(|e| EXTENSIONS.contains(&e.as_str())) {
            names.push(name);
            Limits::check(dir, "number of frames", names.len() as u64, limits.max_frames)?;
        }
    }
    if names.is_empty() {
        return Err(MediaError::Format {
            path: dir.to_owned(),
            got: "the directory has no pictures".into(),
            expected: "files named .png, .jpg, .jpeg, .webp, .gif, .bmp, .tif or .tiff",
        });
    }
    names.sort_by(|a, b| natural_order(a, b));
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

/// Compares names with runs of digits as numbers, so that `frame_10` comes after `frame_2`. Names that are equal in this order
/// are compared as plain text.
fn natural_order(a: &str, b: &str) -> Ordering {
    fn split(s: &str) -> Option<(bool, &str, &str)> {
        let digit = s.chars().next()?.is_ascii_digit();
        let end = s.find(|c: char| c.is_ascii_digit() != digit).unwrap_or(s.len());
        Some((digit, &s[..end], &s[end..]))
    }
    let (mut rest_a, mut rest_b) = (a, b);
    while let (Some((digit_a, run_a, next_a)), Some((digit_b, run_b, next_b))) =
        (split(rest_a), split(rest_b))
    {
        let order = if digit_a && digit_b {
            let (x, y) = (run_a.trim_start_matches('0'), run_b.trim_start_matches('0'));
            x.len().cmp(&y.len()).then(x.cmp(y))
        } else {
            run_a.cmp(run_b)
        };
        if order != Ordering::Equal {
            return order;
        }
        (rest_a, rest_b) = (next_a, next_b);
    }
    rest_a.len().cmp(&rest_b.len()).then(a.cmp(b))
}

pub(super) fn probe(
    paths: &[PathBuf],
    listed_fps: Option<f64>,
    limits: &Limits,
) -> Result<VideoInfo, MediaError> {
    let Some(first) = paths.first() else {
        return Err(MediaError::setting("frame list", "no frames", "at least one picture"));
    };
    Limits::check(first, "number of frames", paths.len() as u64, limits.max_frames)?;
    let size = probe_image(first, limits)?;
    let fps = listed_fps.unwrap_or(LISTED_FPS);
    Ok(VideoInfo {
        width_px: size.width_px,
        height_px: size.height_px,
        turn: size.turn,
        num_frames: paths.len(),
        fps,
        duration_s: paths.len() as f64 / fps,
    })
}

pub(super) fn decode(
    paths: &[PathBuf],
    request: &VideoRequest,
    limits: &Limits,
) -> Result<VideoFrames, MediaError> {
    let info = probe(paths, request.listed_fps, limits)?;
    let choice = request.sampling.choose_listed(info.num_frames, info.fps)?;
    let plan = Plan::new(&paths[0], &info, choice, request, limits)?;
    let frames = plan
        .distinct
        .par_iter()
        .map(|&i| {
            let frame = load_image(&paths[i], request.orientation, limits)?;
            require_size(&paths[i], &frame, plan.native)?;
            plan.resize(frame)
        })
        .collect::<Result<Vec<_>, _>>()?;
    plan.finish(&paths[0], frames, info.fps, |i| i as f64 / info.fps)
}

fn require_size(path: &Path, frame: &Rgb8Image, size: (u32, u32)) -> Result<(), MediaError> {
    if (frame.width_px, frame.height_px) == size {
        return Ok(());
    }
    Err(MediaError::Format {
        path: path.to_owned(),
        got: format!(
            "the frame is {}x{}, the first one {}x{}",
            frame.width_px, frame.height_px, size.0, size.1
        ),
        expected: "frames of one size",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_numbers_sort_by_number() {
        let mut names = ["f10.png", "f2.png", "a.png", "f1.png", "f02.png", "f2b.png", "10.png", "9.png"];
        names.sort_by(|a, b| natural_order(a, b));
        assert_eq!(names, ["9.png", "10.png", "a.png", "f1.png", "f02.png", "f2.png", "f2b.png", "f10.png"]);
    }
}
