//! Event files of TensorBoard: records of protobuf messages, each with its length and two checksums.
//!
//! Formats: `tensorboard/compat/proto/{event,summary,tensor}.proto` and TensorFlow's record format. The messages used here have
//! about a dozen fields, so the encoding is written by hand. Scalars are f32, like those of PyTorch's `SummaryWriter`.

use std::fs::{File, create_dir_all};
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crc::{CRC_32_ISCSI, Crc};
use omnigrpo_media::{Limits, Orientation};
use omnigrpo_observe::{Rollout, Tracked, Tracker};
use serde_json::{Map, Value};

use crate::media;

const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);
/// Largest picture that is written, in bytes. Larger pictures are left out.
const MAX_IMAGE_BYTES: u64 = 4 << 20;
/// Largest number of characters in a table cell.
const MAX_CELL_CHARS: usize = 4000;

/// Tracker that writes `tensorboard/events.out.tfevents.*` in a run directory.
pub struct TensorBoard {
    out: BufWriter<File>,
    /// Record written before the first event: the table of settings.
    first: Option<Message>,
}

impl TensorBoard {
    /// Creates an event file in a directory, and the directory itself if necessary. TensorBoard lists runs by their directories;
    /// `name` appears above the settings.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be written.
    pub fn begin(directory: &Path, name: &str, settings: &Map<String, Value>) -> Result<Self, String> {
        let failed = |error| format!("{} cannot be written: {error}", directory.display());
        create_dir_all(directory).map_err(failed)?;
        let now = now();
        // TensorBoard recognises its files by `tfevents` and reads the files of a directory in the order of their names.
        let file = format!("events.out.tfevents.{:010}.{}.omnigrpo", now as u64, std::process::id());
        let file = File::options().create_new(true).write(true).open(directory.join(file)).map_err(failed)?;
        let mut cells = vec!["run".to_owned(), plain(name)];
        for (name, value) in settings.iter().filter(|(name, _)| *name != "run_name") {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            cells.extend([plain(name), plain(&value)]);
        }
        let mut board = Self { out: BufWriter::new(file), first: Some(texts("settings", 2, &cells)) };
        let mut version = Message::default();
        version.f64(1, now).bytes(3, b"brain.Event:2");
        board.write(&version)?;
        Ok(board)
    }

    fn write(&mut self, event: &Message) -> Result<(), String> {
        let failed = |error| format!("its event file cannot be written: {error}");
        let length = (event.0.len() as u64).to_le_bytes();
        let mut record = length.to_vec();
        record.extend(masked(&length).to_le_bytes());
        record.extend(&event.0);
        record.extend(masked(&event.0).to_le_bytes());
        self.out.write_all(&record).map_err(failed)
    }

    /// Writes a summary. The first call also writes the settings and a marker that invalidates everything that an earlier session
    /// wrote from this step on.
    fn summary(&mut self, step: u64, values: &[Message]) -> Result<(), String> {
        let first = self.first.take();
        if first.is_some() {
            let (mut start, mut event) = (Message::default(), Message::default());
            start.int(1, 1);
            event.f64(1, now()).int(2, step).bytes(7, &start.0);
            self.write(&event)?;
        }
        let (mut summary, mut event) = (Message::default(), Message::default());
        for value in first.iter().chain(values) {
            summary.bytes(1, &value.0);
        }
        event.f64(1, now()).int(2, step).bytes(5, &summary.0);
        self.write(&event)?;
        self.out.flush().map_err(|error| format!("its event file cannot be written: {error}"))
    }
}

impl Tracker for TensorBoard {
    fn name(&self) -> &'static str {
        "tensorboard"
    }

    fn take(&mut self, event: &Tracked) -> Result<(), String> {
        match event {
            Tracked::Metrics { step, epoch, metrics } => {
                let epoch = [("epoch", Some(*epoch))];
                let all = metrics.iter().map(|(name, value)| (name.as_str(), *value)).chain(epoch);
                let values: Vec<Message> =
                    all.filter_map(|(name, value)| Some(scalar(name, value?))).collect();
                self.summary(*step, &values)
            }
            Tracked::Completions { step, rollouts } => {
                let mut values = vec![table(rollouts)];
                for (at, group) in rollouts.chunk_by(|a, b| a.group == b.group).enumerate() {
                    values.extend(image(&format!("prompts/{at}"), &group[0]));
                }
                self.summary(*step, &values)
            }
        }
    }

    fn finish(&mut self) -> Result<(), String> {
        self.out.get_ref().sync_all().map_err(|error| format!("its event file cannot be written: {error}"))
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// Computes the masked checksum of a record. The mask keeps checksums strong over data that itself contains checksums.
fn masked(bytes: &[u8]) -> u32 {
    CRC.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn scalar(tag: &str, value: f64) -> Message {
    let mut out = Message::default();
    out.bytes(1, tag.as_bytes()).f32(2, value as f32);
    out
}

/// Returns the first picture of a prompt with the unchanged bytes of its file.
fn image(tag: &str, rollout: &Rollout) -> Option<Message> {
    let medium = (0..rollout.media.len())
        .filter_map(|at| media::open(&rollout.media, at, Orientation::Upright).ok())
        .find(|medium| ["image/png", "image/jpeg", "image/gif"].contains(&medium.mime))?;
    if std::fs::metadata(&medium.path).ok()?.len() > MAX_IMAGE_BYTES {
        return None;
    }
    let info = omnigrpo_media::probe_image(&medium.path, &Limits::default()).ok()?;
    let bytes = std::fs::read(&medium.path).ok()?;
    let (mut picture, mut out) = (Message::default(), Message::default());
    // TensorBoard's page shows a picture upright.
    let [width, height] = info.size_px(Orientation::Upright);
    picture.int(1, height.into()).int(2, width.into()).int(3, 3).bytes(4, &bytes);
    out.bytes(1, tag.as_bytes()).bytes(4, &picture.0);
    Some(out)
}

/// Builds a table of completions. The plugin `text` displays a tensor of strings as Markdown, cell by cell.
fn table(rollouts: &[Rollout]) -> Message {
    let rewards: Vec<&String> = rollouts.first().map(|own| own.rewards.keys().collect()).unwrap_or_default();
    let header = ["row", "completion", "reward", "advantage"].into_iter().map(str::to_owned);
    let mut cells: Vec<String> = header.chain(rewards.iter().map(|name| plain(name))).collect();
    let columns = cells.len();
    let number = |value: Option<f64>| value.map_or_else(|| "none".to_owned(), |value| format!("{value:.4}"));
    for own in rollouts {
        cells.extend([
            plain(&own.id),
            plain(&own.completion),
            number(own.reward),
            number(Some(own.advantage)),
        ]);
        cells.extend(rewards.iter().map(|name| number(own.rewards.get(*name).copied().flatten())));
    }
    texts("completions", columns, &cells)
}

/// Builds a table of strings whose first row is the header.
fn texts(tag: &str, columns: usize, cells: &[String]) -> Message {
    let (mut shape, mut tensor, mut plugin, mut metadata, mut out) =
        (Message::default(), Message::default(), Message::default(), Message::default(), Message::default());
    for size in [cells.len() / columns, columns] {
        let mut dimension = Message::default();
        dimension.int(1, size as u64);
        shape.bytes(2, &dimension.0);
    }
    const DT_STRING: u64 = 7;
    tensor.int(1, DT_STRING).bytes(2, &shape.0);
    for cell in cells {
        tensor.bytes(8, cell.as_bytes());
    }
    let mut data = Message::default();
    data.bytes(1, b"text");
    plugin.bytes(1, &data.0);
    const DATA_CLASS_TENSOR: u64 = 2;
    metadata.0.extend(&plugin.0);
    metadata.int(4, DATA_CLASS_TENSOR);
    out.bytes(1, tag.as_bytes()).bytes(8, &tensor.0).bytes(9, &metadata.0);
    out
}

/// Escapes text so that Markdown displays it unchanged.
fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars().take(MAX_CELL_CHARS) {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '\\' | '`' | '*' | '_' | '[' | ']' | '#' | '|' | '!' => out.extend(['\\', c]),
            '\n' => out.push_str("<br>"),
            c => out.push(c),
        }
    }
    out
}

/// Builder of a protobuf message.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn key(&mut self, field: u64, kind: u64) {
        self.varint(field << 3 | kind);
    }

    fn int(&mut self, field: u64, value: u64) -> &mut Self {
        self.key(field, 0);
        self.varint(value);
        self
    }

    fn f64(&mut self, field: u64, value: f64) -> &mut Self {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn f32(&mut self, field: u64, value: f32) -> &mut Self {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(&mut self, field: u64, value: &[u8]) -> &mut Self {
        self.key(field, 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the records of the only file in a directory and verifies their checksums.
    fn records(directory: &Path) -> Vec<Vec<u8>> {
        let path = std::fs::read_dir(directory).unwrap().next().unwrap().unwrap().path();
        let bytes = std::fs::read(path).unwrap();
        let (mut rest, mut out) = (bytes.as_slice(), Vec::new());
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(word(&rest[8..]), masked(&rest[..8]));
            assert_eq!(word(&rest[12 + length..]), masked(&rest[12..12 + length]));
            out.push(rest[12..12 + length].to_vec());
            rest = &rest[16 + length..];
        }
        out
    }

    #[test]
    fn checksums_are_castagnolis() {
        assert_eq!(CRC.checksum(b"123456789"), 0xe306_9283);
        // The first record of every event file has a length of 24 bytes; TensorFlow writes this checksum for it.
        assert_eq!(masked(&24u64.to_le_bytes()).to_le_bytes(), [0xa3, 0x7f, 0x4b, 0x22]);
    }

    #[test]
    fn scalars_are_records_of_events() {
        let directory = tempfile::tempdir().unwrap();
        let settings =
            Map::from_iter([("beta".to_owned(), 0.5.into()), ("run_name".to_owned(), "a_b".into())]);
        let mut board = TensorBoard::begin(directory.path(), "a_b", &settings).unwrap();
        board.take(&Tracked::Metrics { step: 300, epoch: 0.5, metrics: Vec::new() }).unwrap();
        let metrics = vec![("loss".to_owned(), Some(0.25)), ("kl".to_owned(), None)];
        board.take(&Tracked::Metrics { step: 300, epoch: 0.5, metrics }).unwrap();
        board.finish().unwrap();
        let records = records(directory.path());
        assert_eq!(records.len(), 4);
        assert!(records[0].ends_with(b"\x1a\x0dbrain.Event:2"));
        // A session starts at step 300, which invalidates everything written from there on.
        assert!(records[1].ends_with(b"\x10\xac\x02\x3a\x02\x08\x01"));
        // Name and settings of the run, as a 2 × 2 tensor of strings.
        let table = b"\x08\x07\x12\x08\x12\x02\x08\x02\x12\x02\x08\x02\x42\x03run\x42\x04a\\_b\x42\x04beta\x42\x030.5";
        assert!(records[2].windows(table.len()).any(|own| own == table), "{:?}", records[2]);
        let loss = b"\x0a\x0b\x0a\x04loss\x15\x00\x00\x80\x3e";
        let epoch = b"\x0a\x0c\x0a\x05epoch\x15\x00\x00\x00\x3f";
        assert!(
            records[3].ends_with(&[&b"\x10\xac\x02\x2a\x1b"[..], loss, epoch].concat()),
            "{:?}",
            records[3]
        );
    }

    #[test]
    fn text_of_a_model_is_no_markup() {
        assert_eq!(plain("<b>*a_\n`&"), "&lt;b&gt;\\*a\\_<br>\\`&amp;");
    }
}
