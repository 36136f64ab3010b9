//! Which instructions multiply bf16 weights: a choice by the model of the CPU, or by the program's user.
//!
//! A bf16 weight can be widened and multiplied as f32, which rounds nothing. Or the other factor is rounded to bf16 too, and products
//! of pairs are added up in vectors (`VDPBF16PS`, AVX512-BF16) or in matrix tiles (AMX). Tiles are several times as fast as
//! vectors wherever they exist. The instruction for vectors is not: Zen 4 and 5 start as many of it in a cycle as multiply-adds, so
//! it doubles the rate; Sapphire and Emerald Rapids start one in two cycles beside four multiply-adds, so it halves it.
//!
//! So [`TABLE`] decides by vendor, family and model, never by a measurement of the moment: runs on one model then have the same bits.
//! Models that it does not have widen.

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::{probe, tiles};

/// A way to multiply with bf16 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Path {
    /// Weights are widened to f32; nothing is rounded.
    Widened = 1,
    /// Vectors multiply pairs of bf16.
    Dot,
    /// Matrix tiles multiply bf16.
    Amx,
}

impl Path {
    /// Every one, the slowest instruction first.
    pub const ALL: [Self; 3] = [Self::Widened, Self::Dot, Self::Amx];

    /// Returns its name among the settings.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Widened => "widened",
            Self::Dot => "dot",
            Self::Amx => "amx",
        }
    }

    /// Whether its instructions work here and are not switched off.
    #[must_use]
    pub fn works(self) -> bool {
        match self {
            Self::Widened => true,
            Self::Dot => tiles::has_pairs(),
            Self::Amx => tiles::available(),
        }
    }

    /// Why it does or does not work.
    #[must_use]
    pub fn why(self) -> &'static str {
        match self {
            Self::Widened => "every CPU can",
            Self::Dot => &probe::bf16().why,
            Self::Amx => &probe::amx().why,
        }
    }
}

/// The model of a CPU, as it identifies itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Twelve letters, such as `GenuineIntel`.
    pub vendor: [u8; 12],
    /// Base and extended family, added.
    pub family: u32,
    /// Extended model above base model.
    pub model: u32,
}

impl Cpu {
    /// The one that this runs on; `None` where CPUs do not say it.
    #[must_use]
    pub fn here() -> Option<Self> {
        static FOUND: OnceLock<Option<Cpu>> = OnceLock::new();
        *FOUND.get_or_init(Self::ask)
    }

    #[cfg(target_arch = "x86_64")]
    fn ask() -> Option<Self> {
        let leaf = std::arch::x86_64::__cpuid(0);
        let mut vendor = [0; 12];
        for (to, word) in vendor.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        (leaf.eax >= 1).then(|| Self::of_signature(vendor, std::arch::x86_64::__cpuid(1).eax))
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn ask() -> Option<Self> {
        None
    }

    /// Reads family and model out of the first word of leaf 1.
    #[must_use]
    pub fn of_signature(vendor: [u8; 12], word: u32) -> Self {
        let (base, low) = (word >> 8 & 0xf, word >> 4 & 0xf);
        let family = if base == 0xf { base + (word >> 20 & 0xff) } else { base };
        let model = if matches!(base, 0x6 | 0xf) { low | (word >> 16 & 0xf) << 4 } else { low };
        Self { vendor, family, model }
    }

    /// Returns the row of the table for this model.
    #[must_use]
    pub fn row(self) -> Option<&'static Row> {
        TABLE.iter().find(|row| {
            row.vendor.as_bytes() == self.vendor
                && row.family == self.family
                && row.models.contains(&self.model)
        })
    }

    /// The path of this CPU if tiles and pairs work on it.
    #[must_use]
    pub fn path(self, amx: bool, dot: bool) -> Path {
        match self.row() {
            _ if amx => Path::Amx,
            Some(row) if dot && row.dot => Path::Dot,
            _ => Path::Widened,
        }
    }
}

impl std::fmt::Display for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let vendor = String::from_utf8_lossy(&self.vendor);
        write!(f, "{vendor}, family {}, model {}", self.family, self.model)
    }
}

/// CPU models whose vectors multiply bf16.
#[derive(Debug)]
pub struct Row {
    vendor: &'static str,
    family: u32,
    models: RangeInclusive<u32>,
    /// The name of the models.
    pub name: &'static str,
    /// Whether [`Path::Dot`] is faster than [`Path::Widened`].
    pub dot: bool,
    /// GFLOP/s of products of many rows on two cores, widened and in pairs, where they were measured; else `dot` follows from how many
    /// of both instructions the CPU starts in a cycle.
    pub measured: Option<[f64; 2]>,
}

const fn row(
    vendor: &'static str,
    family: u32,
    models: RangeInclusive<u32>,
    name: &'static str,
    dot: bool,
    measured: Option<[f64; 2]>,
) -> Row {
    Row { vendor, family, models, name, dot, measured }
}

const AMD: &str = "AuthenticAMD";
const INTEL: &str = "GenuineIntel";

/// The ranges of AMD's models are those of the Linux kernel (`arch/x86/kernel/cpu/amd.c`).
pub static TABLE: &[Row] = &[
    row(AMD, 25, 0x10..=0x1f, "Zen 4", true, None),
    row(AMD, 25, 0x60..=0xaf, "Zen 4", true, None),
    row(AMD, 26, 0x00..=0x2f, "Zen 5", true, Some([194.0, 414.0])),
    row(AMD, 26, 0x40..=0x4f, "Zen 5", true, None),
    row(AMD, 26, 0x60..=0x7f, "Zen 5", true, None),
    row(INTEL, 6, 143..=143, "Sapphire Rapids", false, None),
    row(INTEL, 6, 207..=207, "Emerald Rapids", false, Some([215.0, 137.0])),
    row(INTEL, 6, 173..=174, "Granite Rapids", false, None),
];

/// 0, or the path that was chosen.
static CHOSEN: AtomicU8 = AtomicU8::new(0);

/// A path that was chosen and does not work here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("products with bf16 weights cannot take the path {:?} here: {why}", path.name())]
pub struct Unavailable {
    /// The path.
    pub path: Path,
    /// The reason why it does not work.
    pub why: &'static str,
}

/// Chooses the path of products with bf16 weights; `None`: by the model of the CPU. Not to be changed while a kernel runs.
///
/// # Errors
/// A path that does not work here.
pub fn choose(path: Option<Path>) -> Result<(), Unavailable> {
    if let Some(path) = path.filter(|path| !path.works()) {
        return Err(Unavailable { path, why: path.why() });
    }
    CHOSEN.store(path.map_or(0, |path| path as u8), Ordering::Relaxed);
    Ok(())
}

/// Returns the path that [`choose`] set last.
#[must_use]
pub fn chosen() -> Option<Path> {
    let chosen = CHOSEN.load(Ordering::Relaxed);
    Path::ALL.into_iter().find(|path| *path as u8 == chosen)
}

/// The path of products with bf16 weights. Those with weights of few bits take it too, where rows are many.
#[must_use]
pub fn path() -> Path {
    chosen().filter(|path| path.works()).unwrap_or_else(|| match Cpu::here() {
        Some(cpu) => cpu.path(Path::Amx.works(), Path::Dot.works()),
        None => Path::Widened,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(vendor: &str, family: u32, model: u32) -> Cpu {
        Cpu { vendor: vendor.as_bytes().try_into().unwrap(), family, model }
    }

    #[test]
    fn the_model_decides_and_unknown_ones_widen() {
        for (vendor, family, model, path) in [
            // Genoa, Raphael, Bergamo; Milan, which has no such instruction, were it to announce one.
            (AMD, 25, 0x11, Path::Dot),
            (AMD, 25, 0x61, Path::Dot),
            (AMD, 25, 0xa0, Path::Dot),
            (AMD, 25, 0x01, Path::Widened),
            // Turin, Granite Ridge; what comes after Zen 5.
            (AMD, 26, 0x02, Path::Dot),
            (AMD, 26, 0x44, Path::Dot),
            (AMD, 26, 0x50, Path::Widened),
            (AMD, 27, 0x02, Path::Widened),
            // Sapphire, Emerald, Granite Rapids, Cooper Lake, unknown ones.
            (INTEL, 6, 143, Path::Widened),
            (INTEL, 6, 207, Path::Widened),
            (INTEL, 6, 173, Path::Widened),
            (INTEL, 6, 85, Path::Widened),
            (INTEL, 19, 1, Path::Widened),
            ("HygonGenuine", 25, 0x11, Path::Widened),
        ] {
            let cpu = cpu(vendor, family, model);
            assert_eq!(cpu.path(false, true), path, "{cpu}");
            assert_eq!(cpu.path(true, true), Path::Amx, "{cpu}");
            assert_eq!(cpu.path(false, false), Path::Widened, "{cpu}");
        }
    }

    #[test]
    fn the_table_takes_what_was_faster() {
        for row in TABLE {
            if let Some([widened, dot]) = row.measured {
                assert_eq!(row.dot, dot > widened, "{}", row.name);
            }
        }
        let first = |row: &Row| cpu(row.vendor, row.family, *row.models.start());
        assert!(TABLE.iter().all(|row| std::ptr::eq(first(row).row().unwrap(), row)));
    }

    #[test]
    fn signatures_are_read_as_vendors_describe() {
        let of = |vendor: &str, word| {
            let cpu = Cpu::of_signature(vendor.as_bytes().try_into().unwrap(), word);
            (cpu.family, cpu.model)
        };
        assert_eq!(of(INTEL, 0x000c_06f2), (6, 207));
        assert_eq!(of(INTEL, 0x0008_06f8), (6, 143));
        assert_eq!(of(AMD, 0x00a1_0f11), (25, 0x11));
        assert_eq!(of(AMD, 0x00b0_0f21), (26, 2));
    }

    #[test]
    fn what_does_not_work_is_refused() {
        for path in Path::ALL {
            match choose(Some(path)) {
                Ok(()) => assert_eq!(super::path(), path),
                Err(error) => assert!(!path.works() && error.to_string().contains(path.name()), "{error}"),
            }
        }
        choose(None).unwrap();
    }
}
