//! Reads metadata and the list of tensors.

use std::collections::HashSet;
use std::io::Read;

use crate::metadata::{LIST, Metadata, Value};
use crate::types::TensorType;
use crate::{ALIGNMENT, ALIGNMENT_KEY, MAGIC};

/// Largest accepted size of metadata and list of tensors. A vocabulary of 256,000 tokens takes about 10 MB.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;
/// Largest accepted number of values in the metadata of a file, those in lists included.
const MAX_VALUES: u64 = 1 << 23;
/// Largest accepted number of tensors. Llama with 405 billion weights has 1,138.
const MAX_TENSORS: u64 = 1 << 16;
/// Largest accepted number of dimensions, that of ggml.
const MAX_DIMENSIONS: u32 = 4;

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    name: String,
    shape: Vec<usize>,
    kind: TensorType,
    /// Place of its first byte in the file.
    at: u64,
}

impl Tensor {
    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the sizes, the longest stride first, as in PyTorch. The file has them in the other order.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the type of the values.
    #[must_use]
    pub fn kind(&self) -> TensorType {
        self.kind
    }

    /// Returns the number of values.
    #[must_use]
    pub fn num_values(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the place of the first byte in the file.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }
}

/// Returns the number of bytes of a tensor, or a message. A row consists of whole blocks.
pub(crate) fn num_bytes(shape: &[usize], kind: TensorType) -> Result<u64, String> {
    let columns = shape.last().copied().unwrap_or(1);
    if !columns.is_multiple_of(kind.block_values()) {
        return Err(format!(
            "its rows have {columns} values, expected a multiple of {}, the block of {}",
            kind.block_values(),
            kind.name()
        ));
    }
    let values = shape.iter().try_fold(1u64, |n, &side| n.checked_mul(side as u64)).filter(|&n| n < 1 << 48);
    match values {
        Some(n) if n > 0 => Ok(n / kind.block_values() as u64 * kind.block_bytes() as u64),
        _ => Err(format!("its shape is {shape:?}, expected sizes above 0 with a product below 2^48")),
    }
}

/// Start of a file, before the values.
pub(crate) struct Header {
    pub metadata: Metadata,
    pub tensors: Vec<Tensor>,
}

impl Header {
    /// Reads a header from the start of a file of `file_bytes` bytes. The error is a message without the file's name.
    pub fn read(from: impl Read, file_bytes: u64) -> Result<Self, String> {
        let mut reader = Reader { from, at: 0, end: file_bytes.min(MAX_HEADER_BYTES), file_bytes, values: 0 };
        let magic: [u8; 4] = reader.bytes("the magic number")?;
        if magic != MAGIC {
            return Err(format!("it begins with {magic:?}, expected the letters GGUF; is this a GGUF file?"));
        }
        match reader.u32("the version")? {
            2 | 3 => {}
            version if version.swap_bytes() < 1 << 16 => {
                return Err("it is big-endian, expected a little-endian file".into());
            }
            version => {
                return Err(format!("its version is {version}, expected 2 or 3; convert it with llama.cpp"));
            }
        }
        let num_tensors = reader.u64("the number of tensors")?;
        let num_keys = reader.u64("the number of keys")?;
        if num_tensors > MAX_TENSORS {
            return Err(format!("it has {num_tensors} tensors, expected at most {MAX_TENSORS}"));
        }
        let metadata = reader.metadata(num_keys)?;
        let find = |key: &str| metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value);
        if let Some(parts) = find("split.count")
            && parts.count() != Some(1)
            && parts.count() != Some(0)
        {
            return Err(format!(
                "it is one part of a split file (split.count is {parts:?}), expected a whole file; join the parts with \
                 `llama-gguf-split --merge`"
            ));
        }
        let alignment = match find(ALIGNMENT_KEY) {
            None => ALIGNMENT,
            Some(value) => match value.count() {
                Some(n) if n.is_power_of_two() && (8..=1 << 20).contains(&n) => n,
                _ => {
                    return Err(format!(
                        "{ALIGNMENT_KEY} is {value:?}, expected a power of two from 8 to 1048576"
                    ));
                }
            },
        };
        let tensors = reader.tensors(num_tensors, alignment)?;
        Ok(Self { metadata, tensors })
    }
}

/// A reader that knows how many bytes are left.
struct Reader<R> {
    from: R,
    at: u64,
    /// End of what may be read.
    end: u64,
    file_bytes: u64,
    /// Number of values of the metadata so far.
    values: u64,
}

impl<R: Read> Reader<R> {
    /// Checks that `n` more bytes exist, before memory is taken for them.
    fn needs(&self, n: u64, what: &str) -> Result<(), String> {
        if n <= self.end - self.at {
            return Ok(());
        }
        Err(match self.file_bytes > self.end {
            true => {
                format!("its header ends within {what}, {MAX_HEADER_BYTES} bytes being the limit of a header")
            }
            false => {
                let left = self.end - self.at;
                format!(
                    "it ends within {what}: {left} bytes are left, expected {n}; was it copied completely?"
                )
            }
        })
    }

    fn fill(&mut self, to: &mut [u8], what: &str) -> Result<(), String> {
        self.needs(to.len() as u64, what)?;
        self.from.read_exact(to).map_err(|e| format!("{what} cannot be read: {e}"))?;
        self.at += to.len() as u64;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.bytes(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.bytes(what)?))
    }

    fn text(&mut self, what: &str) -> Result<String, String> {
        let len = self.u64(what)?;
        self.needs(len, what)?;
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|e| format!("{what} is not UTF-8: {e}"))
    }

    fn metadata(&mut self, count: u64) -> Result<Metadata, String> {
        // A key has at least the length of its name, a type and one byte.
        self.needs(count.saturating_mul(13), "the metadata")?;
        let (mut metadata, mut known) = (Vec::new(), HashSet::new());
        for i in 0..count {
            let key = self.text(&format!("the name of key {i}"))?;
            let kind = self.u32(&key)?;
            let value = self.value(kind, &key)?;
            if !known.insert(key.clone()) {
                return Err(format!("key {key} appears twice"));
            }
            metadata.push((key, value));
        }
        Ok(metadata)
    }

    /// Reads a value of the type with this number.
    fn value(&mut self, kind: u32, key: &str) -> Result<Value, String> {
        self.values += 1;
        if self.values > MAX_VALUES {
            return Err(format!(
                "its metadata has more than {MAX_VALUES} values; the limit is reached in {key}"
            ));
        }
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.bytes(key)?)),
            1 => Value::I8(i8::from_le_bytes(self.bytes(key)?)),
            2 => Value::U16(u16::from_le_bytes(self.bytes(key)?)),
            3 => Value::I16(i16::from_le_bytes(self.bytes(key)?)),
            4 => Value::U32(self.u32(key)?),
            5 => Value::I32(i32::from_le_bytes(self.bytes(key)?)),
            6 => Value::F32(f32::from_le_bytes(self.bytes(key)?)),
            7 => match self.bytes(key)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(format!("key {key} is the truth value {other}, expected 0 or 1")),
            },
            8 => Value::Text(self.text(key)?),
            LIST => {
                let (kind, count) = (self.u32(key)?, self.u64(key)?);
                if kind == LIST {
                    return Err(format!("key {key} is a list of lists, expected a list of numbers or texts"));
                }
                let least = match kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    _ => 8,
                };
                self.needs(count.saturating_mul(least), key)?;
                if count > MAX_VALUES - self.values {
                    return Err(format!(
                        "its metadata has more than {MAX_VALUES} values; the limit is reached in {key}"
                    ));
                }
                let mut list = Vec::with_capacity(count as usize);
                for _ in 0..count {
                    list.push(self.value(kind, key)?);
                }
                Value::List(list)
            }
            10 => Value::U64(self.u64(key)?),
            11 => Value::I64(i64::from_le_bytes(self.bytes(key)?)),
            12 => Value::F64(f64::from_le_bytes(self.bytes(key)?)),
            other => return Err(format!("key {key} is of type {other}, expected a type from 0 to 12")),
        })
    }

    /// Reads the list of tensors. Their places follow from their order and sizes, and the file has to end with the last one.
    fn tensors(&mut self, count: u64, alignment: u64) -> Result<Vec<Tensor>, String> {
        let (mut tensors, mut known, mut next) = (Vec::new(), HashSet::new(), 0u64);
        let mut end = 0;
        for i in 0..count {
            let name = self.text(&format!("the name of tensor {i}"))?;
            let wrong = |what: String| format!("tensor {name}: {what}");
            let dimensions = self.u32(&name)?;
            if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
                return Err(wrong(format!("it has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")));
            }
            let mut shape = Vec::new();
            for _ in 0..dimensions {
                let side = self.u64(&name)?;
                shape.push(usize::try_from(side).map_err(|_| wrong(format!("a size is {side}")))?);
            }
            shape.reverse();
            let kind = TensorType::from_id(self.u32(&name)?).map_err(wrong)?;
            let bytes = num_bytes(&shape, kind).map_err(wrong)?;
            let at = self.u64(&name)?;
            if at != next {
                return Err(wrong(format!(
                    "its values begin at byte {at} of the data, expected {next}, after those of the tensor before"
                )));
            }
            // Sizes are below 2^50, and their number below 2^16.
            end = next + bytes;
            next = end.next_multiple_of(alignment);
            if end > self.file_bytes {
                return Err(wrong(format!(
                    "its {bytes} bytes end beyond the file of {} bytes; was it copied completely?",
                    self.file_bytes
                )));
            }
            if !known.insert(name.clone()) {
                return Err(format!("tensor {name} appears twice"));
            }
            tensors.push(Tensor { name, shape, kind, at });
        }
        let data = self.at.next_multiple_of(alignment);
        for tensor in &mut tensors {
            tensor.at += data;
        }
        // The last tensor may be padded or not.
        let (least, most) = (if count == 0 { self.at } else { data + end }, data + next);
        if !(least..=most).contains(&self.file_bytes) {
            return Err(format!(
                "it has {} bytes, expected {least} to {most} by the sizes of its tensors; was it copied completely?",
                self.file_bytes
            ));
        }
        Ok(tensors)
    }
}
