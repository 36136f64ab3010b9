//! Turns that bring the stored pixels of a picture or clip upright.
//!
//! A phone stores most portrait photos as landscape pixels with an orientation tag, and marks clips with a rotation. With
//! [`Orientation::Upright`], pictures are turned as `ImageOps.exif_transpose` of Pillow turns them, for all eight values of the tag.
//! `transformers` and `datasets` do the same. The pixels are equal to the bit. The tag is read where Pillow reads it:
//!
//! * JPEG: the `Exif` segments before the scan, else XMP;
//! * PNG: the chunk `eXIf`, also after the pixels, else a text `Raw profile type exif`, else XMP;
//! * WebP: the chunk `EXIF`, else `XMP `, if the header announces them;
//! * TIFF: the tag itself, else XMP. Pillow turns a TIFF already when it loads it.
//!
//! Only headers are read. A missing, wrong or unreadable tag leaves a picture as it is stored. Deliberate difference: a tag whose
//! value is a fraction or a float is a wrong one.
//!
//! Source: Pillow 13 `ImageOps.py`, `Image.py` (`getexif`), `TiffImagePlugin.py` (`ImageFileDirectory_v2.load`).

use std::io::{self, BufRead, Read, Seek, SeekFrom};

use flate2::bufread::ZlibDecoder;
use image::ImageFormat;

use crate::Rgb8Image;

/// Form in which the pixels of pictures and clips are given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub enum Orientation {
    /// Turned as the file's orientation tag or display matrix says.
    #[default]
    Upright,
    /// Unchanged, in the form of the file.
    Stored,
}

/// Turn that brings stored pixels upright. Its number is the value of the EXIF tag 0x0112, from 1 to 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Turn(u8);

impl Default for Turn {
    /// Returns the turn that changes nothing.
    fn default() -> Self {
        Self::NONE
    }
}

/// Tag of the orientation in a directory of a TIFF or EXIF block.
const TAG: u16 = 0x0112;
/// Tag of an XMP packet in a TIFF.
const XMP_TAG: u16 = 700;
/// Maximum number of segments or chunks that are visited, and of entries of a directory.
const MAX_PARTS: usize = 1 << 16;
/// Maximum size of an EXIF block or XMP packet, in bytes. Larger ones are cut.
const MAX_BLOCK_BYTES: usize = 1 << 20;

impl Turn {
    /// The turn that changes nothing.
    pub const NONE: Self = Self(1);
    /// Half a turn.
    pub const HALF: Self = Self(3);
    /// A quarter of a turn, clockwise.
    pub const CLOCKWISE: Self = Self(6);
    /// A quarter of a turn, counterclockwise.
    pub const COUNTERCLOCKWISE: Self = Self(8);

    /// Returns the turn with this value of the tag, or `None` for a value that the standard does not have.
    pub fn from_exif(value: u64) -> Option<Self> {
        u8::try_from(value).ok().filter(|value| (1..=8).contains(value)).map(Self)
    }

    /// Returns the value of the tag.
    pub fn exif(self) -> u8 {
        self.0
    }

    /// Returns this turn for upright pixels, and no turn for stored ones.
    #[must_use]
    pub fn given(self, orientation: Orientation) -> Self {
        match orientation {
            Orientation::Upright => self,
            Orientation::Stored => Self::NONE,
        }
    }

    /// Returns width and height after the turn.
    pub fn size(self, [width, height]: [u32; 2]) -> [u32; 2] {
        if self.0 < 5 { [width, height] } else { [height, width] }
    }

    /// Turns a picture.
    pub(crate) fn apply(self, picture: Rgb8Image) -> Rgb8Image {
        if self == Self::NONE {
            return picture;
        }
        let (width, height) = (picture.width_px as usize, picture.height_px as usize);
        let (right, bottom) = (width.saturating_sub(1), (height.saturating_sub(1)) * width);
        // The first pixel of the result, and the steps to the next pixel and the next row, as places in the stored picture.
        let row = width as isize;
        let (first, step, next) = match self.0 {
            2 => (right, -1, row),
            3 => (right + bottom, -1, -row),
            4 => (bottom, 1, -row),
            5 => (0, row, 1),
            6 => (bottom, -row, 1),
            7 => (right + bottom, -row, -1),
            _ => (right, row, -1),
        };
        let [width_px, height_px] = self.size([picture.width_px, picture.height_px]);
        let mut pixels = Vec::with_capacity(picture.pixels.len());
        for y in 0..height_px as isize {
            for x in 0..width_px as isize {
                let at = 3 * first.wrapping_add_signed(x * step + y * next);
                pixels.extend_from_slice(&picture.pixels[at..at + 3]);
            }
        }
        Rgb8Image { width_px, height_px, pixels }
    }

    /// Reads the turn of a picture from its headers.
    pub(crate) fn of_picture(file: &mut (impl BufRead + Seek), format: ImageFormat) -> Self {
        Blocks::read(file, format).map(|blocks| blocks.turn()).unwrap_or_default()
    }
}

/// Blocks of a picture's headers that may have its orientation.
#[derive(Default)]
struct Blocks {
    /// EXIF block, with or without its mark `Exif`.
    exif: Option<Vec<u8>>,
    /// EXIF block as text of a PNG.
    profile: Option<Vec<u8>>,
    xmp: Option<Vec<u8>>,
    /// Value of the tag in the directory of a TIFF.
    of_tiff: Option<Option<u64>>,
}

impl Blocks {
    fn read(file: &mut (impl BufRead + Seek), format: ImageFormat) -> io::Result<Self> {
        let mut blocks = Self::default();
        file.rewind()?;
        // A file that ends early may have its tag before that.
        let read = match format {
            ImageFormat::Jpeg => blocks.jpeg(file),
            ImageFormat::Png => blocks.png(file),
            ImageFormat::WebP => blocks.webp(file),
            ImageFormat::Tiff => blocks.tiff(file),
            _ => Ok(()),
        };
        match read {
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(error),
            _ => Ok(blocks),
        }
    }

    /// Returns the turn. XMP counts only where no EXIF block has the tag.
    fn turn(self) -> Turn {
        let of_block = |block: &[u8]| {
            let block = (0..2).fold(block, |block, _| block.strip_prefix(b"Exif\0\0").unwrap_or(block));
            directory(&mut io::Cursor::new(block), TAG)
        };
        let block = self.exif.or_else(|| hexadecimal(&self.profile?));
        let tag = self.of_tiff.or_else(|| of_block(&block?).map(|value| value.number()));
        let value = tag.unwrap_or_else(|| xmp_value(&self.xmp?));
        value.and_then(Turn::from_exif).unwrap_or_default()
    }

    fn jpeg(&mut self, file: &mut (impl BufRead + Seek)) -> io::Result<()> {
        file.seek_relative(2)?;
        for _ in 0..MAX_PARTS {
            // Junk before a marker, and the bytes that pad it, are skipped.
            if byte(file)? != 0xFF {
                continue;
            }
            let mut marker = byte(file)?;
            while marker == 0xFF {
                marker = byte(file)?;
            }
            match marker {
                0x00 | 0x01 | 0xD0..=0xD8 => continue,
                0xD9 | 0xDA => break,
                _ => {}
            }
            let len = usize::from(u16::from_be_bytes(bytes(file)?)).saturating_sub(2);
            if marker != 0xE1 {
                file.seek_relative(len as i64)?;
                continue;
            }
            let segment = block(file, len as u64)?;
            if let Some(rest) = segment.strip_prefix(b"Exif\0\0") {
                let exif = self.exif.get_or_insert_default();
                exif.extend_from_slice(&rest[..rest.len().min(MAX_BLOCK_BYTES.saturating_sub(exif.len()))]);
            } else if let Some(rest) = segment.strip_prefix(b"http://ns.adobe.com/xap/1.0/\0") {
                self.xmp = Some(rest.to_owned());
            }
        }
        Ok(())
    }

    fn png(&mut self, file: &mut (impl BufRead + Seek)) -> io::Result<()> {
        file.seek_relative(8)?;
        for _ in 0..MAX_PARTS {
            let len = u32::from_be_bytes(bytes(file)?);
            let kind = bytes::<4>(file)?;
            match &kind {
                b"eXIf" => self.exif = Some(block(file, len.into())?),
                b"tEXt" | b"zTXt" | b"iTXt" => {
                    let text = block(file, len.into())?;
                    self.text(&kind, &text);
                }
                b"IEND" => break,
                _ => skip(file, len.into())?,
            }
            skip(file, 4)?;
        }
        Ok(())
    }

    /// Reads a text of a PNG.
    fn text(&mut self, kind: &[u8; 4], text: &[u8]) {
        let split = |text: &[u8]| {
            let at = text.iter().position(|&byte| byte == 0)?;
            Some((text[..at].to_owned(), text[at + 1..].to_owned()))
        };
        let inflated = |text: &[u8]| {
            let mut out = Vec::new();
            let read = ZlibDecoder::new(text).take(MAX_BLOCK_BYTES as u64).read_to_end(&mut out);
            read.is_ok().then_some(out)
        };
        let Some((key, rest)) = split(text) else { return };
        let value = match (kind, &rest[..]) {
            (b"tEXt", rest) => Some(rest.to_owned()),
            (b"zTXt", [0, rest @ ..]) => inflated(rest),
            (b"iTXt", [compressed, method, rest @ ..]) => split(rest)
                .and_then(|(_, rest)| split(&rest))
                .and_then(|(_, rest)| match (compressed, method) {
                    (0, _) => Some(rest),
                    (_, 0) => inflated(&rest),
                    _ => None,
                }),
            _ => None,
        };
        let place = match (&key[..], kind) {
            (b"Raw profile type exif", _) => &mut self.profile,
            (b"exif", b"tEXt") => &mut self.exif,
            (b"XML:com.adobe.xmp", _) => &mut self.xmp,
            _ => return,
        };
        if let Some(value) = value {
            *place = Some(value);
        }
    }

    fn webp(&mut self, file: &mut (impl BufRead + Seek)) -> io::Result<()> {
        const HAS_EXIF: u8 = 8;
        const HAS_XMP: u8 = 4;
        file.seek_relative(12)?;
        let mut flags = 0;
        for at in 0..MAX_PARTS {
            let kind = bytes::<4>(file)?;
            let len = u64::from(u32::from_le_bytes(bytes(file)?));
            let padded = len + len % 2;
            match &kind {
                b"VP8X" if at == 0 && len > 0 => {
                    flags = byte(file)?;
                    skip(file, padded - 1)?;
                }
                // Only the extended format has metadata.
                _ if at == 0 => break,
                b"EXIF" if flags & HAS_EXIF != 0 && self.exif.is_none() => {
                    self.exif = Some(block(file, len)?);
                    skip(file, padded - len)?;
                }
                b"XMP " if flags & HAS_XMP != 0 && self.xmp.is_none() => {
                    self.xmp = Some(block(file, len)?);
                    skip(file, padded - len)?;
                }
                _ => skip(file, padded)?,
            }
        }
        Ok(())
    }

    fn tiff(&mut self, file: &mut (impl BufRead + Seek)) -> io::Result<()> {
        self.of_tiff = directory(file, TAG).map(|value| value.number());
        file.rewind()?;
        self.xmp = directory(file, XMP_TAG).map(|value| value.bytes);
        Ok(())
    }
}

/// Value of a tag.
struct TagValue {
    kind: u16,
    bytes: Vec<u8>,
    little: bool,
}

impl TagValue {
    /// Returns the first of its whole numbers.
    fn number(&self) -> Option<u64> {
        const WHOLE: [u16; 7] = [3, 4, 6, 8, 9, 13, 16];
        let first = self.bytes.get(..unit_bytes(self.kind)?).filter(|_| WHOLE.contains(&self.kind))?;
        let add = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
        Some(if self.little { first.iter().rev().fold(0, add) } else { first.iter().fold(0, add) })
    }
}

/// Returns the size of one value of a type of TIFF, in bytes.
fn unit_bytes(kind: u16) -> Option<usize> {
    Some(match kind {
        1 | 2 | 6 | 7 => 1,
        3 | 8 => 2,
        4 | 9 | 11 | 13 => 4,
        5 | 10 | 12 | 16 => 8,
        _ => return None,
    })
}

/// Returns the value of a tag in the first directory of a TIFF or EXIF block, or `None` without the tag. Like Pillow, it skips
/// values that together are larger than the block, and stops at one that lies outside of the block.
fn directory(file: &mut (impl Read + Seek), tag: u16) -> Option<TagValue> {
    let end = file.seek(SeekFrom::End(0)).ok()?;
    file.rewind().ok()?;
    let (little, big) = match bytes(file).ok()? {
        [b'I', b'I', 42, 0] => (true, false),
        [b'M', b'M', 0, 42] => (false, false),
        [b'I', b'I', 43, 0] => (true, true),
        [b'M', b'M', 0, 43] => (false, true),
        _ => return None,
    };
    let number = |bytes: &[u8]| {
        let add = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
        if little { bytes.iter().rev().fold(0, add) } else { bytes.iter().fold(0, add) }
    };
    if big {
        file.seek_relative(4).ok()?;
    }
    let word = if big { 8 } else { 4 };
    let mut field = [0; 8];
    let mut read = |file: &mut dyn Read, len: usize| {
        file.read_exact(&mut field[..len]).ok()?;
        Some(number(&field[..len]))
    };
    let start = read(file, word)?;
    file.seek(SeekFrom::Start(start)).ok()?;
    let mut total = 0u64;
    for _ in 0..read(file, if big { 8 } else { 2 })?.min(MAX_PARTS as u64) {
        let mut entry = [0; 20];
        let entry = &mut entry[..4 + 2 * word];
        if file.read_exact(entry).is_err() {
            break;
        }
        let (name, kind) = (number(&entry[..2]) as u16, number(&entry[2..4]) as u16);
        let Some(unit) = unit_bytes(kind) else { continue };
        let (count, inline) = (number(&entry[4..4 + word]), &entry[4 + word..]);
        let Some(len) = count.checked_mul(unit as u64) else { break };
        let at = number(inline);
        let is_inline = len <= word as u64;
        if !is_inline {
            total = total.saturating_add(len);
            if total > end {
                continue;
            }
            if at.checked_add(len).is_none_or(|last| last > end) {
                break;
            }
        }
        if name != tag || len == 0 {
            continue;
        }
        let bytes = if is_inline {
            inline[..len as usize].to_owned()
        } else {
            file.seek(SeekFrom::Start(at)).ok()?;
            block(file, len).ok()?
        };
        return Some(TagValue { kind, bytes, little });
    }
    None
}

/// Returns the value that an XMP packet gives, as an attribute or an element.
fn xmp_value(packet: &[u8]) -> Option<u64> {
    const NAME: &[u8] = b"tiff:Orientation";
    let mut rest = packet;
    while let Some(at) = rest.windows(NAME.len()).position(|part| part == NAME) {
        rest = &rest[at + NAME.len()..];
        if let [b'=', b'"', digit, ..] | [b'>', digit, ..] = rest
            && digit.is_ascii_digit()
        {
            return Some(u64::from(digit - b'0'));
        }
    }
    None
}

/// Decodes the text `Raw profile type exif`: its bytes in hexadecimal, after three lines.
fn hexadecimal(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.splitn(4, |&byte| byte == b'\n').nth(3)?.iter();
    let digits = digits.filter(|byte| !byte.is_ascii_whitespace());
    let digits: Option<Vec<u8>> = digits.map(|&byte| Some(char::from(byte).to_digit(16)? as u8)).collect();
    let (pairs, rest) = digits.as_ref()?.as_chunks::<2>();
    rest.is_empty().then(|| pairs.iter().map(|[high, low]| high << 4 | low).collect())
}

fn byte(file: &mut impl Read) -> io::Result<u8> {
    bytes::<1>(file).map(|[byte]| byte)
}

fn bytes<const N: usize>(file: &mut impl Read) -> io::Result<[u8; N]> {
    let mut out = [0; N];
    file.read_exact(&mut out)?;
    Ok(out)
}

/// Reads a block of `len` bytes, or the part of it that is within the limit, and moves behind it.
fn block(file: &mut (impl Read + Seek), len: u64) -> io::Result<Vec<u8>> {
    let kept = len.min(MAX_BLOCK_BYTES as u64);
    let mut out = Vec::new();
    if (file.by_ref().take(kept).read_to_end(&mut out)? as u64) < kept {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    skip(file, len - kept)?;
    Ok(out)
}

fn skip(file: &mut impl Seek, len: u64) -> io::Result<()> {
    file.seek_relative(len as i64)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A photo of a phone: the tag, a thumbnail and other segments in front of four megabytes of pixels.
    #[test]
    fn the_tag_of_a_photo_is_read_in_less_than_a_millisecond() {
        let mut photo = b"\xff\xd8".to_vec();
        let mut segment = |marker: u8, content: &[u8]| {
            photo.extend([0xff, marker]);
            photo.extend(u16::try_from(content.len() + 2).unwrap().to_be_bytes());
            photo.extend(content);
        };
        let exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x08\0\0\0\0\0\0\0";
        segment(0xe0, b"JFIF\0");
        (0..12).for_each(|_| segment(0xe2, &[0; 60_000]));
        segment(0xe1, &[&exif[..], &[0; 60_000]].concat());
        segment(0xda, &[0; 10]);
        photo.resize(photo.len() + (4 << 20), 0x55);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), photo).unwrap();
        let read = |_| {
            let started = Instant::now();
            let mut file = io::BufReader::new(std::fs::File::open(file.path()).unwrap());
            assert_eq!(Turn::of_picture(&mut file, ImageFormat::Jpeg), Turn::COUNTERCLOCKWISE);
            started.elapsed()
        };
        // The machine may be busy, so the fastest of several counts.
        let fastest = (0..50).map(read).min().unwrap();
        assert!(fastest.as_micros() < 1000, "{fastest:?}");
    }

    #[test]
    fn turns_have_the_sizes_and_values_of_the_standard() {
        assert_eq!(
            (0..10).filter_map(Turn::from_exif).map(Turn::exif).collect::<Vec<_>>(),
            [1, 2, 3, 4, 5, 6, 7, 8]
        );
        for value in 1..=8 {
            let turn = Turn::from_exif(value).unwrap();
            assert_eq!(turn.size([3, 2]), if value < 5 { [3, 2] } else { [2, 3] });
            assert_eq!(turn.given(Orientation::Stored), Turn::NONE);
        }
    }
}
