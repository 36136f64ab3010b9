//! Choice of the instructions that multiply bf16 weights, by CPU model unless the weight says otherwise
//! ([`Arithmetic`](crate::Arithmetic)).
//!
//! There are two ways to multiply a bf16 weight. The first widens it to f32 and rounds nothing. The second also rounds the other
//! factor to bf16 and sums products of pairs, in vectors (`VDPBF16PS`, AVX512-BF16) or in matrix tiles (AMX).
//!
//! Tiles are several times as fast as vectors on every CPU that has them. The vector instruction is not always faster than
//! widening. Zen 4 and 5 start as many of these instructions per cycle as multiply-adds, so the instruction doubles the rate.
//! Sapphire and Emerald Rapids start one of them in two cycles but four multiply-adds, so the instruction halves the rate.
//!
//! Therefore [`TABLE`] decides by vendor, family and model. The choice never depends on a measurement at run time, so that runs
//! on the same model give the same bits. On models that are not in the table, weights are widened.

use std::ops::RangeInclusive;
use std::sync::OnceLock;

use crate::{probe, tiles};

/// A way to multiply by bf16 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// Widening to f32, without rounding.
    Widened,
    /// Products of bf16 pairs in vectors.
    Dot,
    /// Products of bf16 in matrix tiles.
    Amx,
}

impl Path {
    /// All paths, from the slowest to the fastest.
    pub const ALL: [Self; 3] = [Self::Widened, Self::Dot, Self::Amx];

    /// Returns the name used in settings.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Widened => "widened",
            Self::Dot => "dot",
            Self::Amx => "amx",
        }
    }

    /// Returns true if the CPU runs the instructions of this path and the user has not disabled them.
    #[must_use]
    pub fn works(self) -> bool {
        match self {
            Self::Widened => true,
            Self::Dot => tiles::has_pairs(),
            Self::Amx => tiles::available(),
        }
    }

    /// Returns the reason why the path works or does not work.
    #[must_use]
    pub fn why(self) -> &'static str {
        match self {
            Self::Widened => "it works on every CPU",
            Self::Dot => &probe::bf16().why,
            Self::Amx => &probe::amx().why,
        }
    }
}

/// A CPU model, as reported by the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Vendor name of twelve letters, such as `GenuineIntel`.
    pub vendor: [u8; 12],
    /// Sum of base and extended family.
    pub family: u32,
    /// Model number, with the extended model in its upper bits.
    pub model: u32,
}

impl Cpu {
    /// Returns the model of the current CPU, or `None` on architectures whose CPUs do not report it.
    #[must_use]
    pub fn here() -> Option<Self> {
        static FOUND: OnceLock<Option<Cpu>> = OnceLock::new();
        *FOUND.get_or_init(Self::ask)
    }

    // An interpreter of Rust does not know the instruction.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    fn ask() -> Option<Self> {
        let leaf = std::arch::x86_64::__cpuid(0);
        let mut vendor = [0; 12];
        for (to, word) in vendor.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        (leaf.eax >= 1).then(|| Self::of_signature(vendor, std::arch::x86_64::__cpuid(1).eax))
    }

    #[cfg(any(not(target_arch = "x86_64"), miri))]
    fn ask() -> Option<Self> {
        None
    }

    /// Decodes family and model from the first word of CPUID leaf 1.
    #[must_use]
    pub fn of_signature(vendor: [u8; 12], word: u32) -> Self {
        let (base, low) = (word >> 8 & 0xf, word >> 4 & 0xf);
        let family = if base == 0xf { base + (word >> 20 & 0xff) } else { base };
        let model = if matches!(base, 0x6 | 0xf) { low | (word >> 16 & 0xf) << 4 } else { low };
        Self { vendor, family, model }
    }

    /// Returns the row of [`TABLE`] for this model.
    #[must_use]
    pub fn row(self) -> Option<&'static Row> {
        TABLE.iter().find(|row| {
            row.vendor.as_bytes() == self.vendor
                && row.family == self.family
                && row.models.contains(&self.model)
        })
    }

    /// Returns the path for this CPU. `amx` and `dot` are true if tiles and bf16 pairs work on it.
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

/// A row of [`TABLE`]: CPU models whose vectors multiply bf16.
#[derive(Debug)]
pub struct Row {
    vendor: &'static str,
    family: u32,
    models: RangeInclusive<u32>,
    /// Name of the models.
    pub name: &'static str,
    /// True if [`Path::Dot`] is faster than [`Path::Widened`].
    pub dot: bool,
    /// Measured GFLOP/s of products of many rows on two cores: widened, and in pairs. If `None`, nothing was measured, and `dot`
    /// follows from the number of instructions of each kind that the CPU starts per cycle.
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

/// The ranges of AMD models are taken from the Linux kernel (`arch/x86/kernel/cpu/amd.c`).
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

/// Error of [`Arithmetic::check`](crate::Arithmetic::check): the path does not work on this CPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this machine cannot use the path {:?} for products with bf16 weights: {why}", path.name())]
pub struct Unavailable {
    pub path: Path,
    pub why: &'static str,
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
            // Genoa, Raphael and Bergamo; then Milan, which must not use the instruction even if it reports it.
            (AMD, 25, 0x11, Path::Dot),
            (AMD, 25, 0x61, Path::Dot),
            (AMD, 25, 0xa0, Path::Dot),
            (AMD, 25, 0x01, Path::Widened),
            // Turin and Granite Ridge; then models after Zen 5.
            (AMD, 26, 0x02, Path::Dot),
            (AMD, 26, 0x44, Path::Dot),
            (AMD, 26, 0x50, Path::Widened),
            (AMD, 27, 0x02, Path::Widened),
            // Sapphire and Emerald Rapids, Granite Rapids, Cooper Lake; then unknown models.
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
    fn the_table_chooses_the_faster_path() {
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
}
