//! Media of a record, which requests name by their place in it. The content type follows from the first bytes of the file.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{Cursor, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use image::codecs::jpeg::JpegEncoder;
use image::{ImageFormat, RgbImage, imageops};
use omnigrpo_guard::told;
use omnigrpo_media::{
    FrameSampling, FrameSize, Limits, Orientation, Rgb8Image, VideoRequest, VideoSource, decode_video,
    load_image, probe_video,
};
use serde_json::{Value, json};

use crate::Error;
use crate::stamp::Stamp;

/// Largest number of frames in the preview of a clip.
const PREVIEW_FRAMES: usize = 16;
/// Largest PNG preview, in bytes. A larger one is stored as JPEG.
const PNG_BYTES: usize = 24 << 10;
/// Largest size of the previews that are kept, in bytes.
const KEPT_BYTES: usize = 16 << 20;

/// A media file that may be served.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Medium {
    pub(crate) path: PathBuf,
    /// Content type.
    pub(crate) mime: &'static str,
    /// Form in which the model reads it.
    pub(crate) orientation: Orientation,
}

/// Lists the media of a record for the page: file names, kinds, and the times of sampled frames in seconds.
pub(crate) fn listed(
    paths: &[String],
    frame_times_secs: &[Vec<f64>],
    orientation: Orientation,
) -> Vec<Value> {
    (0..paths.len())
        .map(|at| {
            let name = Path::new(&paths[at]).file_name().map(|name| name.to_string_lossy().into_owned());
            let times = frame_times_secs.get(at);
            match open(paths, at, orientation) {
                Ok(medium) => {
                    // A clip whose sound is also an input is listed twice.
                    let is_again = paths[..at].contains(&paths[at]) && times.is_none_or(Vec::is_empty);
                    let heard = is_again && medium.mime.starts_with("video/");
                    json!({
                        "name": name,
                        "mime": medium.mime,
                        "times": times,
                        "heard": heard,
                        "stored": orientation == Orientation::Stored,
                    })
                }
                Err(error) => json!({ "name": name, "error": told(&error) }),
            }
        })
        .collect()
}

/// Returns the index of the first picture or clip among the first media of a record.
pub(crate) fn first_picture(paths: &[String]) -> Option<usize> {
    (0..paths.len().min(4))
        .find(|&at| open(paths, at, Orientation::default()).is_ok_and(|own| !own.mime.starts_with("audio/")))
}

/// Opens the media file at index `at` of a record's list.
///
/// # Errors
/// Returns an error if the index is not in the list, if the path does not exist or leads to a different file, or if the file is not
/// a supported media file.
pub(crate) fn open(paths: &[String], at: usize, orientation: Orientation) -> Result<Medium, Error> {
    let path = Path::new(paths.get(at).ok_or_else(|| Error::missing("this media file does not exist"))?);
    // Runs record the real path of a file, after checking that it is inside its root.
    let real = fs::canonicalize(path).map_err(Error::io("open", path))?;
    if real != path {
        return Err(Error::missing(format!(
            "{} is not served: it leads to {}, but a run records the path of the file itself",
            path.display(),
            real.display()
        )));
    }
    if !real.is_file() {
        return Err(Error::missing(format!("{} is not a file", path.display())));
    }
    let mut head = Vec::new();
    let file = File::open(&real).map_err(Error::io("open", path))?;
    file.take(4096).read_to_end(&mut head).map_err(Error::io("read", path))?;
    let mime = mime_of(&head).ok_or_else(|| {
        Error::missing(format!(
            "{} is not served: it is not a picture, clip or sound that a browser can show",
            path.display()
        ))
    })?;
    Ok(Medium { path: real, mime, orientation })
}

/// Small copy of a picture, or the sampled frames of a clip side by side.
#[derive(Debug)]
pub(crate) struct Preview {
    /// Content type.
    pub(crate) mime: &'static str,
    pub(crate) bytes: Vec<u8>,
    /// Time of each frame, in seconds; empty for a picture.
    pub(crate) times_secs: Vec<f64>,
}

type Key = (PathBuf, Orientation, Stamp, u32, usize);

/// Previews that were made most recently.
#[derive(Debug, Default)]
pub(crate) struct Previews(Mutex<VecDeque<(Key, Arc<Preview>)>>);

impl Previews {
    /// Returns a preview whose longer side, or that of each frame, has at most `side_px` pixels. `times_secs` are the times of
    /// the sampled frames of a clip; at most `frames` of them are shown.
    pub(crate) fn of(
        &self,
        medium: &Medium,
        times_secs: &[f64],
        frames: usize,
        side_px: u32,
    ) -> Result<Arc<Preview>, Error> {
        let meta = fs::metadata(&medium.path).map_err(Error::io("look at", &medium.path))?;
        let key = (medium.path.clone(), medium.orientation, Stamp::of(&meta), side_px, frames);
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, own)) = kept().iter().find(|(own, _)| *own == key) {
            return Ok(Arc::clone(own));
        }
        let made = Arc::new(preview(medium, times_secs, frames.clamp(1, PREVIEW_FRAMES), side_px)?);
        let mut kept = kept();
        kept.push_back((key, Arc::clone(&made)));
        let mut total: usize = kept.iter().map(|(_, own)| own.bytes.len()).sum();
        while total > KEPT_BYTES {
            total -= kept.pop_front().map_or(total, |(_, own)| own.bytes.len());
        }
        Ok(made)
    }
}

fn preview(medium: &Medium, times_secs: &[f64], frames: usize, side_px: u32) -> Result<Preview, Error> {
    let failed = |why: String| Error::missing(format!("{} has no preview: {why}", medium.path.display()));
    let limits = Limits { timeout: Duration::from_secs(20), max_video_bytes: 64 << 20, ..Limits::default() };
    let is_clip = medium.mime.starts_with("video/") || !times_secs.is_empty();
    let (pictures, times_secs) = if is_clip {
        let source = VideoSource::from_path(&medium.path);
        let info = probe_video(&source, None, &limits).map_err(|error| failed(told(&error)))?;
        let orientation = medium.orientation;
        let [width, height] = info.size_px(orientation);
        let (width_px, height_px) = scaled(width, height, side_px);
        let sampling = match spread_over(times_secs, frames) {
            times_secs if times_secs.is_empty() => FrameSampling::Midpoints { num_frames: frames },
            times_secs => FrameSampling::Times { times_secs },
        };
        let size = FrameSize::Exact { width_px, height_px };
        let request = VideoRequest { sampling, size, listed_fps: None, orientation };
        let found = decode_video(&source, &request, &limits).map_err(|error| failed(told(&error)))?;
        (found.frames, found.timestamps_s)
    } else if medium.mime.starts_with("image/") {
        let picture = load_image(&medium.path, medium.orientation, &limits);
        (vec![picture.map_err(|error| failed(told(&error)))?], Vec::new())
    } else {
        return Err(failed("it is not a picture or clip".to_owned()));
    };
    let picture = side_by_side(pictures, side_px).ok_or_else(|| failed("it has no frame".to_owned()))?;
    let mut png = Cursor::new(Vec::new());
    picture.write_to(&mut png, ImageFormat::Png).map_err(|error| failed(error.to_string()))?;
    if png.get_ref().len() <= PNG_BYTES {
        return Ok(Preview { mime: "image/png", bytes: png.into_inner(), times_secs });
    }
    let mut bytes = Vec::new();
    let written = JpegEncoder::new_with_quality(&mut bytes, 85).encode_image(&picture);
    written.map_err(|error| failed(error.to_string()))?;
    Ok(Preview { mime: "image/jpeg", bytes, times_secs })
}

/// Returns at most `most` elements of a list, evenly spaced from the first to the last.
fn spread_over(all: &[f64], most: usize) -> Vec<f64> {
    let count = all.len().min(most);
    let at = |place: usize| place * all.len().saturating_sub(1) / count.saturating_sub(1).max(1);
    (0..count).map(|place| all[at(place)]).collect()
}

/// Joins pictures to one row, each scaled down to at most `side_px`.
fn side_by_side(pictures: Vec<Rgb8Image>, side_px: u32) -> Option<RgbImage> {
    let of = |own: Rgb8Image| {
        let (width, height) = scaled(own.width_px, own.height_px, side_px);
        let is_small = (width, height) == (own.width_px, own.height_px);
        let own = RgbImage::from_raw(own.width_px, own.height_px, own.pixels)?;
        Some(if is_small { own } else { imageops::thumbnail(&own, width, height) })
    };
    let pictures = pictures.into_iter().map(of).collect::<Option<Vec<_>>>()?;
    let (width, height) = pictures.first()?.dimensions();
    let mut row = RgbImage::new(width * pictures.len() as u32, height);
    for (at, own) in pictures.iter().enumerate() {
        imageops::replace(&mut row, own, at as i64 * i64::from(width), 0);
    }
    Some(row)
}

/// Returns the size with a longer side of at most `side_px`.
fn scaled(width: u32, height: u32, side_px: u32) -> (u32, u32) {
    let scale = (f64::from(side_px) / f64::from(width.max(height).max(1))).min(1.0);
    let side = |own: u32| ((f64::from(own) * scale).round() as u32).max(1);
    (side(width), side(height))
}

/// Determines the content type of a file from its first bytes.
fn mime_of(head: &[u8]) -> Option<&'static str> {
    let is = |at: usize, text: &[u8]| head.get(at..at + text.len()) == Some(text);
    Some(match () {
        () if is(0, b"\x89PNG\r\n\x1a\n") => "image/png",
        () if is(0, b"\xff\xd8\xff") => "image/jpeg",
        () if is(0, b"GIF87a") || is(0, b"GIF89a") => "image/gif",
        () if is(0, b"RIFF") && is(8, b"WEBP") => "image/webp",
        () if is(0, b"BM") && is(6, &[0; 4]) => "image/bmp",
        () if is(0, b"II*\0") || is(0, b"MM\0*") => "image/tiff",
        () if is(0, b"RIFF") && is(8, b"WAVE") => "audio/wav",
        () if is(0, b"RIFF") && is(8, b"AVI ") => "video/x-msvideo",
        () if is(0, b"fLaC") => "audio/flac",
        () if is(0, b"OggS") && head.windows(7).any(|w| w == b"\x80theora") => "video/ogg",
        () if is(0, b"OggS") => "audio/ogg",
        () if is(0, b"ID3") => "audio/mpeg",
        () if is(0, b"FORM") && (is(8, b"AIFF") || is(8, b"AIFC")) => "audio/aiff",
        () if is(0, b"\x1a\x45\xdf\xa3") && head.windows(4).any(|w| w == b"webm") => "video/webm",
        () if is(0, b"\x1a\x45\xdf\xa3") => "video/x-matroska",
        () if is(4, b"ftypM4A") || is(4, b"ftypM4B") => "audio/mp4",
        () if is(4, b"ftypqt") => "video/quicktime",
        () if is(4, b"ftyp") => "video/mp4",
        () if ["moov", "mdat", "wide", "free"].iter().any(|kind| is(4, kind.as_bytes())) => "video/quicktime",
        // An MPEG frame begins with eleven set bits, and its layer and version are not reserved values. The layer of ADTS is 0.
        () if head.len() > 2 && head[0] == 0xff && head[1] & 0xf6 == 0xf0 => "audio/aac",
        () if head.len() > 2
            && head[0] == 0xff
            && head[1] & 0xe0 == 0xe0
            && head[1] & 0x18 != 0x08
            && head[1] & 0x06 != 0
            && head[2] & 0xf0 != 0xf0 =>
        {
            "audio/mpeg"
        }
        () => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_what_they_begin_as() {
        let cases: [(&[u8], Option<&str>); 12] = [
            (b"\x89PNG\r\n\x1a\n....", Some("image/png")),
            (b"GIF89a", Some("image/gif")),
            (b"RIFF\x10\0\0\0WAVEfmt ", Some("audio/wav")),
            (b"RIFF\x10\0\0\0WEBPVP8 ", Some("image/webp")),
            (b"\0\0\0\x18ftypmp42", Some("video/mp4")),
            (b"\0\0\0\x18ftypqt  ", Some("video/quicktime")),
            (b"\xff\xfb\x90\x00", Some("audio/mpeg")),
            (b"\xff\xf1\x50\x80", Some("audio/aac")),
            (b"<html><script>", None),
            (b"<svg xmlns=", None),
            (b"root:x:0:0:", None),
            (b"", None),
        ];
        for (head, mime) in cases {
            assert_eq!(mime_of(head), mime, "{:?}", String::from_utf8_lossy(head));
        }
    }

    #[test]
    fn a_preview_is_small_and_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = fs::canonicalize(directory.path()).unwrap().join("wide.png");
        RgbImage::from_pixel(640, 4, image::Rgb([255, 0, 0])).save(&path).unwrap();
        let medium = Medium { path: path.clone(), mime: "image/png", orientation: Orientation::Upright };
        let previews = Previews::default();
        let made = previews.of(&medium, &[], 1, 320).unwrap();
        let picture = image::load_from_memory(&made.bytes).unwrap().into_rgb8();
        assert_eq!(
            (picture.dimensions(), picture[(319, 1)].0, made.mime),
            ((320, 2), [255, 0, 0], "image/png")
        );
        assert!(Arc::ptr_eq(&made, &previews.of(&medium, &[], 1, 320).unwrap()));
        assert_eq!(previews.of(&medium, &[], 1, 64).unwrap().times_secs, [0.0; 0]);
        // Noise is smaller as JPEG.
        let noise = RgbImage::from_fn(320, 320, |x, y| {
            image::Rgb([(x * y * 7919 % 251) as u8, (x * 31 + y * 17) as u8, (y * y) as u8])
        });
        noise.save(&path).unwrap();
        assert_eq!(previews.of(&medium, &[], 1, 320).unwrap().mime, "image/jpeg");
        fs::write(&path, "no picture").unwrap();
        assert!(
            previews.of(&medium, &[], 1, 320).unwrap_err().to_string().contains("wide.png has no preview: ")
        );
    }

    #[test]
    fn a_clip_shows_its_sampled_frames_side_by_side() {
        let directory = tempfile::tempdir().unwrap();
        let path = fs::canonicalize(directory.path()).unwrap().join("clip.gif");
        let frame = |grey: u8| {
            let picture = image::RgbaImage::from_pixel(8, 4, image::Rgba([grey, grey, grey, 255]));
            image::Frame::from_parts(picture, 0, 0, image::Delay::from_numer_denom_ms(500, 1))
        };
        let mut writer = image::codecs::gif::GifEncoder::new(File::create(&path).unwrap());
        writer.encode_frames([0, 80, 160, 240].map(frame)).unwrap();
        drop(writer);
        let medium = Medium { path, mime: "image/gif", orientation: Orientation::Upright };
        let greys = |times_secs: &[f64], frames: usize| -> (Vec<f64>, Vec<u8>) {
            let made = preview(&medium, times_secs, frames, 320).unwrap();
            let row = image::load_from_memory(&made.bytes).unwrap().into_rgb8();
            assert_eq!(row.height(), 4);
            (made.times_secs, (0..row.width() / 8).map(|at| row[(8 * at, 3)].0[0]).collect())
        };
        assert_eq!(greys(&[0.5, 1.0], 8), (vec![0.5, 1.0], vec![80, 160]));
        // Neither an even number nor equal distances.
        assert_eq!(greys(&[0.0, 1.0, 1.5], 8), (vec![0.0, 1.0, 1.5], vec![0, 160, 240]));
        assert_eq!(greys(&[0.0, 0.5, 1.5], 2), (vec![0.0, 1.5], vec![0, 240]));
        assert_eq!(greys(&[1.0, 1.5], 1), (vec![1.0], vec![160]));
        assert_eq!(greys(&[], 1).1.len(), 1);
    }

    #[test]
    fn only_the_file_itself_is_served() {
        let directory = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(directory.path()).unwrap();
        fs::create_dir(root.join("in")).unwrap();
        fs::write(root.join("in/a.png"), b"\x89PNG\r\n\x1a\n").unwrap();
        fs::write(root.join("in/secret.png"), "token").unwrap();
        let path = |name: &str| root.join(name).display().to_string();
        let mut paths =
            vec![path("in/a.png"), path("in/../in/a.png"), path("in/secret.png"), path("in"), path("x")];
        let open = |paths: &[String], at| open(paths, at, Orientation::Upright);
        assert_eq!(open(&paths, 0).unwrap().mime, "image/png");
        let told = |paths: &[String], at| open(paths, at).unwrap_err().to_string();
        assert!(told(&paths, 1).contains("a run records the path of the file itself"));
        assert!(told(&paths, 2).contains("it is not a picture, clip or sound"));
        assert!(told(&paths, 3).ends_with("in is not a file"));
        assert!(told(&paths, 4).ends_with("x does not exist"));
        assert!(told(&paths, 5).contains("this media file does not exist"));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(root.join("in/a.png"), root.join("in/link.png")).unwrap();
            paths.push(path("in/link.png"));
            assert!(told(&paths, 5).contains("a run records the path of the file itself"));
        }
    }
}
