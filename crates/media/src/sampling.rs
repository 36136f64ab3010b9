//! Choice of frames from a video and of their size. All functions depend only on counts and rates.
//!
//! | rule | source |
//! |---|---|
//! | [`FrameSampling::Qwen`] | qwen-vl-utils 0.0.14 `smart_nframes`, `calculate_video_frame_range` |
//! | [`FrameSampling::Rate`] | `transformers` 5.23 `Qwen3VLVideoProcessor.sample_frames` |
//! | [`FrameSampling::Inside`] | `transformers` 5.23 `SmolVLMVideoProcessor.sample_frames` |
//! | [`FrameSampling::BaseInterval`] | qwen-vl-finetune `data_qwen.py` |
//! | [`FrameSampling::Segments`] | data rows with `meta.frame_cnts`: frames are taken from every segment |
//! | [`FrameSampling::Midpoints`] | HumanOmni `mm_utils.frame_sample`, mode uniform |
//! | [`FrameSampling::Times`] | none: the frames that another rule has chosen before |
//!
//! Ties always round to even, as in Python, NumPy and torch.

use crate::MediaError;
use crate::qwen_vl::{MAX_ASPECT_RATIO, ResizeRule, smart_resize};

/// Frames per time slice of the vision tower. In qwen-vl-utils, frame counts are multiples of it.
const FRAME_FACTOR: f64 = 2.0;

/// Maximum number of frames for a rule that repeats frames, equal to the default of [`crate::Limits::max_frames`].
const MOST_FRAMES: usize = 100_000;

/// Rule for choosing frames.
#[derive(Debug, Clone, PartialEq)]
pub enum FrameSampling {
    /// Rule of qwen-vl-utils: a rate or a count of frames, evenly spaced from the first to the last frame of a time range.
    Qwen(QwenSampling),
    /// Rule of `Qwen3VLVideoProcessor`: a rate within bounds on the count, with frames evenly spaced from the first to the last.
    /// A short video yields fewer frames.
    Rate {
        /// Frames to take per second. The value in the source is 2.
        fps: f64,
        /// Minimum number of frames. The value in the source is 4.
        min_frames: usize,
        /// Maximum number of frames. The value in the source is 768.
        max_frames: usize,
    },
    /// Rule of `SmolVLMVideoProcessor`: a rate within bounds on the count. Frames are evenly spaced from the first to the last,
    /// or if the video is longer than `max_frames · fps` seconds and 2, from second 1 to the last but one. A short video yields
    /// fewer frames.
    Inside {
        /// Frames to take per second. The published value is 1.
        fps: f64,
        /// Minimum number of frames. The value in the source is 1.
        min_frames: usize,
        /// Maximum number of frames. The published value is 64.
        max_frames: usize,
    },
    /// One frame per `interval_secs`, within bounds on the count, evenly spaced from the first to the last frame. A short video
    /// yields fewer frames.
    BaseInterval {
        /// Seconds of video per frame. The value in the source is 2.
        interval_secs: f64,
        /// Minimum number of frames.
        min_frames: usize,
        /// Maximum number of frames.
        max_frames: usize,
    },
    /// A number of frames from every segment; see [`segment_indices`].
    Segments {
        /// Length of each segment in frames. The type is a float because some published files contain floats.
        frame_counts: Vec<f64>,
        /// Number of frames per segment.
        num_frames: usize,
    },
    /// Exactly `num_frames` frames, each from the middle of an equal share of the video. Frames of a short video are repeated.
    Midpoints {
        /// Number of frames.
        num_frames: usize,
    },
    /// The frame nearest to each of these times. A time outside of the video takes its first or last frame.
    Times {
        /// Times in seconds, in non-decreasing order.
        times_secs: Vec<f64>,
    },
}

/// Options of the rule of qwen-vl-utils.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct QwenSampling {
    /// Frames to take per second. The default is 2 if `nframes` is absent. Conflicts with `nframes`.
    pub fps: Option<f64>,
    /// Number of frames to take, rounded to an even number.
    pub nframes: Option<usize>,
    /// True to accept a video (or time range) with fewer frames than requested. All its frames are then taken, rounded down to an
    /// even number, or its only frame. If false, such a video is an error, as in qwen-vl-utils.
    pub as_many_as_there_are: bool,
    /// Minimum number of frames, with `fps`. Default 4.
    pub min_frames: Option<usize>,
    /// Maximum number of frames, with `fps`. The default is 768 or the length of the video, whichever is smaller.
    pub max_frames: Option<usize>,
    /// Start of the time range in seconds. The range is clamped to the video.
    pub video_start: Option<f64>,
    /// End of the time range in seconds.
    pub video_end: Option<f64>,
}

/// Frames chosen by a rule.
#[derive(Debug, Clone, PartialEq)]
pub struct FrameChoice {
    /// Indices of the frames in the video, in non-decreasing order.
    pub indices: Vec<usize>,
    /// Frames taken per second of video.
    pub sampled_fps: f64,
}

impl FrameSampling {
    /// Chooses frames of a video of `num_frames` frames at `fps` frames per second.
    ///
    /// # Errors
    /// Returns [`MediaError::Setting`] if the video is empty, if its rate is not positive, or if no choice satisfies the rule's
    /// options. The latter includes a video of one frame, for which qwen-vl-utils also fails.
    pub fn choose(&self, num_frames: usize, fps: f64) -> Result<FrameChoice, MediaError> {
        require_video(num_frames, fps)?;
        let whole = |indices: Vec<usize>| FrameChoice {
            sampled_fps: indices.len() as f64 / num_frames as f64 * fps,
            indices,
        };
        Ok(match self {
            Self::Qwen(options) => {
                let (start, end) = options.frame_range(num_frames, fps)?;
                let n = options.num_frames(end - start + 1, fps)?;
                FrameChoice {
                    indices: linspace_rounded(start, end, n),
                    sampled_fps: n as f64 / (end - start + 1) as f64 * fps,
                }
            }
            Self::Rate { fps: rate, min_frames, max_frames } => {
                check_rate(*rate, *min_frames, *max_frames)?;
                let n = (num_frames as f64 / fps * rate) as usize;
                let n = n.clamp(*min_frames, *max_frames).min(num_frames);
                let step = if n > 1 { (num_frames - 1) as f64 / (n - 1) as f64 } else { 0.0 };
                let at = |i: usize| (i as f64 * step).round_ties_even() as usize;
                whole((0..n).map(|i| at(i).min(num_frames - 1)).collect())
            }
            Self::Inside { fps: rate, min_frames, max_frames } => {
                check_rate(*rate, *min_frames, *max_frames)?;
                let duration = num_frames as f64 / fps;
                let n = (rate * duration).round_ties_even() as usize;
                let n = n.clamp(*min_frames, *max_frames).min(num_frames);
                let long = duration - 2.0 > *max_frames as f64 * rate;
                let last = num_frames - 1;
                let ends = (fps as usize, ((num_frames as f64 - fps).max(0.0) as usize).min(last));
                let (start, end) = if long && ends.0 < ends.1 { ends } else { (0, last) };
                whole(linspace_cut(start, end, n))
            }
            Self::BaseInterval { interval_secs, min_frames, max_frames } => {
                if !(*interval_secs > 0.0 && (1..=*max_frames).contains(min_frames)) {
                    return Err(MediaError::setting(
                        "base interval sampling",
                        format!("interval {interval_secs} s, {min_frames}..{max_frames} frames"),
                        "a positive interval and 1 <= min_frames <= max_frames",
                    ));
                }
                let n = (num_frames as f64 / fps / interval_secs).round_ties_even() as usize;
                // The number of distinct frames is at most the number of frames of the video.
                let n = n.clamp(*min_frames, *max_frames).min(num_frames);
                whole(linspace_cut(0, num_frames - 1, n))
            }
            Self::Segments { frame_counts, num_frames: n } => {
                let indices = segment_indices(frame_counts, *n)?;
                if let Some(&last) = indices.last().filter(|&&last| last >= num_frames) {
                    return Err(MediaError::setting(
                        "frame_cnts",
                        format!("segments that reach frame {last}"),
                        format!("segments within the video's {num_frames} frames"),
                    ));
                }
                whole(indices)
            }
            Self::Midpoints { num_frames: n } => {
                if !(1..=MOST_FRAMES).contains(n) {
                    return Err(MediaError::setting("nframes", n, format!("1 to {MOST_FRAMES} frames")));
                }
                let share = (num_frames - 1) as f64 / *n as f64;
                let middle = |i: usize| (share * i as f64 + share * (i + 1) as f64) / 2.0 + 1e-6;
                whole((0..*n).map(|i| middle(i).round_ties_even() as usize).collect())
            }
            Self::Times { times_secs } => {
                if !(1..=MOST_FRAMES).contains(&times_secs.len()) || !times_secs.is_sorted() {
                    return Err(MediaError::setting(
                        "times of frames",
                        format!("{} times", times_secs.len()),
                        format!("1 to {MOST_FRAMES} times in non-decreasing order"),
                    ));
                }
                let at = |time: &f64| (time * fps).round_ties_even() as usize;
                whole(times_secs.iter().map(|time| at(time).min(num_frames - 1)).collect())
            }
        })
    }

    /// Chooses frames of a list of pictures. The Qwen rule takes every picture, as qwen-vl-utils does, unless a rate, a count or
    /// a range is set. If there are more than `max_frames` pictures (default 768), it chooses evenly spaced ones. The other rules
    /// work as for videos.
    pub fn choose_listed(&self, num_frames: usize, fps: f64) -> Result<FrameChoice, MediaError> {
        if let Self::Qwen(QwenSampling {
            fps: None,
            nframes: None,
            max_frames,
            video_start: None,
            video_end: None,
            ..
        }) = self
        {
            require_video(num_frames, fps)?;
            let n = max_frames.unwrap_or(768).max(1);
            if num_frames <= n {
                return Ok(FrameChoice { indices: (0..num_frames).collect(), sampled_fps: fps });
            }
            let n = if n > 1 { n - n % 2 } else { n };
            let sampled_fps = n as f64 / num_frames as f64 * fps;
            return Ok(FrameChoice { indices: linspace_rounded(0, num_frames - 1, n), sampled_fps });
        }
        self.choose(num_frames, fps)
    }
}

impl QwenSampling {
    /// Returns the first and last frame of the time range.
    fn frame_range(&self, num_frames: usize, fps: f64) -> Result<(usize, usize), MediaError> {
        let duration = num_frames as f64 / fps;
        let clamp = |t: f64| t.clamp(0.0, duration) * fps;
        let start = self.video_start.map_or(0, |t| clamp(t).ceil() as usize);
        let end = self.video_end.map_or(num_frames - 1, |t| (clamp(t).floor() as usize).min(num_frames - 1));
        let ranged = self.video_start.is_some() || self.video_end.is_some();
        if ranged && start >= end {
            let bound = |t: Option<f64>, open: &str| t.map_or(open.to_owned(), |t| format!("{t} s"));
            return Err(MediaError::setting(
                "video_start, video_end",
                format!(
                    "{} to {}, which are frames {start} to {end}",
                    bound(self.video_start, "the start"),
                    bound(self.video_end, "the end")
                ),
                format!("a range of at least two frames within {duration:.3} s"),
            ));
        }
        Ok((start, end))
    }

    /// Returns the number of frames to take out of `total`.
    fn num_frames(&self, total: usize, video_fps: f64) -> Result<usize, MediaError> {
        if self.as_many_as_there_are && total == 1 {
            return Ok(1);
        }
        let even = |n: f64| (n / FRAME_FACTOR).floor() * FRAME_FACTOR;
        let total_f = total as f64;
        let n = match (self.nframes, self.fps) {
            (Some(_), Some(_)) => {
                return Err(MediaError::setting("fps, nframes", "both", "one of them"));
            }
            (Some(n), None) => (n as f64 / FRAME_FACTOR).round_ties_even() * FRAME_FACTOR,
            (None, fps) => {
                let fps = fps.unwrap_or(2.0);
                if !(fps.is_finite() && fps >= 0.0) {
                    return Err(MediaError::setting("fps", fps, "a rate of at least 0"));
                }
                let min = (self.min_frames.unwrap_or(4) as f64 / FRAME_FACTOR).ceil() * FRAME_FACTOR;
                let max = even(self.max_frames.unwrap_or(total.min(768)) as f64);
                even((total_f / video_fps * fps).max(min).min(max).min(total_f))
            }
        };
        let n = if self.as_many_as_there_are { n.min(even(total_f)) } else { n };
        if (FRAME_FACTOR..=total_f).contains(&n) {
            return Ok(n as usize);
        }
        Err(if total == 1 {
            MediaError::setting(
                "video (or its time range)",
                "1 frame",
                "at least 2, since frames are taken in pairs; give a single picture as an image",
            )
        } else {
            MediaError::setting(
                "number of frames",
                format!("{n} (taken in pairs)"),
                format!("2 to {total}, the frames of the video (or its time range)"),
            )
        })
    }
}

fn require_video(num_frames: usize, fps: f64) -> Result<(), MediaError> {
    if num_frames > 0 && fps.is_finite() && fps > 0.0 {
        return Ok(());
    }
    Err(MediaError::setting(
        "video to sample",
        format!("{num_frames} frames at {fps} fps"),
        "at least one frame and a positive rate",
    ))
}

fn check_rate(rate: f64, min_frames: usize, max_frames: usize) -> Result<(), MediaError> {
    if rate.is_finite() && rate > 0.0 && (1..=max_frames).contains(&min_frames) {
        return Ok(());
    }
    Err(MediaError::setting(
        "sampling by rate",
        format!("{rate} frames per second, {min_frames}..{max_frames} frames"),
        "a positive rate and 1 <= min_frames <= max_frames",
    ))
}

fn require_some(what: &str, n: usize) -> Result<(), MediaError> {
    if n == 0 { Err(MediaError::setting(what, 0, "at least 1")) } else { Ok(()) }
}

/// Computes `torch.linspace(start, end, n).round()` in f32, starting from the nearer end as torch does.
fn linspace_rounded(start: usize, end: usize, n: usize) -> Vec<usize> {
    let (first, last) = (start as f32, end as f32);
    let step = if n > 1 { (last - first) / (n - 1) as f32 } else { 0.0 };
    (0..n)
        .map(|i| {
            let x =
                if i < n / 2 || n == 1 { first + step * i as f32 } else { last - step * (n - 1 - i) as f32 };
            x.round_ties_even() as usize
        })
        .collect()
}

/// Computes `numpy.unique(numpy.linspace(start, end, n, dtype=int))`: in f64, truncated towards zero, without repeats.
fn linspace_cut(start: usize, end: usize, n: usize) -> Vec<usize> {
    let step = if n > 1 { (end - start) as f64 / (n - 1) as f64 } else { 0.0 };
    let at = |i: usize| (i as f64 * step + start as f64) as usize;
    let mut out: Vec<usize> = (0..n).map(|i| if n > 1 && i == n - 1 { end } else { at(i) }).collect();
    out.dedup();
    out
}

/// Returns `n` evenly spaced indices inside every segment, including its first and last frame, in time order. A segment with
/// fewer than `n` frames yields all its frames. `frame_counts` are rounded. If `n` is to be random, the caller draws it.
///
/// # Errors
/// Returns [`MediaError::Setting`] if there are no segments, if a count is not a number from 1 to 2^32, or if `n` is 0.
pub fn segment_indices(frame_counts: &[f64], n: usize) -> Result<Vec<usize>, MediaError> {
    require_some("frames per segment", n)?;
    require_some("number of segments", frame_counts.len())?;
    let mut start = 0usize;
    let mut out = Vec::new();
    for &count in frame_counts {
        let len = count.round_ties_even();
        if !(1.0..=f64::from(u32::MAX)).contains(&len) {
            return Err(MediaError::setting("frame_cnts", count, "segment lengths of at least one frame"));
        }
        let len = len as usize;
        out.extend(linspace_cut(0, len - 1, n.min(len)).into_iter().map(|i| start + i));
        start += len;
    }
    Ok(out)
}

/// Limits on the area of each frame of a video, following qwen-vl-utils.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PixelBudget {
    /// Minimum area of a frame, in pixels. The default is the area of 128 tokens, or `max_pixels` if that is less.
    pub min_pixels: Option<u64>,
    /// Maximum area of a frame, in pixels, in addition to the bound from `total_pixels`.
    pub max_pixels: Option<u64>,
    /// Total area of all frames that the model's context allows, in pixels, if two frames form one slice. The default is 90 % of
    /// the area of 128 000 tokens.
    pub total_pixels: Option<f64>,
}

impl PixelBudget {
    /// Returns the minimum and maximum area of each of `num_frames` frames, in pixels. `factor` is the side of a token in pixels
    /// (28).
    pub fn area_bounds(&self, num_frames: usize, factor: u32) -> (f64, f64) {
        let token = f64::from(factor) * f64::from(factor);
        let given_max = self.max_pixels.map_or(f64::INFINITY, |p| p as f64);
        let min = self.min_pixels.map_or((128.0 * token).min(given_max), |p| p as f64);
        let total = self.total_pixels.unwrap_or(128_000.0 * token * 0.9);
        let share = total / num_frames.max(1) as f64 * FRAME_FACTOR;
        let max = (768.0 * token).min(share).max((min * 1.05).trunc());
        (min, max.min(given_max))
    }

    /// Returns the size `(height, width)` to which `num_frames` frames of `height x width` are resized.
    pub fn frame_size(
        &self,
        num_frames: usize,
        height: u32,
        width: u32,
        factor: u32,
    ) -> Result<(u32, u32), MediaError> {
        let (min, max) = self.area_bounds(num_frames, factor);
        smart_resize(height, width, factor, min, max, ResizeRule::QwenVlUtils)
    }
}

/// Limits on the total number of pixels of all frames of a video, following `Qwen3VLVideoProcessor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClipBudget {
    /// Minimum number of pixels.
    pub min_pixels: u64,
    /// Maximum number of pixels.
    pub max_pixels: u64,
    /// Number of frames per time slice.
    pub slice_frames: u32,
}

impl ClipBudget {
    /// Returns the size `(height, width)` to which `num_frames` frames of `height x width` are resized. Both are multiples of
    /// `factor`.
    ///
    /// # Errors
    /// Returns [`MediaError::Setting`] if there are fewer frames than a slice has, or unless `min <= max`. Returns
    /// [`MediaError::Shape`] for an empty picture or a ratio of the sides above 200.
    pub fn frame_size(
        &self,
        num_frames: usize,
        height: u32,
        width: u32,
        factor: u32,
    ) -> Result<(u32, u32), MediaError> {
        let Self { min_pixels, max_pixels, slice_frames } = *self;
        if num_frames < slice_frames as usize || slice_frames == 0 {
            let expected = format!("at least {slice_frames}; give a single picture as an image");
            return Err(MediaError::setting("number of frames", num_frames, expected));
        }
        if factor == 0 || min_pixels > max_pixels || max_pixels > 1 << 40 {
            let got = format!("factor {factor}, {min_pixels} to {max_pixels} pixels");
            let expected = "factor >= 1 and minimum <= maximum <= 2^40";
            return Err(MediaError::setting("area bounds of a video", got, expected));
        }
        let (f, n, slice) = (f64::from(factor), num_frames as f64, f64::from(slice_frames));
        let (mut h, mut w) = (f64::from(height), f64::from(width));
        if h < f || w < f {
            let scale = (f / h).max(f / w);
            (h, w) = ((h * scale).trunc(), (w * scale).trunc());
        }
        if height == 0 || width == 0 || h.max(w) / h.min(w) > MAX_ASPECT_RATIO {
            return Err(MediaError::Shape {
                what: "video sides",
                got: format!("{width}x{height}"),
                expected: format!("sides of at least 1 with a ratio of at most {MAX_ASPECT_RATIO}"),
            });
        }
        let round = |x: f64, to: f64| (x / to).round_ties_even() * to;
        let (mut h_bar, mut w_bar) = (round(h, f), round(w, f));
        let volume = round(n, slice) * h_bar * w_bar;
        if volume > max_pixels as f64 {
            let beta = (n * h * w / max_pixels as f64).sqrt();
            let floor = |x: f64| ((x / beta / f).floor() * f).max(f);
            (h_bar, w_bar) = (floor(h), floor(w));
        } else if volume < min_pixels as f64 {
            let beta = (min_pixels as f64 / (n * h * w)).sqrt();
            let ceil = |x: f64| (x * beta / f).ceil() * f;
            (h_bar, w_bar) = (ceil(h), ceil(w));
        }
        if h_bar * w_bar > f64::from(u32::MAX) {
            let got = format!("{w_bar}x{h_bar}");
            let expected = "frames of fewer than 2^32 pixels".to_owned();
            return Err(MediaError::Shape { what: "resized video sides", got, expected });
        }
        Ok((h_bar as u32, w_bar as u32))
    }
}
