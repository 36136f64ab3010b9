//! Values of weights in main memory.

use std::ops::Range;

use half::bf16;

#[derive(Clone, Debug)]
pub enum Values {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// Values of a range of a weight, to be changed.
#[derive(Debug)]
pub(crate) enum ValuesMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
}

impl Values {
    pub fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::Bf16(data) => data.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a range of elements.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Self {
        match self {
            Self::F32(data) => Self::F32(data[range].to_vec()),
            Self::Bf16(data) => Self::Bf16(data[range].to_vec()),
        }
    }

    /// Returns these elements from element `start` on, between zeros, `len` elements in total.
    pub(crate) fn padded(&self, start: usize, len: usize) -> Self {
        fn padded<T: Clone + Default>(data: &[T], start: usize, len: usize) -> Vec<T> {
            let mut all = vec![T::default(); len];
            all[start..][..data.len()].clone_from_slice(data);
            all
        }
        match self {
            Self::F32(data) => Self::F32(padded(data, start, len)),
            Self::Bf16(data) => Self::Bf16(padded(data, start, len)),
        }
    }

    /// Returns a range of elements to be changed.
    pub(crate) fn part_mut(&mut self, range: Range<usize>) -> ValuesMut<'_> {
        match self {
            Self::F32(data) => ValuesMut::F32(&mut data[range]),
            Self::Bf16(data) => ValuesMut::Bf16(&mut data[range]),
        }
    }

    /// Returns the bytes of a range of elements.
    pub(crate) fn bytes(&self, range: Range<usize>) -> &[u8] {
        match self {
            Self::F32(data) => bytemuck::cast_slice(&data[range]),
            Self::Bf16(data) => bytemuck::cast_slice(&data[range]),
        }
    }

    /// Concatenates values. If the dtypes differ, the result is f32.
    pub fn concat(parts: Vec<Self>) -> Self {
        if parts.iter().all(|part| matches!(part, Self::Bf16(_))) {
            let data = parts.into_iter().filter_map(|part| match part {
                Self::Bf16(data) => Some(data),
                Self::F32(_) => None,
            });
            return Self::Bf16(data.flatten().collect());
        }
        let wide = |part| match part {
            Self::F32(data) => data,
            Self::Bf16(data) => data.into_iter().map(bf16::to_f32).collect(),
        };
        Self::F32(parts.into_iter().flat_map(wide).collect())
    }

    /// Rounds to nearest even bfloat16.
    #[must_use]
    pub fn into_bf16(self) -> Self {
        match self {
            Self::F32(data) => Self::Bf16(data.into_iter().map(bf16::from_f32).collect()),
            bf16 => bf16,
        }
    }
}
