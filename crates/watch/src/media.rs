//! Media of a record, which requests name by their place in it. The content type follows from the first bytes of the file.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use omnigrpo_guard::told;
use serde_json::{Value, json};

use crate::Error;

/// A media file that may be served.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Medium {
    pub(crate) path: PathBuf,
    /// Content type.
    pub(crate) mime: &'static str,
}

/// Lists the media of a record for the page: file names, kinds, and the times of sampled frames in seconds.
pub(crate) fn listed(paths: &[String], frame_times_secs: &[Vec<f64>]) -> Vec<Value> {
    (0..paths.len())
        .map(|at| {
            let name = Path::new(&paths[at]).file_name().map(|name| name.to_string_lossy().into_owned());
            let times = frame_times_secs.get(at);
            match open(paths, at) {
                Ok(medium) => {
                    // A clip whose sound is also an input is listed twice.
                    let is_again = paths[..at].contains(&paths[at]) && times.is_none_or(Vec::is_empty);
                    let heard = is_again && medium.mime.starts_with("video/");
                    json!({ "name": name, "mime": medium.mime, "times": times, "heard": heard })
                }
                Err(error) => json!({ "name": name, "error": told(&error) }),
            }
        })
        .collect()
}

/// Opens the media file at index `at` of a record's list.
///
/// # Errors
/// Returns an error if the index is not in the list, if the path does not exist or leads to a different file, or if the file is
/// not
/// a supported media file.
pub(crate) fn open(paths: &[String], at: usize) -> Result<Medium, Error> {
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
    Ok(Medium { path: real, mime })
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
    fn only_the_file_itself_is_served() {
        let directory = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(directory.path()).unwrap();
        fs::create_dir(root.join("in")).unwrap();
        fs::write(root.join("in/a.png"), b"\x89PNG\r\n\x1a\n").unwrap();
        fs::write(root.join("in/secret.png"), "token").unwrap();
        let path = |name: &str| root.join(name).display().to_string();
        let mut paths =
            vec![path("in/a.png"), path("in/../in/a.png"), path("in/secret.png"), path("in"), path("x")];
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
