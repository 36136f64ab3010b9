//! A store for decoded media, which stay in memory from one pass over the data to the next.
//!
//! The key of a medium covers everything that determines its decoded values: the content of its files (SHA-256), the row's
//! options and the run's settings. It includes the number of frames if that number is drawn. If frames are shuffled, it includes
//! the medium's place in the dataset, which determines their order. A file that changes is therefore decoded again, and a medium
//! that several rows share is decoded once. Errors are not stored.
//!
//! The store keeps the media that came first, up to a limit in bytes. A pass over shuffled data returns to a medium after most of
//! the others. With room for a fraction c of the data, this store answers a fraction c of all requests. A store that evicts the
//! least recently used medium (LRU) would answer c + (1 − c) ln(1 − c): 6 % instead of 33 % for c = 1/3, and none if the order is
//! the same in each pass.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use omnigrpo_data::{MediumInfo, MediumRef, MediumSource};
use omnigrpo_media::VideoSource;
use omnigrpo_text::Form;
use sha2::{Digest, Sha256};

use crate::families::{MediaSettings, MediumInput, MediumKey};

/// Largest total size of a medium's files, in bytes, for which the files are hashed. Decoding a few frames of a longer film takes
/// no longer than reading its file.
const MOST_READ: u64 = 256 << 20;
/// Bytes of a file that are in memory at a time while it is hashed.
const PIECE: usize = 128 << 10;

type Name = [u8; 32];

/// Decoded media of one checkpoint, shared by everything that builds prompts for it ([`Checkpoint::media_store`]). The store
/// keeps nothing until it is given a size.
///
/// [`Checkpoint::media_store`]: crate::Checkpoint::media_store
#[derive(Default)]
pub struct MediaStore {
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    usage: MediaUsage,
    media: HashMap<Name, Arc<Decoded>>,
}

/// Contents and hit counts of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaUsage {
    /// Size limit in bytes; 0 if the store is off.
    pub max_bytes: u64,
    /// Memory used by the contents, in bytes.
    pub bytes: u64,
    /// Media that were requested while the store was on.
    pub asked: u64,
    /// Requests that the store answered.
    pub found: u64,
}

/// A decoded medium, with the header of its file.
pub(crate) struct Decoded {
    pub header: MediumInfo,
    pub input: Arc<MediumInput>,
}

impl Decoded {
    /// Returns the size of the heap memory in bytes.
    fn num_bytes(&self) -> u64 {
        let MediumInput { data, frame_times_secs, .. } = &*self.input;
        let fixed = size_of::<Name>() + size_of::<Self>() + size_of::<MediumInput>();
        (fixed + size_of::<f32>() * data.capacity() + size_of::<f64>() * frame_times_secs.capacity()) as u64
    }
}

/// Result of a request: the medium if it is stored, and the key under which it is kept.
#[derive(Default)]
pub(crate) struct Found {
    pub decoded: Option<Arc<Decoded>>,
    name: Option<Name>,
}

impl MediaStore {
    /// Sets the size limit in bytes. If the present contents exceed it, they are all dropped.
    pub fn set_max_bytes(&self, max_bytes: u64) {
        let mut kept = self.kept();
        kept.usage.max_bytes = max_bytes;
        if kept.usage.bytes > max_bytes {
            kept.usage.bytes = 0;
            kept.media = HashMap::new();
        }
    }

    /// Returns the contents and hit counts.
    pub fn usage(&self) -> MediaUsage {
        self.kept().usage
    }

    /// Looks up a medium that is decoded with these settings.
    pub(crate) fn find(&self, medium: &MediumRef, settings: &MediaSettings) -> Found {
        if self.usage().max_bytes == 0 {
            return Found::default();
        }
        let name = name_of(medium, settings);
        let mut kept = self.kept();
        let decoded = name.and_then(|name| kept.media.get(&name).cloned());
        kept.usage.asked += 1;
        kept.usage.found += u64::from(decoded.is_some());
        Found { decoded, name }
    }

    /// Stores a decoded medium if there is room and its files have not changed since the lookup.
    pub(crate) fn keep(&self, found: &Found, medium: &MediumRef, settings: &MediaSettings, decoded: Decoded) {
        let (Some(name), bytes) = (found.name, decoded.num_bytes()) else { return };
        let room = |usage: MediaUsage| usage.max_bytes.saturating_sub(usage.bytes) >= bytes;
        if !room(self.usage()) || name_of(medium, settings) != Some(name) {
            return;
        }
        let mut kept = self.kept();
        if room(kept.usage) && !kept.media.contains_key(&name) {
            kept.media.insert(name, Arc::new(decoded));
            kept.usage.bytes += bytes;
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the key of a medium under these settings, or `None` if a file is too large, too slow or unreadable. Decoding reports
/// unreadable files.
fn name_of(medium: &MediumRef, settings: &MediaSettings) -> Option<Name> {
    let source = match &medium.source {
        MediumSource::Path(path) => VideoSource::from_path(path),
        MediumSource::Frames(frames) => VideoSource::FrameList(frames.clone()),
    };
    let mut hash = Sha256::new();
    let (mut left, started) = (MOST_READ, Instant::now());
    let mut piece = vec![0; PIECE];
    for path in source.files(&settings.limits).ok()? {
        let about = std::fs::metadata(&path).ok()?;
        // Opening anything but a regular file might block forever.
        left = left.checked_sub(about.len()).filter(|_| about.is_file())?;
        // Decoders may choose the format by the file name extension.
        hash.update(path.extension().map_or(&[][..], |ending| ending.as_encoded_bytes()));
        hash.update(format!("\0{}\n", about.len()));
        let mut file = File::open(&path).ok()?.take(about.len());
        loop {
            match file.read(&mut piece).ok()? {
                0 => break,
                _ if started.elapsed() >= settings.limits.timeout => return None,
                read => hash.update(&piece[..read]),
            }
        }
    }
    let shuffled = settings.shuffle_frames && medium.kind.form() == Form::Clip;
    let rest = MediaSettings {
        shuffle_frames: shuffled,
        seed: if shuffled { settings.seed } else { 0 },
        // This setting acts only through the drawn number of frames, which is hashed below.
        dynamic_sample: false,
        key: if shuffled { MediumKey { epoch: 0, ..settings.key } } else { MediumKey::default() },
        ..settings.clone()
    };
    let drawn = settings.drawn(medium);
    hash.update(serde_json::to_vec(&(medium.kind, &medium.options, &rest, drawn)).ok()?);
    Some(hash.finalize().into())
}
