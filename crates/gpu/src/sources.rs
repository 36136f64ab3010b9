//! The source text of the kernels.

/// Text of the header that every file includes.
pub const PRIMITIVES: &str = include_str!("../cuda/prim.cuh");

/// Name and text of each file of kernels.
pub const FILES: &[(&str, &str)] = &[
    ("attention", include_str!("../cuda/attention.cu")),
    ("conv", include_str!("../cuda/conv.cu")),
    ("delta", include_str!("../cuda/delta.cu")),
    ("elementwise", include_str!("../cuda/elementwise.cu")),
    ("experts", include_str!("../cuda/experts.cu")),
    ("head", include_str!("../cuda/head.cu")),
    ("linear", include_str!("../cuda/linear.cu")),
    ("norms", include_str!("../cuda/norms.cu")),
    ("plain_attention", include_str!("../cuda/plain_attention.cu")),
    ("recurrent", include_str!("../cuda/recurrent.cu")),
    ("sample", include_str!("../cuda/sample.cu")),
    ("sums", include_str!("../cuda/sums.cu")),
];
