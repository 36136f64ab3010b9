//! Launchers: a function for each kernel, which returns the [`Kernel`] with its arguments. `build/launchers.rs` generates them from
//! the kernels' signatures.
//!
//! A launcher takes arrays ([`Element`]), sizes and numbers in the order of the kernel's parameters. It checks the dtypes of arrays whose
//! dtype is fixed, but not those inside structures. [`Gpu::launch`](crate::Gpu::launch) and its short forms queue the kernel. The callers
//! ensure that sizes match.

use std::marker::PhantomData;

use crate::device::{Array, Dtype};

pub use generated::*;

#[allow(
    clippy::too_many_arguments,
    clippy::wildcard_imports,
    reason = "a launcher has the parameters of its kernel"
)]
mod generated {
    use super::{Arg, Element, Field, Kernel};
    use crate::device::Dtype;

    include!(concat!(env!("OUT_DIR"), "/launchers.rs"));
}

/// A kernel and its arguments, which borrow the arrays until the kernel is queued. A kernel writes to arrays even if they are borrowed
/// as shared.
#[derive(Debug)]
pub struct Kernel<'a> {
    /// Name of the kernel, as `file/name`.
    name: &'static str,
    early: bool,
    args: Vec<Arg>,
    arrays: PhantomData<&'a Array>,
}

impl Kernel<'_> {
    pub(crate) fn new(name: &'static str, early: bool, args: Vec<Arg>) -> Self {
        Self { name, early, args, arrays: PhantomData }
    }

    /// Returns true for a kernel of decoding steps. It may start while the kernels before it run, since it waits for them itself.
    pub(crate) fn starts_early(&self) -> bool {
        self.early
    }

    pub(crate) fn into_parts(self) -> (&'static str, Vec<Arg>) {
        (self.name, self.args)
    }
}

/// An element of an array. A kernel reads or writes the array from this element on. The default is an absent array.
#[derive(Clone, Copy, Debug)]
pub struct Element<'a> {
    /// Address on the device, or 0 if the array is absent.
    pub(crate) at: u64,
    pub(crate) dtype: Dtype,
    array: PhantomData<&'a Array>,
}

impl Default for Element<'_> {
    fn default() -> Self {
        Self::new(0, Dtype::F32)
    }
}

impl<'a> From<&'a Array> for Element<'a> {
    fn from(array: &'a Array) -> Self {
        array.element(0)
    }
}

impl<'a> From<&'a mut Array> for Element<'a> {
    fn from(array: &'a mut Array) -> Self {
        array.element(0)
    }
}

impl<T: Into<Self>> From<Option<T>> for Element<'_> {
    fn from(array: Option<T>) -> Self {
        array.map(T::into).unwrap_or_default()
    }
}

impl Element<'_> {
    pub(crate) fn new(at: u64, dtype: Dtype) -> Self {
        Self { at, dtype, array: PhantomData }
    }

    fn array(self) -> Arg {
        Arg::Array(self.at, self.dtype)
    }

    /// Converts the element for a parameter whose dtype is fixed.
    fn pointer(self, parameter: &'static str, dtype: Dtype) -> Arg {
        match self.at == 0 || self.dtype == dtype {
            true => Arg::Pointer(self.at),
            false => Arg::Mismatch(parameter, self.dtype),
        }
    }
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arg {
    /// The structure `Array` of prim.cuh.
    Array(u64, Dtype),
    Pointer(u64),
    /// An array for the parameter of this name, whose elements have another size. [`Gpu::launch`](crate::Gpu::launch) refuses it.
    Mismatch(&'static str, Dtype),
    Long(i64),
    Word(u64),
    /// A size, which kernels read as a 32-bit integer. [`Gpu::launch`](crate::Gpu::launch) refuses one that does not fit.
    Size(usize),
    Float(f32),
    /// A structure of 4-byte words.
    Fields {
        words: [u32; 8],
        count: usize,
        /// Largest size among the fields.
        most: usize,
    },
}

/// A field of a structure that is an argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Field {
    /// A pointer, which takes two words.
    Pointer(u64),
    /// A size; see [`Arg::Size`].
    Size(usize),
    Float(f32),
}

impl Arg {
    /// Creates a structure of at most eight words.
    pub(crate) fn fields(fields: &[Field]) -> Self {
        let (mut words, mut count, mut most) = ([0; 8], 0, 0);
        let mut add = |word| {
            words[count] = word;
            count += 1;
        };
        for field in fields {
            match *field {
                Field::Pointer(at) => [at as u32, (at >> 32) as u32].into_iter().for_each(&mut add),
                Field::Size(n) => {
                    most = most.max(n);
                    add(n as u32);
                }
                Field::Float(x) => add(x.to_bits()),
            }
        }
        Self::Fields { words, count, most }
    }

    /// Returns the largest size that the kernel reads as a 32-bit integer.
    pub(crate) fn most(&self) -> usize {
        match *self {
            Self::Size(n) | Self::Fields { most: n, .. } => n,
            _ => 0,
        }
    }

    /// Encodes the argument in C's layout. Returns the bytes, at a multiple of 8, and the number of bytes used.
    fn encode(self) -> ([u64; 4], usize) {
        let mut out = [0; 4];
        let size = match self {
            Self::Array(at, dtype) => {
                out[..2].copy_from_slice(&[at, u64::from(dtype == Dtype::Bf16)]);
                16
            }
            Self::Pointer(x) | Self::Word(x) => {
                out[0] = x;
                8
            }
            Self::Mismatch(..) => 0,
            Self::Long(x) => {
                out[0] = x.cast_unsigned();
                8
            }
            Self::Size(x) => {
                out[0] = u64::from(x as u32);
                4
            }
            Self::Float(x) => {
                out[0] = u64::from(x.to_bits());
                4
            }
            Self::Fields { words, count, .. } => {
                bytemuck::cast_slice_mut::<u64, u32>(&mut out)[..8].copy_from_slice(&words);
                4 * count
            }
        };
        (out, size)
    }
}

/// The arguments of a launch, in the form that `cuLaunchKernel` takes.
#[derive(Clone)]
pub(crate) struct Args {
    values: Vec<[u64; 4]>,
    #[cfg_attr(
        not(feature = "emulator"),
        expect(dead_code, reason = "the emulator compares them with parameters")
    )]
    pub(crate) sizes: Vec<usize>,
}

impl Args {
    pub(crate) fn new(args: &[Arg]) -> Self {
        let (values, sizes) = args.iter().map(|arg| arg.encode()).unzip();
        Self { values, sizes }
    }

    pub(crate) fn pointers(&mut self) -> Vec<*mut std::ffi::c_void> {
        self.values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect()
    }
}

/// A kernel and its grid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    /// Name of the kernel, as `file/name`.
    pub kernel: &'static str,
    pub grid: [usize; 3],
    pub threads: u32,
    /// Number of bytes of dynamic shared memory.
    pub shared: usize,
    /// True if the kernel may start while the kernels before it run.
    pub early: bool,
}

impl Launch {
    pub(crate) fn file_and_name(&self) -> (&'static str, &'static str) {
        self.kernel.split_once('/').unwrap_or((self.kernel, ""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_structure_has_the_layout_of_c() {
        let at = 0x0123_4567_89ab_cdef;
        let pointer = Field::Pointer(at);
        let arg = Arg::fields(&[pointer, Field::Size(7), Field::Size(1), Field::Float(1.0)]);
        let (bytes, size) = arg.encode();
        assert_eq!((bytes, size), ([at, 1 << 32 | 7, 0x3f80_0000, 0], 20));
    }
}
