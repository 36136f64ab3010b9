//! Decoding of picture files to 8-bit RGB.
//!
//! PNG, JPEG, WebP, GIF, BMP and TIFF are supported and recognised by content. For an animation, the first frame is read. The
//! result equals that of Pillow and the `transformers` image processors for the same file:
//!
//! * transparency (RGBA, grey + alpha, palette or `tRNS`) is composited on white with Pillow's rounding;
//! * one-channel pictures are repeated over three channels; 16-bit colour keeps the high byte; 16-bit grey without alpha is
//!   clipped at 255 and not scaled, as in Pillow's conversion of mode `I;16` to RGB;
//! * the picture is turned upright by its orientation tag, or stays as it is stored ([`Orientation`]).
//!
//! Differences: lossy formats are not decoded with libjpeg-turbo and libwebp, which Pillow uses. JPEG pixels differ by up to 5 of
//! 255 levels (0.4 on average). A JPEG without an end marker is an error here, because the decoder would fill the missing part
//! with grey.
//!
//! Source: `transformers` 5.23 `image_transforms.convert_to_rgb`, Pillow 13 `Convert.c`, `Paste.c`.

use std::io::{BufRead, BufReader, Cursor, Read as _, Seek};
use std::path::Path;

use image::{DynamicImage, ImageFormat, ImageReader};
use rayon::prelude::*;

use crate::{Limits, MediaError, Orientation, Turn};

/// Supported formats, as listed in error messages.
pub(crate) const IMAGE_FORMATS: &str = "a PNG, JPEG, WebP, GIF, BMP or TIFF image";

/// An 8-bit RGB picture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rgb8Image {
    /// Width in pixels, at least 1.
    pub width_px: u32,
    /// Height in pixels, at least 1.
    pub height_px: u32,
    /// Pixels `[height, width, 3]`, row-major, in the order R G B.
    pub pixels: Vec<u8>,
}

impl Rgb8Image {
    /// Creates a picture from its pixels `[height, width, 3]`.
    ///
    /// # Errors
    /// Returns [`MediaError::Shape`] if a side is 0 or the length is not `height * width * 3`.
    pub fn new(width_px: u32, height_px: u32, pixels: Vec<u8>) -> Result<Self, MediaError> {
        let image = Self { width_px, height_px, pixels };
        image.check()?;
        Ok(image)
    }

    /// Creates a picture of a single colour.
    ///
    /// # Errors
    /// Returns [`MediaError::Shape`] if a side is 0.
    pub fn filled(width_px: u32, height_px: u32, rgb: [u8; 3]) -> Result<Self, MediaError> {
        Self::new(width_px, height_px, rgb.repeat(width_px as usize * height_px as usize))
    }

    /// Returns the part of the picture from column and row `from` up to `to`, exclusive.
    ///
    /// # Errors
    /// Returns [`MediaError::Shape`] if the part is empty or reaches beyond the picture.
    pub fn crop(&self, from: [u32; 2], to: [u32; 2]) -> Result<Self, MediaError> {
        self.check()?;
        if from[0] >= to[0] || from[1] >= to[1] || to[0] > self.width_px || to[1] > self.height_px {
            return Err(MediaError::Shape {
                what: "part of a picture",
                got: format!("{from:?} to {to:?} of {}x{}", self.width_px, self.height_px),
                expected: "a part with sides of at least 1 inside of the picture".into(),
            });
        }
        let row = 3 * self.width_px as usize;
        let columns = 3 * from[0] as usize..3 * to[0] as usize;
        let rows = self.pixels.chunks_exact(row).take(to[1] as usize).skip(from[1] as usize);
        Self::new(
            to[0] - from[0],
            to[1] - from[1],
            rows.flat_map(|row| &row[columns.clone()]).copied().collect(),
        )
    }

    /// Encodes the picture as a PNG file, quickly rather than small.
    ///
    /// # Errors
    /// Returns [`MediaError::Shape`] if the public fields do not agree with each other.
    pub fn to_png(&self) -> Result<Vec<u8>, MediaError> {
        use image::ImageEncoder as _;
        use image::codecs::png::{CompressionType, FilterType, PngEncoder};
        self.check()?;
        let mut file = Vec::new();
        let encoder = PngEncoder::new_with_quality(&mut file, CompressionType::Fast, FilterType::Adaptive);
        encoder
            .write_image(&self.pixels, self.width_px, self.height_px, image::ExtendedColorType::Rgb8)
            .map_err(|error| MediaError::Shape {
                what: "picture to write as PNG",
                got: error.to_string(),
                expected: "pixels that fit the size".into(),
            })?;
        Ok(file)
    }

    /// Returns an error if the public fields do not agree with each other.
    pub(crate) fn check(&self) -> Result<(), MediaError> {
        let expected = u64::from(self.width_px) * u64::from(self.height_px) * 3;
        if expected == 0 || self.pixels.len() as u64 != expected {
            return Err(MediaError::Shape {
                what: "pixels of an RGB picture",
                got: format!("{} bytes for {}x{}", self.pixels.len(), self.width_px, self.height_px),
                expected: "width * height * 3 bytes, sides of at least 1".into(),
            });
        }
        Ok(())
    }
}

/// Size and format of a picture, as stated in its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageInfo {
    /// Width of the stored pixels.
    pub width_px: u32,
    /// Height of the stored pixels.
    pub height_px: u32,
    /// Turn that brings the stored pixels upright.
    pub turn: Turn,
    /// File format, recognised by content.
    pub format: ImageFormat,
}

impl ImageInfo {
    /// Returns width and height of the picture as [`load_image`] returns it.
    pub fn size_px(&self, orientation: Orientation) -> [u32; 2] {
        self.turn.given(orientation).size([self.width_px, self.height_px])
    }
}

/// Decodes a picture file.
///
/// # Errors
/// Returns an error if the file cannot be read, is over a limit, is damaged, or has an unsupported format.
pub fn load_image(path: &Path, orientation: Orientation, limits: &Limits) -> Result<Rgb8Image, MediaError> {
    decode(path, &limits.read(path)?, orientation, limits)
}

/// Decodes a picture in memory. Errors contain `name` in place of a path.
pub fn load_image_bytes(
    name: &str,
    bytes: &[u8],
    orientation: Orientation,
    limits: &Limits,
) -> Result<Rgb8Image, MediaError> {
    let path = Path::new(name);
    Limits::check(path, "size in bytes", bytes.len() as u64, limits.max_file_bytes)?;
    decode(path, bytes, orientation, limits)
}

/// Reads the size, orientation and format from the headers of a picture, without decoding the picture. Damage after the header is not detected.
pub fn probe_image(path: &Path, limits: &Limits) -> Result<ImageInfo, MediaError> {
    let mut file = BufReader::new(limits.open(path)?);
    let read = |source| MediaError::Read { path: path.to_owned(), source };
    let mut start = Vec::new();
    file.by_ref().take(MAX_SIGNATURE_BYTES).read_to_end(&mut start).map_err(read)?;
    file.rewind().map_err(read)?;
    let format = require_known(path, &start)?;
    let turn = Turn::of_picture(&mut file, format);
    file.rewind().map_err(read)?;
    let reader = ImageReader::with_format(source(file), format);
    let (width_px, height_px) =
        guarded(path, || reader.into_dimensions().map_err(|e| MediaError::decode(path, e)))?;
    check_size(path, width_px, height_px, limits)?;
    Ok(ImageInfo { width_px, height_px, turn, format })
}

/// Returns true for pictures in a container of HEIF: HEIC, but not AVIF, which has the same container.
fn is_heic(start: &[u8]) -> bool {
    const BRANDS: [&[u8]; 7] = [b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1"];
    let brands = start.get(4..12).and_then(|own| own.strip_prefix(b"ftyp"));
    brands.is_some_and(|brand| BRANDS.contains(&brand)) && !start.windows(4).any(|own| own == b"avif")
}

fn is_known(format: ImageFormat) -> bool {
    use ImageFormat::{Bmp, Gif, Jpeg, Png, Tiff, WebP};
    matches!(format, Png | Jpeg | WebP | Gif | Bmp | Tiff)
}

/// Number of bytes at the start of a file that tell its format.
const MAX_SIGNATURE_BYTES: u64 = 64;

/// Returns the format of a picture, by the first bytes of its file.
fn require_known(path: &Path, start: &[u8]) -> Result<ImageFormat, MediaError> {
    let got = match image::guess_format(start).ok() {
        _ if is_heic(start) => {
            let word = |path: &Path| format!("'{}'", path.display().to_string().replace('\'', "'\\''"));
            format!(
                "the content is HEIC, the format of photos of an iPhone, which `heif-convert {} {}` converts (of the package \
                 libheif-examples of Debian and Ubuntu; on macOS: `sips -s format jpeg`)",
                word(path),
                word(&path.with_extension("jpg"))
            )
        }
        Some(format) if is_known(format) => return Ok(format),
        Some(format) => format!("the content is {}", format.to_mime_type()),
        None => "the content is not a supported image format".into(),
    };
    Err(MediaError::Format { path: path.to_owned(), got, expected: IMAGE_FORMATS })
}

pub(crate) fn check_size(
    path: &Path,
    width_px: u32,
    height_px: u32,
    limits: &Limits,
) -> Result<(), MediaError> {
    let num_pixels = u64::from(width_px) * u64::from(height_px);
    if num_pixels == 0 {
        return Err(MediaError::decode(path, format!("empty picture ({width_px}x{height_px})")));
    }
    Limits::check(path, "number of pixels", num_pixels, limits.max_pixels)
}

/// Reader of a picture's bytes, as a single type so that every decoder is compiled only once.
pub(crate) type Source<'a> = Box<dyn BufSeek + 'a>;

pub(crate) trait BufSeek: BufRead + Seek {}

impl<T: BufRead + Seek> BufSeek for T {}

pub(crate) fn source<'a>(from: impl BufSeek + 'a) -> Source<'a> {
    Box::new(from)
}

/// Converts the limits to the form that the decoders expect.
pub(crate) fn decoder_limits(limits: &Limits) -> image::Limits {
    let mut out = image::Limits::default();
    out.max_alloc = Some(limits.max_alloc_bytes);
    out
}

/// Runs a decoder. The decoders are memory-safe but may still have bugs, so a panic in a decoder is reported as a damaged file.
pub(crate) fn guarded<T>(
    path: &Path,
    decode: impl FnOnce() -> Result<T, MediaError>,
) -> Result<T, MediaError> {
    omnigrpo_guard::guarded(decode)
        .unwrap_or_else(|_| Err(MediaError::decode(path, "the decoder failed with an internal error")))
}

fn decode(
    path: &Path,
    bytes: &[u8],
    orientation: Orientation,
    limits: &Limits,
) -> Result<Rgb8Image, MediaError> {
    let format = require_known(path, bytes)?;
    if format == ImageFormat::Jpeg && !jpeg_has_end(bytes) {
        return Err(MediaError::decode(path, "JPEG data ends before its end marker"));
    }
    let (width_px, height_px) = guarded(path, || {
        ImageReader::with_format(source(Cursor::new(bytes)), format)
            .into_dimensions()
            .map_err(|e| MediaError::decode(path, e))
    })?;
    check_size(path, width_px, height_px, limits)?;
    let stored = guarded(path, || {
        let mut reader = ImageReader::with_format(source(Cursor::new(bytes)), format);
        reader.limits(decoder_limits(limits));
        rgb_from_dynamic(path, reader.decode().map_err(|e| MediaError::decode(path, e))?)
    })?;
    Ok(match orientation {
        Orientation::Upright => Turn::of_picture(&mut Cursor::new(bytes), format).apply(stored),
        Orientation::Stored => stored,
    })
}

/// Returns whether an end-of-image marker follows the last start of scan. Without this check, the JPEG decoder would fill a
/// truncated file with grey. Inside a scan, `FF` is never followed by `D9`. The markers of a thumbnail come before the last scan.
fn jpeg_has_end(bytes: &[u8]) -> bool {
    let marker = |code: u8| move |pair: &[u8]| pair == [0xFF, code];
    let Some(scan) = bytes.windows(2).rposition(marker(0xDA)) else { return false };
    bytes[scan..].windows(2).any(marker(0xD9))
}

pub(crate) fn rgb_from_dynamic(path: &Path, image: DynamicImage) -> Result<Rgb8Image, MediaError> {
    let (width_px, height_px) = (image.width(), image.height());
    let high = |x: u16| (x >> 8) as u8;
    let pixels = match image {
        DynamicImage::ImageRgb8(b) => b.into_raw(),
        DynamicImage::ImageRgba8(b) => on_white::<4>(b.as_raw()),
        DynamicImage::ImageLuma8(b) => b.as_raw().iter().flat_map(|&v| [v; 3]).collect(),
        DynamicImage::ImageLumaA8(b) => on_white::<2>(b.as_raw()),
        DynamicImage::ImageRgb16(b) => b.as_raw().iter().copied().map(high).collect(),
        DynamicImage::ImageRgba16(b) => {
            on_white::<4>(&b.as_raw().iter().copied().map(high).collect::<Vec<_>>())
        }
        DynamicImage::ImageLumaA16(b) => {
            on_white::<2>(&b.as_raw().iter().copied().map(high).collect::<Vec<_>>())
        }
        DynamicImage::ImageLuma16(b) => b.as_raw().iter().flat_map(|&v| [v.min(255) as u8; 3]).collect(),
        other => {
            return Err(MediaError::Format {
                path: path.to_owned(),
                got: format!("a pixel has {} bits", other.color().bits_per_pixel()),
                expected: "8- or 16-bit integer pixels",
            });
        }
    };
    Rgb8Image::new(width_px, height_px, pixels)
}

/// Composites pixels of N channels on white, where the last channel is alpha.
/// Pillow's rounding is `t = 255 (255 - a) + v a + 128`, then `(t + t/256) / 256`, which equals round(t/255) for all bytes.
fn on_white<const N: usize>(pixels: &[u8]) -> Vec<u8> {
    let mut out = vec![0u8; pixels.len() / N * 3];
    out.par_chunks_exact_mut(3).with_min_len(1 << 14).zip(pixels.par_chunks_exact(N)).for_each(|(rgb, p)| {
        let a = u32::from(p[N - 1]);
        for (c, out) in rgb.iter_mut().enumerate() {
            let v = u32::from(if N == 2 { p[0] } else { p[c] });
            let t = 255 * (255 - a) + v * a + 128;
            *out = (((t >> 8) + t) >> 8) as u8;
        }
    });
    out
}
