//! Writer of QuickTime files with PNG frames and 16-bit mono sound, without loss and without an external encoder.
//!
//! Source: Apple, QuickTime File Format Specification: `ftyp`, `mdat` with all frames and then all samples, `moov` with a
//! track for each.

/// Returns the bytes of a file that shows `fps` frames a second.
pub(super) fn file(frames: &[Vec<u8>], side_px: u32, fps: u32, samples: &[i16], rate_hz: u32) -> Vec<u8> {
    let mut out = atom(b"ftyp", &[b"qt  ", &[0, 0, 2, 0], b"qt  "]);
    let sound: Vec<u8> = samples.iter().flat_map(|s| s.to_le_bytes()).collect();
    let picture = frames.concat();
    let picture_at = out.len() as u32 + 8;
    let sound_at = picture_at + picture.len() as u32;
    out.extend(atom(b"mdat", &[&picture, &sound]));

    let (num_frames, num_samples) = (frames.len() as u32, samples.len() as u32);
    let duration = (num_frames * rate_hz / fps).max(num_samples);
    let sizes: Vec<u8> = frames.iter().flat_map(|frame| (frame.len() as u32).to_be_bytes()).collect();
    let side = side_px as u16;
    let png = atom(
        b"png ",
        &[
            &[0, 0, 0, 0, 0, 0, 0, 1], // file 1
            &[0; 16],                  // version, vendor, qualities
            &words16(&[side, side]),
            &words(&[72 << 16, 72 << 16, 0]), // dots per inch, data size
            &words16(&[1]),                   // frames per sample
            &[0; 32],                         // name of the encoder
            &words16(&[24, 0xffff]),          // depth, no colour table
        ],
    );
    let pcm = atom(
        b"sowt", // 16 bits, little-endian
        &[&[0, 0, 0, 0, 0, 0, 0, 1], &[0; 8], &words16(&[1, 16, 0, 0]), &words(&[rate_hz << 16])],
    );
    let video = Track {
        id: 1,
        handler: b"vide",
        header: full(b"vmhd", 1, &[&[0; 8]]),
        entry: png,
        timescale: fps,
        num_samples: num_frames,
        sizes: full(b"stsz", 0, &[&words(&[0, num_frames]), &sizes]),
        at: picture_at,
        side_px,
        volume: 0,
    };
    let audio = Track {
        id: 2,
        handler: b"soun",
        header: full(b"smhd", 0, &[&[0; 4]]),
        entry: pcm,
        timescale: rate_hz,
        num_samples,
        sizes: full(b"stsz", 0, &[&words(&[2, num_samples])]),
        at: sound_at,
        side_px: 0,
        volume: 0x100,
    };
    let movie = full(
        b"mvhd",
        0,
        &[
            &words(&[0, 0, rate_hz, duration, 1 << 16]),
            &words16(&[0x100]),
            &[0; 10],
            &matrix(),
            &[0; 24],
            &words(&[3]),
        ],
    );
    out.extend(atom(b"moov", &[&movie, &video.atom(duration), &audio.atom(duration)]));
    out
}

/// A track whose samples are contiguous, in one chunk.
struct Track {
    id: u32,
    handler: &'static [u8; 4],
    header: Vec<u8>,
    entry: Vec<u8>,
    /// Samples per second.
    timescale: u32,
    num_samples: u32,
    sizes: Vec<u8>,
    /// Offset of the first sample in the file, bytes.
    at: u32,
    side_px: u32,
    volume: u16,
}

impl Track {
    /// Returns the `trak` atom. `duration` is the duration of the movie, in the movie's unit.
    fn atom(&self, duration: u32) -> Vec<u8> {
        let n = self.num_samples;
        let table = atom(
            b"stbl",
            &[
                &full(b"stsd", 0, &[&words(&[1]), &self.entry]),
                &full(b"stts", 0, &[&words(&[1, n, 1])]),
                &full(b"stsc", 0, &[&words(&[1, 1, n, 1])]),
                &self.sizes,
                &full(b"stco", 0, &[&words(&[1, self.at])]),
            ],
        );
        let here = full(b"dref", 0, &[&words(&[1]), &full(b"url ", 1, &[])]);
        let information = atom(b"minf", &[&self.header, &atom(b"dinf", &[&here]), &table]);
        let handler = full(b"hdlr", 0, &[&[0; 4], self.handler, &[0; 13]]);
        let media_header = full(b"mdhd", 0, &[&words(&[0, 0, self.timescale, n]), &words16(&[0x55c4, 0])]);
        let media = atom(b"mdia", &[&media_header, &handler, &information]);
        let side = self.side_px << 16;
        let header = full(
            b"tkhd",
            3, // enabled, in the movie
            &[
                &words(&[0, 0, self.id, 0, duration, 0, 0]),
                &words16(&[0, 0, self.volume, 0]),
                &matrix(),
                &words(&[side, side]),
            ],
        );
        atom(b"trak", &[&header, &media])
    }
}

fn atom(name: &[u8; 4], parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    [&(body.len() as u32 + 8).to_be_bytes(), name.as_slice(), &body].concat()
}

/// Returns an atom with version 0 and the given flags.
fn full(name: &[u8; 4], flags: u32, parts: &[&[u8]]) -> Vec<u8> {
    atom(name, &[&flags.to_be_bytes(), &parts.concat()])
}

fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_be_bytes()).collect()
}

fn words16(numbers: &[u16]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_be_bytes()).collect()
}

/// Returns the identity matrix: no shift and no rotation.
fn matrix() -> Vec<u8> {
    words(&[1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30])
}
