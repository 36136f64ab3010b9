//! Decoded media that stay in memory from one pass over the data to the next.
//!
//! Media are told apart by what decides their numbers: the content of their files (SHA-256), the row's options and the run's
//! settings, with the number of frames where one is drawn, and the medium's place in the dataset where frames are shuffled, which
//! keys their order. So a file that changes is decoded again, and a medium that several rows show is decoded once. Errors are not
//! kept.
//!
//! The store keeps the media that came first, up to a bound in bytes. A pass over shuffled data comes back to a medium after most others: with room
//! for a share c of the data, what stays is found in a share c of all cases, while a store that made room for the newest (LRU)
//! would find c + (1 − c) ln(1 − c), 6 % in the place of 33 % for a third, and nothing where the order is the same in each pass.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use omnigrpo_data::{MediumInfo, MediumRef, MediumSource};
use omnigrpo_media::VideoSource;
use omnigrpo_text::MediumKind;
use sha2::{Digest, Sha256};

use crate::families::{MediaSettings, MediumInput, MediumKey};

/// Files of a medium beyond so many bytes are not read to be told apart: a few frames of a film are decoded as quickly.
const MOST_READ: u64 = 256 << 20;
/// Bytes of a file that are in memory at a time.
const PIECE: usize = 128 << 10;

type Name = [u8; 32];

/// Decoded media of one checkpoint, for everything that makes prompts for it ([`Checkpoint::media_store`]). It keeps nothing
/// until it is given room.
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

/// Contents of a store, and how often it had a requested medium.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaUsage {
    /// The most it may hold, bytes; 0: it is off.
    pub max_bytes: u64,
    /// Memory of the contents, bytes.
    pub bytes: u64,
    /// Media that were asked for while it was on.
    pub asked: u64,
    /// Requests that the store could answer.
    pub found: u64,
}

/// A medium as its header and its content are.
pub(crate) struct Decoded {
    pub header: MediumInfo,
    pub input: Arc<MediumInput>,
}

impl Decoded {
    /// Returns the bytes of the heap.
    fn num_bytes(&self) -> u64 {
        let MediumInput { data, frame_times_secs, .. } = &*self.input;
        let fixed = size_of::<Name>() + size_of::<Self>() + size_of::<MediumInput>();
        (fixed + size_of::<f32>() * data.capacity() + size_of::<f64>() * frame_times_secs.capacity()) as u64
    }
}

/// The answer of a store: what it has, else under which name it would keep it.
#[derive(Default)]
pub(crate) struct Found {
    pub decoded: Option<Arc<Decoded>>,
    name: Option<Name>,
}

impl MediaStore {
    /// Bounds what is kept, bytes. What is there already is given up where it is more.
    pub fn set_max_bytes(&self, max_bytes: u64) {
        let mut kept = self.kept();
        kept.usage.max_bytes = max_bytes;
        if kept.usage.bytes > max_bytes {
            kept.usage.bytes = 0;
            kept.media = HashMap::new();
        }
    }

    /// Returns the usage.
    #[must_use]
    pub fn usage(&self) -> MediaUsage {
        self.kept().usage
    }

    /// Looks for a medium as these settings read it.
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

    /// Keeps what was not found, if there is room and its files are still the ones that it was looked for by.
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

/// The name of a medium under these settings. None where a file is large, slow or cannot be read; decoding tells the last.
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
        // Opening anything else may never return.
        left = left.checked_sub(about.len()).filter(|_| about.is_file())?;
        // Decoders may go by the end of a name.
        hash.update(format!("{:?} {}\n", path.extension(), about.len()));
        let mut file = File::open(&path).ok()?.take(about.len());
        loop {
            match file.read(&mut piece).ok()? {
                0 => break,
                _ if started.elapsed() >= settings.limits.timeout => return None,
                read => hash.update(&piece[..read]),
            }
        }
    }
    let shuffled = settings.shuffle_frames && medium.kind == MediumKind::Video;
    let rest = MediaSettings {
        shuffle_frames: shuffled,
        seed: if shuffled { settings.seed } else { 0 },
        // They act through the number that is drawn.
        dynamic_sample: false,
        key: if shuffled { MediumKey { epoch: 0, ..settings.key } } else { MediumKey::default() },
        ..settings.clone()
    };
    let drawn = settings.drawn(medium);
    hash.update(format!("{:?} {:?} {rest:?} {drawn:?}", medium.kind, medium.options));
    Some(hash.finalize().into())
}
