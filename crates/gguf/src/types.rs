//! The types of a tensor's values.

use crate::blocks;

/// Type of a tensor's values. Those of few bits are stored in blocks that share scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorType {
    /// 32 bits.
    F32,
    /// 16 bits, half precision.
    F16,
    /// 16 bits with the exponent of f32.
    Bf16,
    /// 4 bits, 32 values with a scale.
    Q4_0,
    /// 4 bits, 32 values with a scale and a minimum.
    Q4_1,
    /// 5 bits, 32 values with a scale.
    Q5_0,
    /// 8 bits, 32 values with a scale.
    Q8_0,
    /// 4 bits, 256 values in 8 groups with a scale and a minimum.
    Q4K,
    /// 5 bits, 256 values in 8 groups with a scale and a minimum.
    Q5K,
    /// 6 bits, 256 values in 16 groups with a scale.
    Q6K,
}

/// Form of a type in a file.
struct Row {
    kind: TensorType,
    id: u32,
    name: &'static str,
    block_values: usize,
    block_bytes: usize,
    decode: fn(&[u8], &mut [f32]),
}

const fn row(
    kind: TensorType,
    id: u32,
    name: &'static str,
    (block_values, block_bytes): (usize, usize),
    decode: fn(&[u8], &mut [f32]),
) -> Row {
    Row { kind, id, name, block_values, block_bytes, decode }
}

/// The supported types. Source: `ggml.h`, `enum ggml_type`.
const TYPES: &[Row] = &[
    row(TensorType::F32, 0, "F32", (1, 4), blocks::f32),
    row(TensorType::F16, 1, "F16", (1, 2), blocks::f16),
    row(TensorType::Q4_0, 2, "Q4_0", (32, 18), blocks::q4_0),
    row(TensorType::Q4_1, 3, "Q4_1", (32, 20), blocks::q4_1),
    row(TensorType::Q5_0, 6, "Q5_0", (32, 22), blocks::q5_0),
    row(TensorType::Q8_0, 8, "Q8_0", (32, 34), blocks::q8_0),
    row(TensorType::Q4K, 12, "Q4_K", (256, 144), blocks::q4_k),
    row(TensorType::Q5K, 13, "Q5_K", (256, 176), blocks::q5_k),
    row(TensorType::Q6K, 14, "Q6_K", (256, 210), blocks::q6_k),
    row(TensorType::Bf16, 30, "BF16", (1, 2), blocks::bf16),
];

/// Names of types that other programs write and this crate does not read, for messages.
const OTHERS: &[(u32, &str)] = &[
    (7, "Q5_1"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

impl TensorType {
    fn row(self) -> &'static Row {
        // Every type has a row; a test checks it.
        TYPES.iter().find(|row| row.kind == self).unwrap_or(&TYPES[0])
    }

    /// Returns the type with a number in the file, or a message.
    pub(crate) fn from_id(id: u32) -> Result<Self, String> {
        TYPES.iter().find(|row| row.id == id).map(|row| row.kind).ok_or_else(|| {
            let known: Vec<_> = TYPES.iter().map(|row| row.name).collect();
            let name = OTHERS.iter().find(|other| other.0 == id).map_or("an unknown type", |other| other.1);
            format!("its values are of {name} (number {id}), expected one of {}", known.join(", "))
        })
    }

    /// Returns all types.
    pub fn all() -> impl Iterator<Item = Self> {
        TYPES.iter().map(|row| row.kind)
    }

    /// Returns the number of the type in a file.
    #[must_use]
    pub fn id(self) -> u32 {
        self.row().id
    }

    /// Returns the name, as in llama.cpp.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the number of values in a block. The length of a row is a multiple of it.
    #[must_use]
    pub fn block_values(self) -> usize {
        self.row().block_values
    }

    /// Returns the number of bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.row().block_bytes
    }

    /// Converts whole blocks to f32.
    pub(crate) fn decode(self, bytes: &[u8], to: &mut [f32]) {
        (self.row().decode)(bytes, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_has_a_row_of_its_own() {
        for row in TYPES {
            assert_eq!(row.kind.id(), row.id);
            assert_eq!(TensorType::from_id(row.id), Ok(row.kind));
            assert!(OTHERS.iter().all(|other| other.0 != row.id));
        }
        let error = TensorType::from_id(10).unwrap_err();
        assert!(error.contains("Q2_K (number 10), expected one of F32, F16, Q4_0"), "{error}");
    }
}
